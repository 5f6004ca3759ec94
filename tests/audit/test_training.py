"""True claims survive an audit of training; half of the noise is refuted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quietmax.accounting import Cost, GaussianCost, Guarantee, PureCost
from quietmax.audit import audit_training
from quietmax.audit.training import label_score, mislabelled
from quietmax.data import Records, load
from quietmax.errors import InvalidInput

SURE = 1 - 1e-7
Fit = Callable[[Records], Any]


def counts_of(
    canaries: int, scale: float = 1.0, *, noise: str = "gaussian", by_person: bool = False, seed: int = 0
) -> Fit:
    """Release how many rows carry each number, with noise; ``by_person``: a row weighs one over its person's rows."""
    rng = np.random.default_rng(seed)
    draw = rng.normal if noise == "gaussian" else rng.laplace

    def fit(records: Records) -> NDArray[np.float64]:
        weights = 1 / np.bincount(records.units)[records.units] if by_person else None
        present = np.bincount(records.features[:, 0].astype(int), weights, minlength=canaries + 1)[1:]
        return np.asarray(present + draw(0.0, scale, canaries))

    return fit


def apart(count: int) -> tuple[Records, Records]:
    """Canaries that do not disturb each other: the numbers from 1; and a record of zero that no canary resembles."""
    canaries = Records("canaries", np.arange(1, count + 1)[:, None], np.zeros(count, int), classes=2)
    return Records("zero", np.zeros((1, 1)), np.zeros(1, int), classes=2), canaries


def released(model: Any, _canaries: Records) -> NDArray[Any]:
    return np.asarray(model)


def visits(persons: int, start: int, rows: int = 3) -> Records:
    """Persons with the numbers from ``start``; each row of a person carries that number."""
    numbers = np.repeat(np.arange(start, start + persons), rows)
    names = np.array([f"person {number}" for number in numbers], dtype=object)
    return Records("visits", numbers[:, None], np.zeros(len(numbers), int), classes=2, persons=names)


@pytest.mark.parametrize(
    ("noise", "claimed"), [("gaussian", GaussianCost(1.0)), ("laplace", PureCost(1.0))], ids=["mu", "epsilon"]
)
def test_one_run_does_not_refute_a_true_claim_but_half_the_noise(noise: str, claimed: Cost) -> None:
    """Counts with noise of scale 1 cost exactly 1 per canary; 2,000 guesses about 20,000 canaries.

    Of these, at 99%, fewer than 40 wrong ones refute mu = 1. With mu = 1 each is wrong with probability 0.096, with
    mu = 2 with 0.0049: either verdict comes out wrong with probability below 1e-9. For epsilon even less.
    """
    inputs: Any = (released, *apart(20_000), claimed)
    honest = audit_training(counts_of(20_000, noise=noise), *inputs, shares=[0.1])
    assert honest.verdict == "consistent"
    assert honest.share > 0.4
    assert honest.confidence == 0.99
    broken = audit_training(counts_of(20_000, 0.5, noise=noise), *inputs, shares=[0.1])
    assert broken.verdict == "refuted"
    assert broken.samples == 20_000
    assert broken.details["games"][0]["guesses"] == 2000
    # False-alarm probability 1e-7.
    fit = counts_of(1000, noise=noise, seed=7)
    assert audit_training(fit, released, *apart(1000), claimed, confidence=SURE).verdict == "consistent"


