"""The attacks by name: the built-in ones, and those of plug-ins.

Another package adds an attack by naming, as an entry point in the group `quietmax.attacks`, a function (or class) that
takes the keyword arguments ``models`` and ``seed`` and returns an `Attack`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType

from quietmax.attacks.base import Attack
from quietmax.attacks.lira import LiRA
from quietmax.attacks.rmia import RMIA
from quietmax.attacks.shadow import Shadow
from quietmax.attacks.threshold import Threshold
from quietmax.errors import InvalidInput, unknown_name

ENTRY_POINT_GROUP = "quietmax.attacks"
AttackFactory = Callable[..., Attack]

BUILT_IN: dict[str, AttackFactory] = {
    "shadow": Shadow,
    "threshold": Threshold,
    "threshold-confidence": partial(Threshold, statistic="confidence"),
    "threshold-entropy": partial(Threshold, statistic="entropy"),
    "lira": LiRA,
    "lira-offline": partial(LiRA, mode="offline"),
    "rmia": RMIA,
    "rmia-offline": partial(RMIA, mode="offline"),
}


def registered() -> Mapping[str, AttackFactory]:
    """All attacks by name: the built-in ones first, then those of installed plug-ins.

    >>> registered()["lira"](models=16, seed=1).name
    'lira'
    """
    known = dict(BUILT_IN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in known:
            warnings.warn(
                f"The attack plug-in '{entry.name}' is left aside: its name is taken.", stacklevel=2
            )
            continue
        try:
            factory = entry.load()
        except Exception as error:
            warnings.warn(f"The attack plug-in '{entry.name}' failed to load: {error}", stacklevel=2)
            continue
        if not callable(factory):
            warnings.warn(
                f"The attack plug-in '{entry.name}' is left aside: it names no function.", stacklevel=2
            )
            continue
        known[entry.name] = factory
    return MappingProxyType(known)


def named(name: str, *, models: int, seed: int = 0) -> Attack:
    """The attack of that name with this many shadow networks, or a refusal that suggests the nearest name."""
    known = registered()
    if name not in known:
        raise unknown_name("attack", name, known)
    made = known[name](models=models, seed=seed)
    if not isinstance(made, Attack):
        raise InvalidInput(
            f"The attack plug-in '{name}' gives a {type(made).__name__}, but must give a quietmax.attacks.Attack; "
            "correct the plug-in."
        )
    return made
