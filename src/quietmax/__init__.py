"""Private predictions from ordinary classifiers, with guarantees you can audit.

>>> import quietmax as qm
>>> data = qm.load("mnist-5k", records=500)
>>> model = qm.train(data, alpha=1.0, settings=qm.TrainingSettings(epochs=2))
>>> quiet = qm.Predictor(model, qm.Algorithm1(noise="gaussian"), qm.Budget(epsilon=1.0, queries=100))
>>> quiet.predict_proba(data.test.features[:3]).shape
(3, 10)
>>> quiet.guarantee.status, quiet.remaining.queries
('refuted', 97)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietmax.surface import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the packages when a name is first wanted, so that a command that needs none of them starts at once."""
        surface = import_module("quietmax.surface")
        if hasattr(surface, name):
            return getattr(surface, name)
        if name in globals():  # a package that came with the surface, as in quietmax.accounting
            return globals()[name]
        raise AttributeError(f"module 'quietmax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("quietmax.surface").__all__})
