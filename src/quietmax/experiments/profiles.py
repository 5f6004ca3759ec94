"""Profiles: how much work an evaluation is, and the cells it consists of.

``paper``: the paper's numbers of repeats, shadow networks and epochs. ``quick``: minutes on two cores; the same code
with fewer repeats and shadow networks (and on photographs fewer epochs), so its numbers scatter more and its attacks
are weaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.data.registry import dataset
from quietmax.errors import InvalidInput
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.paper import EPSILONS

Part = Literal["accuracy", "algorithm1", "dpsgd", "like-for-like"]
PARTS: tuple[Part, ...] = ("accuracy", "algorithm1", "dpsgd", "like-for-like")
LIKE_FOR_LIKE_EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
LIKE_FOR_LIKE_SETS = ("location", "mnist", "adult", "mnist-5k")
PAPER_REPEATS = 10


@dataclass(frozen=True)
class Work:
    """What a profile does with one data set.

    ``sweeps`` and ``private`` are how many of the repeats also train DP-SGD as published, and the proven methods.
    """

    effort: Effort
    repeats: int
    sweeps: int
    private: int
    queries: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class _Quick:
    shadows: int
    repeats: int
    epochs: int = 100
    attack_epochs: int = 20
    sweeps: int = 0
    private: int = 0


_QUICK = {
    "location": _Quick(shadows=20, repeats=3, attack_epochs=50, sweeps=1, private=3),
    "adult": _Quick(shadows=5, repeats=3, attack_epochs=10, private=3),
    "mnist": _Quick(shadows=8, repeats=2, private=1),
    "mnist-5k": _Quick(shadows=4, repeats=1, epochs=30, private=1),
}
_QUICK_OTHERWISE = _Quick(shadows=2, repeats=1, epochs=30, attack_epochs=10)


def checked_profile(profile: str) -> str:
    """The profile's name, if there is one of it."""
    if profile not in ("quick", "paper"):
        raise InvalidInput(f"There is no profile {profile!r}; choose quick or paper.")
    return profile


def work(name: str, profile: str) -> Work:
    """What ``profile`` does with a registered data set.

    >>> work("mnist", "paper").effort.shadows
    50
    """
    registered = dataset(name)
    if checked_profile(profile) == "paper":
        effort = Effort(registered.records, registered.shadow_models, registered.alpha)
        private = PAPER_REPEATS if name in LIKE_FOR_LIKE_SETS else 0
        return Work(effort, PAPER_REPEATS, PAPER_REPEATS, private, (1, 100))
    quick = _QUICK.get(name, _QUICK_OTHERWISE)
    effort = Effort(registered.records, quick.shadows, registered.alpha, quick.epochs, quick.attack_epochs)
    return Work(effort, quick.repeats, quick.sweeps, quick.private)


def reproduction_cells(
    names: Sequence[str],
    profile: str,
    *,
    parts: Sequence[Part] = PARTS,
    repeats: int | None = None,
    seed: int = 0,
) -> list[Trial]:
    """The cells of the paper's evaluation and of the like-for-like comparison, a group's ``plain`` cell first."""
    trials = []
    for name in names:
        chosen = work(name, profile)
        count = chosen.repeats if repeats is None else repeats
        source = Source.of(name)
        for repeat in range(count):
            group = Group(source, chosen.effort, repeat, seed)
            trials.append(Trial(group, "plain"))
            if "accuracy" in parts:
                trials.append(Trial(group, "original"))
            if "algorithm1" in parts:
                trials += [
                    Trial(group, f"algorithm1-{noise}", epsilon, 1)
                    for noise in ("gaussian", "laplace")
                    for epsilon in EPSILONS
                ]
            if "dpsgd" in parts and repeat < chosen.sweeps:
                trials += [
                    Trial(group, f"published-{accountant}", epsilon)
                    for accountant in PUBLISHED_ACCOUNTANTS
                    for epsilon in EPSILONS
                ]
            if "like-for-like" in parts and repeat < chosen.private:
                trials += private_cells(group, LIKE_FOR_LIKE_EPSILONS, chosen.queries)
    return trials


def private_cells(group: Group, epsilons: Sequence[float], queries: Sequence[int]) -> list[Trial]:
    """The proven methods at every epsilon; those that charge per answer also at every number of queries."""
    return [
        *(Trial(group, name, epsilon) for name in ("head", "dpsgd") for epsilon in epsilons),
        *(
            Trial(group, name, epsilon, count)
            for name in ("teachers", "sampled-neuron")
            for count in queries
            for epsilon in epsilons
        ),
    ]