def test_sums_of_one_run_show_most_of_a_true_claim_and_refute_half_the_noise() -> None:
    """4,000 canaries at a confidence of 1 - 1e-7: the bound is about 0.8 of mu = 1, with half the noise about 1.7."""
    inputs: Any = (released, *apart(4000), GaussianCost(1.0))
    options: dict[str, Any] = {"method": "summed", "confidence": SURE}
    honest = audit_training(counts_of(4000), *inputs, **options)
    assert honest.verdict == "consistent"
    assert honest.share > 0.65
    assert honest.share > 1.5 * honest.details["mu_at_least_from_guesses"]
    assert honest.details["power_with_half_the_noise"] > 0.999
    assert honest.details["assumes"] == "independent Gaussian noise on every canary's signal"
    assert honest.epsilon_lower_bound < honest.epsilon_claimed
    assert audit_training(counts_of(4000, 0.5), *inputs, **options).verdict == "refuted"
    nothing = audit_training(counts_of(4000), lambda *_: np.zeros(4000), *inputs[1:], **options)
    assert max(nothing.lower_bound, nothing.epsilon_lower_bound) < 1e-9


def test_one_run_without_any_noise_finds_every_canary() -> None:
    report = audit_training(counts_of(400, 1e-9), released, *apart(400), PureCost(3.0), shares=[0.5, 0.1])
    assert report.verdict == "refuted"
    assert report.evidence == "200 of 200 guesses about canaries were right"


def test_scores_without_information_give_no_bound() -> None:
    """Ties are broken at random: a constant score guesses right half of the time."""
    nothing = lambda *_: np.zeros(2000)  # noqa: E731
    report = audit_training(counts_of(2000), nothing, *apart(2000), PureCost(0.0), confidence=SURE)
    assert report.verdict == "consistent"
    (everything,) = [game for game in report.details["games"] if game["guesses"] == 2000]
    assert 850 < everything["right"] < 1150  # 6.7 standard deviations on either side


def test_repeated_training_does_not_refute_a_true_claim_but_half_the_noise() -> None:
    """A mean of 50 records in [0, 1]^3: noise of 1/50 per coordinate makes a unit canary cost mu = 1."""
    rng = np.random.default_rng(1)
    records = Records("fifty", rng.random((50, 3)), np.zeros(50, int), classes=2)
    canary = Records("canary", np.array([[1.0, 0.0, 0.0]]), np.array([0]), classes=2)

    def mean(scale: float) -> Fit:
        return lambda given: given.features.sum(0) / 50 + rng.normal(0, scale / 50, 3)

    options: dict[str, Any] = {"method": "repeated", "times": 6000, "confidence": SURE}
    honest = audit_training(mean(1.0), released, records, canary, GaussianCost(1.0), **options)
    assert honest.verdict == "consistent"
    assert honest.share > 0.4
    broken = audit_training(mean(0.5), released, records, canary, GaussianCost(1.0), **options)
    assert broken.verdict == "refuted"


def test_canaries_are_real_records_with_wrong_labels() -> None:
    data = load("mnist-5k", records=100, seed=0)
    canaries = mislabelled(data.pool, count=50, seed=3)
    known = {row.tobytes(): label for row, label in zip(data.pool.features, data.pool.labels, strict=True)}
    for row, label in zip(canaries.features, canaries.labels, strict=True):
        assert known[row.tobytes()] != label
        assert 0 <= label < 10


def test_the_label_score_uses_probabilities_if_they_are_released() -> None:
    class Labels:
        def predict(self, _: object) -> NDArray[Any]:
            return np.array([0, 1])

    class Probabilities(Labels):
        def predict_proba(self, _: object) -> NDArray[Any]:
            return np.array([[0.5, 0.5], [0.0, 1.0]])

    canaries = Records("two", np.zeros((2, 1)), np.array([1, 1]), classes=2)
    assert label_score(Labels(), canaries).tolist() == [0.0, 1.0]
    assert label_score(Probabilities(), canaries) == pytest.approx([np.log(0.5), 0.0])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"canaries": apart(1)[1]}, "at least 2 canaries"),
        ({"shares": []}, "shares must be numbers above 0"),
        ({"method": "twice"}, "method must be one of one-run, summed, repeated"),
        ({"score": lambda *_: np.zeros(3)}, "must return 10 numbers, one per row of the canaries"),
        ({"claimed": None}, "has no guarantee_"),
        ({"method": "repeated"}, "exactly 1 canary, got 10 records"),
        ({"canaries": Records("wide", np.zeros((4, 2)), np.zeros(4, int), 2)}, "must have 1 features"),
        ({"records": visits(3, 1), "canaries": apart(3)[1]}, "both have persons, or neither"),
        ({"records": visits(3, 1), "canaries": visits(2, 3)}, "must not be a person of the records"),
        (
            {"records": visits(3, 1), "canaries": visits(2, 4), "method": "repeated"},
            "1 canary, got 2 persons",
        ),
    ],
)
def test_invalid_arguments_are_errors(changed: dict[str, Any], words: str) -> None:
    records, canaries = apart(10)
    usual = {"records": records, "canaries": canaries, "score": released, "claimed": PureCost(1.0)}
    with pytest.raises(InvalidInput, match=words):
        audit_training(counts_of(10), **(usual | changed))


