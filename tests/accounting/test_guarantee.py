"""A guarantee says what is claimed, whether it holds, and why; it survives JSON, copying and pickling."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import mpmath
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quietmax.accounting import GaussianCost, Guarantee, PureCost, delta_of, epsilon_of
from quietmax.accounting.costs import decimal
from quietmax.errors import InvalidInput

PURE = Guarantee.of(PureCost(1.0), status="proven", because="Laplace mechanism, theory section 3.")
GAUSSIAN = Guarantee.of(
    GaussianCost(0.5),
    status="conditional",
    because="The bound on one logit is assumed, theory section 2.2.",
    parameters={"logit_sensitivity": 0.358, "classes": 2, "shape": [784, 128, 2]},
    assumptions=("one record moves a logit by at most 0.358",),
)
APPROXIMATE = Guarantee(
    "approximate",
    epsilon=1.0,
    delta=1e-5,
    status="proven",
    because="Subsampled noisy gradients, theory section 3.7.",
)


HAIR = mpmath.mpf("1e-12")


def pure(epsilon: float, **more) -> Guarantee:
    return Guarantee.of(PureCost(epsilon), status="proven", because="x", **more)


def approximate(epsilon: float, delta: float, **more) -> Guarantee:
    return Guarantee("approximate", epsilon=epsilon, delta=delta, status="proven", because="x", **more)


PERSON = dataclasses.replace(GAUSSIAN, unit="person")


@pytest.mark.parametrize("claim", [PURE, GAUSSIAN, APPROXIMATE, PERSON])
def test_a_guarantee_survives_json_pickling_and_copying_and_cannot_be_changed(claim) -> None:
    record = json.loads(json.dumps(claim.to_json()))
    assert Guarantee.from_json(record) == claim
    assert ("delta" in record) == (claim is APPROXIMATE)
    assert pickle.loads(pickle.dumps(claim)) == copy.deepcopy(claim) == claim
    assert hash(copy.deepcopy(claim)) == hash(claim)
    with pytest.raises(InvalidInput, match="must have the fields"):
        Guarantee.from_json({**record, "colour": "blue"})
    unit = record.pop("unit")
    assert Guarantee.from_json(record) == dataclasses.replace(claim, unit="record")
    del record["because"]
    with pytest.raises(InvalidInput, match="must have the fields"):
        Guarantee.from_json(record)
    with pytest.raises(dataclasses.FrozenInstanceError):
        claim.epsilon = 0.5
    assert f"for one {unit} added or removed" in str(claim)


def test_a_guarantee_keeps_its_own_copy_of_the_parameters() -> None:
    parameters = {"classes": 2}
    claim = Guarantee.of(PureCost(1.0), status="proven", because="x", parameters=parameters)
    parameters["classes"] = 3
    assert claim.parameters == {"classes": 2}


def test_the_gaussian_claim_is_derived_by_the_closed_form() -> None:
    assert GAUSSIAN.at_epsilon(1.0) == delta_of(0.5, 1.0)
    assert GAUSSIAN.at_delta(1e-5) == epsilon_of(0.5, 1e-5)
    assert GAUSSIAN.at_delta(0.0) == math.inf
    assert GAUSSIAN.cost == GaussianCost(0.5)


def test_a_guarantee_can_be_weakened_or_restated_but_never_strengthened() -> None:
    weaker = PERSON.weakened("conditional", "Seeded noise, theory section 3.5.", ("the seed is secret",))
    assert (weaker.status, weaker.mu, weaker.unit) == ("conditional", 0.5, "person")
    assert weaker.assumptions == (*PERSON.assumptions, "the seed is secret")
    assert pure(1.0).weakened("proven", "Another proof.").because == "Another proof."
    refuted = pure(1.0).weakened("refuted", "No.")
    assert refuted.weakened("refuted", "Still no.").status == "refuted"
    for claim, status in ((weaker, "proven"), (refuted, "conditional"), (PURE, "excellent")):
        with pytest.raises(InvalidInput, match="cannot be weakened"):
            claim.weakened(status, "It would be nice.")


def test_the_text_names_status_definition_numbers_and_reason() -> None:
    text = str(GAUSSIAN.weakened("refuted", "Exact log-ratios survive, theory section 2.1."))
    for part in ("refuted", "0.5-Gaussian", "epsilon 1.99 at delta 1e-05", "section 2.1"):
        assert part in text
    assert str(PURE).startswith("proven: 1-differential privacy")
    assert str(APPROXIMATE).startswith("proven: (1, 1e-05)-differential privacy")
    with pytest.raises(InvalidInput, match="do not compose"):
        _ = APPROXIMATE.cost


def test_an_approximate_guarantee_holds_from_its_own_delta_up_and_says_nothing_below() -> None:
    assert APPROXIMATE.at_delta(1e-5) == 1.0
    assert APPROXIMATE.at_delta(0.999e-5) == math.inf
    assert APPROXIMATE.at_delta(0.0) == math.inf
    assert APPROXIMATE.at_epsilon(1.0) == APPROXIMATE.at_epsilon(50.0) == 1e-5
    more = Guarantee("approximate", epsilon=1.0, delta=1e-5, extra_delta=1e-6, status="proven", because="x")
    assert more.at_epsilon(1.0) == pytest.approx(1.1e-5, rel=1e-9)
    assert more.at_delta(1e-5) == math.inf


@given(st.floats(1e-3, 20.0), st.floats(0.0, 20.0), st.floats(1e-9, 0.5))
def test_the_approximate_claim_covers_the_release_that_reveals_all_with_probability_delta(
    claimed, epsilon, delta
) -> None:
    """With probability delta the data, otherwise randomised response: the worst case of (epsilon, delta)."""
    claim = Guarantee("approximate", epsilon=claimed, delta=delta, status="proven", because="x")
    response = max(0.0, -math.expm1(epsilon - claimed) / (1 + math.exp(-claimed)))
    worst = delta + (1 - delta) * response
    assert claim.at_epsilon(epsilon) >= worst * (1 - 1e-12)
    assert claim.at_epsilon(epsilon) <= worst + delta + 1e-12


@pytest.mark.parametrize(
    ("definition", "fields", "sentence"),
    [
        ("zcdp", {"epsilon": 1.0}, "definition must be"),
        ("pure", {"mu": 1.0}, "requires epsilon alone, got mu"),
        ("gaussian", {"epsilon": 1.0}, "requires mu alone, got epsilon"),
        ("pure", {"epsilon": 1.0, "mu": 1.0}, "requires epsilon alone"),
        ("pure", {"epsilon": 1.0, "delta": 1e-5}, "requires epsilon alone"),
        ("gaussian", {"mu": 1.0, "delta": 1e-5}, "requires mu alone"),
        ("approximate", {"epsilon": 1.0}, "requires delta and epsilon alone"),
        ("approximate", {"delta": 1e-5}, "requires delta and epsilon alone"),
        ("approximate", {"epsilon": 1.0, "mu": 1.0, "delta": 1e-5}, "requires delta and epsilon alone"),
        ("approximate", {"epsilon": 1.0, "delta": -1e-5}, "delta must be 0 or between"),
        ("approximate", {"epsilon": 1.0, "delta": 1.0}, "together must be below 1"),
        ("approximate", {"epsilon": 1.0, "delta": 0.5, "extra_delta": 0.5}, "together must be below 1"),
        ("pure", {"epsilon": -1.0}, "epsilon must be 0 or between"),
        ("pure", {"epsilon": 1.0, "because": " "}, "because must be a sentence"),
        ("pure", {"epsilon": 1.0, "status": "hoped"}, "status must be one of"),
        ("pure", {"epsilon": 1.0, "neighbours": "replace-one"}, "neighbours must be"),
        ("pure", {"epsilon": 1.0, "unit": "household"}, "unit must be one of"),
        *[
            ("pure", {"epsilon": 1.0, "extra_delta": bad}, "extra_delta must be")
            for bad in (-1e-9, 1.0, math.nan)
        ],
    ],
)
def test_an_ill_formed_guarantee_is_refused(definition, fields, sentence) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Guarantee(definition, **{"because": "x", **fields})


@pytest.mark.parametrize("claim", [PURE, GAUSSIAN, APPROXIMATE])
def test_asking_at_impossible_values_is_refused(claim) -> None:
    for bad in (-0.1, 1.0, math.nan):
        with pytest.raises(InvalidInput):
            claim.at_delta(bad)
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(InvalidInput):
            claim.at_epsilon(bad)


@pytest.mark.parametrize("claimed", [1e-6, 0.1, 1.0, 5.0, 40.0])
def test_the_delta_of_a_pure_claim_is_that_of_randomised_response_rounded_up(claimed) -> None:
    for part in (0.0, 0.1, 0.5, 0.9, 0.999):
        epsilon = part * claimed
        with mpmath.workdps(60):
            right = 1 / (1 + mpmath.exp(-mpmath.mpf(claimed)))
            truth = right - mpmath.exp(mpmath.mpf(epsilon)) * (1 - right)
        assert truth < mpmath.mpf(pure(claimed).at_epsilon(epsilon)) < truth * (1 + HAIR)
    for epsilon in (claimed, claimed * 1.5, claimed + 0.5, 1e6):
        assert pure(claimed).at_epsilon(epsilon) == 0.0


@pytest.mark.parametrize("claimed", [0.1, 1.0, 5.0])
def test_the_epsilon_of_a_pure_claim_is_rounded_up(claimed) -> None:
    for delta in (1e-9, 1e-5, 0.01):
        with mpmath.workdps(60):
            truth = mpmath.mpf(claimed) + mpmath.log(1 - delta * (1 + mpmath.exp(-mpmath.mpf(claimed))))
        found = mpmath.mpf(pure(claimed).at_delta(delta))
        assert truth < found < truth * (1 + HAIR)


def test_no_derived_delta_is_larger_than_one_and_no_guess_right_more_often_than_always() -> None:
    for claim in (approximate(20.0, 0.9), pure(100.0, extra_delta=0.5)):
        assert claim.at_epsilon(0.0) == claim.max_accuracy() == 1.0
    assert pure(100.0).max_accuracy() == 1.0
    assert pure(1.0).at_delta(0.0) == 1.0
    assert pure(1.0).at_delta(0.4) > 0.0
    for delta in (0.5, 0.7, 0.74, 0.9, 0.99):
        assert pure(1.0).at_delta(delta) == 0.0


def test_two_deltas_are_added_and_rounded_up() -> None:
    claim = approximate(1.0, 1e-5, extra_delta=1e-6)
    assert pure(1.0, extra_delta=1e-6).at_epsilon(2.0) == 1e-6
    assert approximate(1.0, 1e-5).at_epsilon(2.0) == 1e-5
    total = Fraction(1e-5) + Fraction(1e-6)
    assert total < Fraction(claim.at_epsilon(1.0)) < total * (1 + Fraction(1, 10**12))
    mixed = Guarantee.of(PureCost(1.0), status="proven", because="x", extra_delta=1e-6)
    plain = Fraction(pure(1.0).at_epsilon(0.5)) + Fraction(1e-6)
    assert plain < Fraction(mixed.at_epsilon(0.5)) < plain * (1 + Fraction(1, 10**12))


def test_what_is_left_of_a_delta_after_the_extra_one_is_rounded_down() -> None:
    for cost in (PureCost(1.0), GaussianCost(1.0)):
        plain = Guarantee.of(cost, status="proven", because="x")
        claim = dataclasses.replace(plain, extra_delta=1e-6)
        for delta in (1.1e-6, 1e-5, 0.1):
            without = Fraction(plain.at_epsilon(claim.at_delta(delta)))
            assert Fraction(delta) - Fraction(1, 10**11) < without + Fraction(1e-6) <= Fraction(delta)
        assert claim.at_delta(math.nextafter(1e-6, 0.0)) == math.inf
    assert pure(1.0, extra_delta=1e-6).at_delta(1e-6) == 1.0


def test_a_release_that_costs_nothing_is_private_at_delta_zero() -> None:
    nothing = Guarantee.of(GaussianCost(0.0), status="proven", because="x")
    assert nothing.at_delta(0.0) == 0.0
    assert nothing.at_delta(1e-5) == 0.0
    assert nothing.at_epsilon(0.0) == 0.0


@given(st.floats(1e-3, 30.0), st.just(0.0) | st.floats(1e-12, 1e-3), st.floats(0.0, 1.0))
@example(1.9842487722007132, 0.0, 1.9133065766474322e-300)  # as was this one
@example(8.100914666212402, 0.0, 0.3099709613327042)  # was rounded down by a fraction of a float
def test_limits_on_true_positives_follow_from_the_definition_and_are_rounded_up_by_a_hair(
    epsilon, delta, rate
) -> None:
    """The inequalities of (epsilon, delta)-differential privacy, for the test and for its complement."""
    with mpmath.workdps(50):
        few = mpmath.exp(epsilon) * mpmath.mpf(rate)
        many = 1 - mpmath.exp(-mpmath.mpf(epsilon)) * (1 - mpmath.mpf(rate))
        exact = min(min(few, many) + mpmath.mpf(delta), mpmath.mpf(1))
        for claim in (pure(epsilon, extra_delta=delta), approximate(epsilon, delta)):
            assert exact <= claim.max_true_positive_rate(rate) <= exact * (1 + HAIR)


@given(st.floats(1e-3, 10.0), st.floats(1e-9, 1 - 1e-9))
def test_true_positives_of_a_gaussian_claim_are_those_of_two_shifted_normals(mu, rate) -> None:
    claim = Guarantee("gaussian", mu=mu, because="x")
    with mpmath.workdps(50):
        exact = mpmath.ncdf(mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(rate) - 1) + mu)
    assert exact <= claim.max_true_positive_rate(rate) <= min(1, exact * (1 + 2 * HAIR))


@pytest.mark.parametrize("amount", [1e-3, 0.3, 1.0, 5.0])
def test_the_limit_on_the_best_guess_is_rounded_up_by_a_hair(amount) -> None:
    with mpmath.workdps(50):
        right, normal = 1 / (1 + mpmath.exp(-mpmath.mpf(amount))), mpmath.ncdf(mpmath.mpf(amount) / 2)
        assert right < pure(amount).max_accuracy() < right * (1 + HAIR)
        gaussian = Guarantee("gaussian", mu=amount, because="x").max_accuracy()
        assert normal < gaussian < normal * (1 + 20 * HAIR)
        extra = pure(amount, extra_delta=1e-3).max_accuracy()
        assert right + mpmath.mpf(1e-3) / 2 < extra < (right + mpmath.mpf(1e-3) / 2) * (1 + HAIR)


@pytest.mark.parametrize("claim", [PURE, GAUSSIAN, APPROXIMATE])
def test_the_best_guess_is_the_best_of_all_membership_tests(claim) -> None:
    rates = [step / 4000 for step in range(4001)]
    best = max((1 + claim.max_true_positive_rate(rate) - rate) / 2 for rate in rates)
    assert best <= claim.max_accuracy() <= best + 1 / 4000


@given(
    st.sampled_from(["pure", "gaussian", "approximate"]),
    st.floats(1e-3, 2.0),
    st.floats(0.0, 1e-4),
    st.integers(2, 6),
    st.floats(0.0, 1.0),
)
def test_a_group_is_bounded_by_going_from_neighbour_to_neighbour(
    definition, amount, extra, size, rate
) -> None:
    stated = {"mu": amount} if definition == "gaussian" else {"epsilon": amount}
    if definition == "approximate":
        stated["delta"] = 1e-5
    claim = Guarantee(definition, because="x", extra_delta=extra, **stated)
    reached = rate
    for _ in range(size):
        reached = claim.max_true_positive_rate(reached)
    try:
        group = claim.for_group(size)
    except InvalidInput:
        return
    assert reached <= group.max_true_positive_rate(rate) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_surplus_delta_of_a_group_is_the_stated_sum_rounded_up(size) -> None:
    with mpmath.workdps(50):
        extra, step = mpmath.mpf(1e-9), mpmath.mpf(0.5)
        geometric = mpmath.fsum(extra * mpmath.exp(part * step) for part in range(size))
        place = mpmath.sqrt(2) * mpmath.erfinv(2 * extra - 1)
        normal = mpmath.fsum(mpmath.ncdf(place + part * step) for part in range(size))
        stated = approximate(0.5, 1e-9).for_group(size)
        for found, exact in (
            (stated.delta, geometric),
            (pure(0.5, extra_delta=1e-9).for_group(size).extra_delta, geometric),
            (
                Guarantee("gaussian", mu=0.5, because="x", extra_delta=1e-9).for_group(size).extra_delta,
                normal,
            ),
        ):
            assert exact < found < exact * (1 + 2 * HAIR)
    assert stated.extra_delta == 0.0


@given(st.floats(1e-6, 1e3), st.integers(2, 1000))
@example(0.7, 3)  # 3 * 0.7 is 2.0999999999999996 in floating point
def test_what_a_group_costs_is_never_rounded_down(amount: float, size: int) -> None:
    pure = Guarantee("pure", epsilon=amount, because="x").for_group(size)
    gaussian = Guarantee("gaussian", mu=amount, because="x").for_group(size)
    for stated in (pure.epsilon, gaussian.mu):
        assert size * decimal(amount) <= decimal(stated) <= size * decimal(amount) * (1 + Fraction(1, 2**50))


def test_a_guarantee_that_says_nothing_about_a_group_refuses_to_state_one() -> None:
    loose = Guarantee("approximate", epsilon=100.0, delta=1e-5, because="x")
    with pytest.raises(InvalidInput, match="nothing about 2 units"):
        loose.for_group(2)
    for bad in (0, 1.5, True):
        with pytest.raises(InvalidInput, match="at least 1"):
            PURE.for_group(bad)
    assert PURE.for_group(1) is PURE
    group = pure(100.0).for_group(10)
    assert (group.epsilon, group.extra_delta) == (1000.0, 0.0)


def test_the_words_state_the_figures_of_the_theory_page() -> None:
    claim = Guarantee("gaussian", mu=0.268, status="proven", because="x", unit="person")
    even, rare = claim.in_words()
    assert "at most 55.4%" in even
    assert "at most 0.239%" in rare
    assert "people" in even
    theory = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    assert "right at most 55.4% of the time" in theory
    assert "at most 0.239% of the" in theory


def test_the_words_name_what_the_guarantee_covers_and_never_everything_that_was_released() -> None:
    assert PURE.in_words()[0].startswith("Somebody who sees everything that this guarantee covers, knows")
    assert PURE.in_words("one table")[0].startswith("Somebody who sees one table, knows")
    assert PURE.in_words("one table")[1:] == PURE.in_words()[1:]


def test_the_words_of_a_record_level_guarantee_say_what_several_records_mean() -> None:
    words = dataclasses.replace(PURE, status="conditional").in_words()
    assert "assumptions" in words[2]
    # e^2/(1 + e^2) = 0.8808 and e^5/(1 + e^5) = 0.99331, rounded up.
    assert "88.1% with 2 records" in words[3]
    assert "99.4% with 5 records" in words[3]


def test_the_words_of_a_refuted_guarantee_state_no_limit() -> None:
    (sentence,) = dataclasses.replace(PURE, status="refuted").in_words()
    assert "%" not in sentence


@pytest.mark.parametrize("definition", ["pure", "gaussian"])
@pytest.mark.parametrize(
    ("accuracy", "strength", "words"),
    [
        (0.549, "strong", "strong protection [###]"),
        (0.551, "moderate", "moderate protection [##-]"),
        (0.749, "moderate", "moderate protection [##-]"),
        (0.751, "weak", "weak protection [#--]"),
        (0.949, "weak", "weak protection [#--]"),
        (0.951, "none", "no protection [---]"),
    ],
)
def test_the_strength_is_what_an_adversary_gains_and_the_status_says_whether_it_is_proven(
    definition: str, accuracy: float, strength: str, words: str
) -> None:
    claim = guarantee_of_accuracy(accuracy - 1e-9, definition)
    assert claim.max_accuracy() == pytest.approx(accuracy)
    assert (claim.strength, claim.protection) == (strength, words)
    right = f"a guess whether one record is in the data is right at most {100 * accuracy:.1f}% of the time"
    assert claim.summary == f"proven, {words}: {right}"
    conditional = claim.weakened("conditional", "Seeded noise.")
    assert conditional.strength == strength
    assert conditional.summary == f"conditional, {words}: {right}"


def test_a_limit_of_a_strength_belongs_to_the_weaker_one() -> None:
    claim = Guarantee("pure", epsilon=math.log(3.0), status="proven", because="Theory section 3.")
    assert claim.max_accuracy() >= 0.75
    assert claim.strength == "weak"


def test_a_refuted_guarantee_has_no_strength_whatever_it_claims() -> None:
    refuted = guarantee_of_accuracy(0.51, "pure").weakened("refuted", "A counterexample.")
    assert (refuted.strength, refuted.summary) == ("none", "refuted, no protection [---]")


def guarantee_of_accuracy(accuracy: float, definition: str) -> Guarantee:
    """The proven guarantee under which an adversary is right so often at most."""
    if definition == "pure":
        cost: PureCost | GaussianCost = PureCost(math.log(accuracy / (1 - accuracy)))
    else:
        cost = GaussianCost(2 * NormalDist().inv_cdf(accuracy))
    return Guarantee.of(cost, status="proven", because="Theory section 3.")
