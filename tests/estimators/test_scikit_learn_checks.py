"""scikit-learn's own estimator checks, once for each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from quietmax.estimators import DPSGD, DPSGDSettings, PrivateHead, Teachers
from quietmax.models import CrossEntropy, TrainingSettings

NETWORK = TrainingSettings(hidden=(16,), loss=CrossEntropy(), learning_rate=0.02, epochs=60, batch_size=16)
# The checks fit tables of 10 to 300 records and expect good accuracy. That needs budgets with hardly any noise: the
# checks look at the interface, not at privacy.
ESTIMATORS = [
    PrivateHead(epsilon=1e6),
    Teachers(epsilon=1e9, queries=10**6, teachers=1, random_state=0, network=NETWORK),
    DPSGD(epsilon=1e5, settings=DPSGDSettings(sampling_rate=1.0, length=1.0), random_state=0),
]


def expected_failures(estimator: object) -> dict[str, str]:
    """A copy of a fitted predictor would carry a copy of its budget, to be spent twice: it cannot be pickled."""
    return {"check_estimators_pickle": "a budget cannot be copied"} if isinstance(estimator, Teachers) else {}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)