def test_more_canaries_than_records_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="count must be from 1 to the number of records, 1,"):
        mislabelled(apart(1)[0], count=2)


def of_each_row(model: Any, canaries: Records) -> NDArray[Any]:
    return np.asarray(model)[canaries.features[:, 0].astype(int) - 1]


def test_one_run_puts_whole_persons_in_and_refutes_a_claim_for_records() -> None:
    """2,000 persons with 3 rows: mu = 1 for a row is mu = 3 for a person unless rows weigh 1/3.

    False-alarm probability 1e-7 for the honest claim. For the other, a guess about the surest tenth is wrong with
    probability below 1e-4 (mu = 3).
    """
    records, canaries = visits(1, 0), visits(2000, 1)
    for_person = Guarantee("gaussian", mu=1.0, because="Counted by person.", unit="person")
    seen: list[Records] = []

    def fit(given: Records) -> Any:
        seen.append(given)
        return counts_of(2000, by_person=True)(given)

    honest = audit_training(fit, of_each_row, records, canaries, for_person, confidence=SURE)
    assert (honest.verdict, honest.unit, honest.samples) == ("consistent", "person", 2000)
    assert honest.lower_bound > 0
    assert set(np.bincount(seen[0].units)) == {3}
    assert len(seen[0]) == 3 * (1 + honest.details["canaries_inside"])
    assert "claimed_for" not in honest.details
    for_record = Guarantee("gaussian", mu=1.0, because="Counted by row.")
    by_row = counts_of(2000)
    broken = audit_training(by_row, of_each_row, records, canaries, for_record)
    assert (broken.verdict, broken.unit) == ("refuted", "person")
    assert broken.details["claimed_for"] == "one record"
    assert broken.to_json()["unit"] == "person"
    assert ("unit", "one person") in broken.rows()


def test_repeated_training_leaves_out_a_whole_person() -> None:
    records, canary = visits(20, 2), visits(1, 1)
    claimed = Guarantee("gaussian", mu=1.0, because="Counted by person.", unit="person")
    options: dict[str, Any] = {"method": "repeated", "times": 4000, "confidence": SURE}
    honest = audit_training(counts_of(22, by_person=True), released, records, canary, claimed, **options)
    assert (honest.verdict, honest.unit, honest.details["canary_rows"]) == ("consistent", "person", 3)
    assert honest.share > 0.5
    broken = audit_training(counts_of(22), released, records, canary, claimed, **options)
    assert broken.verdict == "refuted"


def test_mislabelled_persons_keep_all_their_rows() -> None:
    rng = np.random.default_rng(0)
    persons = np.array([f"p{number}" for number in rng.integers(0, 12, 60)], dtype=object)
    records = Records("visits", rng.random((60, 2)), rng.integers(0, 3, 60), classes=3, persons=persons)
    canaries = mislabelled(records, count=5, seed=1)
    assert canaries.persons is not None
    chosen = set(canaries.persons)
    assert len(chosen) == 5
    original = records.take(np.isin(persons.astype(str), sorted(chosen)))
    np.testing.assert_array_equal(canaries.features, original.features)
    assert (canaries.labels != original.labels).all()
