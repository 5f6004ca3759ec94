"""Folders that were edited: whatever is changed in them, they are not opened with a better guarantee."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from quietmax.accounting.costs import epsilon_of
from quietmax.data import Encoding, Records, Schema
from quietmax.data.encoding import WEIGHTS_SHA256, NumericColumn
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import (
    DPSGD,
    DPSGDSettings,
    HeadSettings,
    PrivateHead,
    Teachers,
    open_private,
    save_private,
)
from quietmax.estimators.head.weights import (
    HeadWeights,
    PrivateHeadWeights,
    max_weight_norm,
    weight_sensitivity,
)
from quietmax.ledger import Terms
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import UnitNorm
from quietmax.models.features.tabular import TableCells
from quietmax.predictor import Predictor
from quietmax.privacy_card import read_card
from quietmax.server.deployment import load_models
from quietmax.spending import FileAccount
from tests.estimators.made import made

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 2, 60)
FEATURES = np.abs(GENERATOR.normal(size=(60, 2)) + LABELS[:, None]).astype(np.float32)
LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=2, batch_size=8)
PUBLIC = {"declared_size": 60, "classes": (0, 1), "features": UnitNorm(1.0)}
CELLS = PUBLIC | {"features": TableCells(2, ((0, 1), (1, 2)), (0,), levels=8, crosses=((0, 1),))}
QUERY = {"method": "output", "release": "query", "queries": 5}
NETWORK = PUBLIC | {"delta": 1e-5}
TWO_STEPS, TILTED = DPSGDSettings(steps=2), HeadSettings(loss="convexified", regularisation=0.1)
FULL_BATCH, SAMPLES = replace(TWO_STEPS, sampling_rate=1.0), replace(TWO_STEPS, sampling_rate=0.5)
VOTE = {"queries": 5, "teachers": 3, "network": LINEAR}
MEASURED = Encoding(
    (NumericColumn("a", 0, 4), NumericColumn("b", 0, 4)), "y", ("0", "1"), inferred=("bounds",)
)
ESTIMATORS: dict[str, Any] = {
    "head, gradient": PrivateHead(**PUBLIC),
    "head, noisy size": PrivateHead(**(PUBLIC | {"declared_size": None})),
    "head, output": PrivateHead(**PUBLIC, method="output"),
    "head, convexified": PrivateHead(**PUBLIC, method="output", settings=TILTED),
    "head, mu": PrivateHead(**PUBLIC, mu=0.5, settings=HeadSettings(centring=0.0)),
    "head, second moments": PrivateHead(**PUBLIC, settings=HeadSettings(second_moments=0.2)),
    "head, cells": PrivateHead(**CELLS, settings=HeadSettings(calibration=0.1)),
    "head, cells without counts": PrivateHead(**CELLS, settings=HeadSettings(centring=0.0)),
    "head, pairs": PrivateHead(
        **(PUBLIC | {"features": TableCells(2, ((0, 1), (1, 2)), (0,), levels=16)}),
        settings=HeadSettings(centring=0.0, pairs=True, class_weight="balanced"),
    ),
    "head, seeded": PrivateHead(**PUBLIC, random_state=0),
    "head, classes not declared": PrivateHead(**(PUBLIC | {"classes": None})),
    "head asked": PrivateHead(**PUBLIC, **QUERY),
    "head asked, convexified": PrivateHead(**PUBLIC, **QUERY, settings=TILTED),
    "head asked, seeded": PrivateHead(**PUBLIC, **QUERY, random_state=0),
    "teachers": Teachers(**PUBLIC, **VOTE),
    "teachers, gaussian": Teachers(**PUBLIC, **VOTE, method="gaussian"),
    "teachers, probabilities": Teachers(**PUBLIC, **VOTE, release="probabilities"),
    "teachers, seeded": Teachers(**PUBLIC, **VOTE, random_state=0),
    "teachers, size not declared": Teachers(**(PUBLIC | {"declared_size": None}), **VOTE),
    "dpsgd": DPSGD(**NETWORK, settings=FULL_BATCH),
    "dpsgd, hidden layer": DPSGD(**NETWORK, settings=replace(FULL_BATCH, hidden=(3,))),
    "dpsgd, samples": DPSGD(**NETWORK, settings=SAMPLES, accountant="zcdp"),
    "dpsgd, samples, pld": DPSGD(**NETWORK, settings=SAMPLES),
    "dpsgd, samples, rdp": DPSGD(**NETWORK, settings=SAMPLES, accountant="rdp"),
    "dpsgd, published": DPSGD(**NETWORK, settings=TWO_STEPS, accountant="zcdp", analysis="published"),
    "dpsgd, seeded": DPSGD(**NETWORK, settings=FULL_BATCH, random_state=0),
}  # fmt: skip
PAID = [kind for kind in ESTIMATORS if "asked" in kind or "teachers" in kind]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each kind of private model."""
    place = tmp_path_factory.mktemp("models")
    return {
        kind: save_private(estimator.fit(FEATURES, LABELS), place / kind, dataset="made up")
        for kind, estimator in ESTIMATORS.items()
    }


def _copied(folder, target):
    shutil.copytree(folder, target)
    return target


def _claim(folder):
    return json.loads((folder / "model.json").read_text())["guarantee"]


def _edit(folder, change):
    path = folder / "model.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))
    return folder


def _refused(folder, match="is damaged"):
    """The folder is refused wherever its guarantee could be shown or used."""
    for use in (open_private, read_card, lambda place: load_models([f"m={place}"], accept_unproven=True)):
        with pytest.raises(DataUnavailable, match=match) as error:
            use(folder)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_folder_as_it_was_written_claims_what_the_estimator_did(saved: dict[str, Path], kind: str) -> None:
    opened = open_private(saved[kind])
    assert opened.guarantee == ESTIMATORS[kind].guarantee_
    assert read_card(saved[kind]).guarantee == opened.guarantee


@pytest.mark.parametrize("kind", ["head, seeded", "head asked, seeded", "teachers, seeded", "dpsgd, seeded"])
def test_seeded_noise_that_is_marked_as_exact_is_refused_by_the_reason_alone(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    same = "head, gradient" if kind == "head, seeded" else kind.removesuffix(", seeded")
    exact = _claim(saved[same])

    def mark(found):
        claim = found["guarantee"]
        claim.update(status="proven", assumptions=exact["assumptions"])
        claim["parameters"]["noise_source"] = exact["parameters"]["noise_source"]

    def mark_the_reason_too(found):
        mark(found)
        found["guarantee"]["because"] = exact["because"]

    folder = _edit(_copied(saved[kind], tmp_path / "model"), mark)
    _refused(folder, "seed")
    # Nothing else refuses it: there is no signature.
    consistent = _edit(_copied(saved[kind], tmp_path / "consistent"), mark_the_reason_too)
    assert open_private(consistent).guarantee.status == "proven"


@pytest.mark.parametrize(
    ("kind", "part", "spent", "reason"),
    [
        ("head, cells", "calibration", None, "if and only if one was released"),
        ("head, cells", "centring", None, "nothing was spent on releasing them"),
        ("head, gradient", "centring", None, "nothing was spent on releasing one"),
        ("head, pairs", "class_sizes", None, "'stated'"),
        ("head, cells", "centring", 0.0, "a mu above 0"),
        ("head, gradient", "training", 0.0, "a mu above 0"),
    ],
)
def test_a_part_of_the_budget_that_is_left_out_everywhere_is_missed(
    saved: dict[str, Path], kind: str, part: str, spent: float | None, reason: str, tmp_path: Path
) -> None:
    """The claim and the budget are lowered too; what the part paid for is still in the folder."""

    def change(found):
        claim = found["guarantee"]
        facts = claim["parameters"]
        facts[f"mu_{part}"] = spent
        rest = [
            facts.get(f"mu_{name}") for name in ("size", "class_sizes", "centring", "calibration", "training")
        ]
        claim["mu"] = math.sqrt(sum(each**2 for each in rest if each is not None))
        found["epsilon"] = epsilon_of(claim["mu"], 1e-5)

    _refused(_edit(_copied(saved[kind], tmp_path / "model"), change), reason)


@pytest.mark.parametrize("weights", [[-50.0, 1.0], [5.0, 1.0], [1.0], [0.5, 0.5], None])
def test_weights_of_classes_that_no_training_has_are_refused(
    saved: dict[str, Path], weights: list[float] | None, tmp_path: Path
) -> None:
    def change(found):
        found["guarantee"]["parameters"]["class_weights"] = weights

    _refused(_edit(_copied(saved["head, pairs"], tmp_path / "model"), change), "class")


@pytest.mark.parametrize(("size", "divisor"), [(60, 2.0), (60, 1e6), (10**9, 1e9)])
def test_a_tolerance_that_the_training_cannot_certify_is_refused(
    saved: dict[str, Path], size: int, divisor: float, tmp_path: Path
) -> None:
    """All that follows from the tolerance is computed again."""
    for kind in ("head asked", "head asked, convexified", "head, output"):
        weights = load_file(saved[kind] / "weights.safetensors")

        def change(found, weights=weights):
            facts = found["guarantee"]["parameters"]
            found["declared_size"] = facts["declared_size"] = size
            facts["tolerance"] /= divisor
            moved = weight_sensitivity(facts)
            facts["sensitivity"] = moved.value
            if found["released"]:
                return
            head = HeadWeights(weights["weights"], weights["centre"], found["bias"], found["radius"])
            bounds = PrivateHeadWeights.certified(head, moved, max_norm=max_weight_norm(facts)).bounds
            found["bounds"]["one"]["value"] = facts["one_score"] = bounds.one.value
            found["bounds"]["vector"]["value"] = facts["score_vector_l2"] = bounds.vector.value

        folder = _edit(_copied(saved[kind], tmp_path / kind), change)
        _refused(folder, "but its training certifies")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: None, "states whitening"),
        (lambda matrix: np.diag(matrix).copy(), "states whitening"),
        (lambda matrix: matrix / 3, "not a symmetric matrix"),
        (lambda matrix: matrix[:2, :2].copy(), "not a symmetric matrix"),
        (lambda matrix: matrix.astype(np.float32), "not a symmetric matrix"),
    ],
    ids=["missing", "diagonal", "off the grid", "shape", "type"],
)
def test_a_whitening_that_does_not_fit_the_training_is_refused(
    saved: dict[str, Path], tmp_path: Path, change: Any, reason: str
) -> None:
    folder = _copied(saved["head, second moments"], tmp_path / "model")
    tensors = load_file(folder / "weights.safetensors")
    changed = change(tensors.pop("whitening"))
    save_file(
        tensors if changed is None else tensors | {"whitening": changed}, folder / "weights.safetensors"
    )
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    _edit(folder, lambda found: found.update(weights_sha256=digest))
    _refused(folder, reason)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_array_that_no_such_model_has_is_refused(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    folder = _copied(saved[kind], tmp_path / "model")
    file = folder / "weights.safetensors"
    save_file(load_file(file) | {"records": FEATURES.astype(np.float32)}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    _edit(folder, lambda found: found.update(weights_sha256=digest))
    _refused(folder, "'records', which no such model has")


@pytest.mark.parametrize("kind", ["head asked", "head asked, convexified"])
def test_weights_that_were_not_released_and_are_marked_so_are_refused(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    def mark(found):
        found.update(released=True, bounds=None, delta=1e-5, queries=None)

    folder = _edit(_copied(saved[kind], tmp_path / "model"), mark)
    _refused(folder)
    (folder / "account.json").unlink()
    _refused(folder)
    _edit(folder, lambda found: found.update(guarantee=_claim(saved["head, output"])))
    FileAccount.create(folder / "account.json")
    _refused(folder, "has an account of answers paid for, but its weights are marked as released")


GONE = object()
"""Instead of a value: the entry is removed."""
BY_PERSON = ["head, gradient", "head asked", "teachers", "dpsgd", "dpsgd, samples"]
UNPROVEN = [kind for kind in ESTIMATORS if "seeded" in kind or "not declared" in kind]
ONE_OF_EACH = ["head, gradient", "head asked", "teachers", "dpsgd"]
ASKED = ["head asked", "head asked, convexified"]
PROVEN = {"guarantee.status": "proven", "guarantee.assumptions": lambda old: _without(old, "is public")}
SMALLER = {"bounds.one.value": 1e-9, "bounds.vector.value": 1e-9}
SMALLER_FACTS = {
    f"guarantee.parameters.{each}": 1e-9 for each in ("one_score", "score_vector_l2", "sensitivity")
}
UNSAID = {f"guarantee.parameters.{each}_declared": GONE for each in ("classes", "size")}
AS_DECLARED = {f"guarantee.{each}": "as in teachers" for each in ("status", "because", "assumptions")}
SILENT: list[Any] = [None, -1, "x", [], {}, 1e308, True, [None], [False] * 2, [0, 0, 0], [[False]] * 3]
OTHER_CLASSES = json.loads(replace(MEASURED, classes=("a", "b", "c"), inferred=()).to_json())
NO_FEATURES: list[Any] = [None, {}]
NO_CLAIMS: list[Any] = [-1, [None], {}]
FACTS = "guarantee.parameters"
NOT_SPENT: list[dict[str, Any]] = [
    *({f"{FACTS}.mu_{name}": GONE} for name in ("centring", "moments", "calibration", "training")),
    *({f"{FACTS}.{name}": GONE} for name in ("scale", "outputs", "whitening", "dimension")),
    {f"{FACTS}.mu_calibration": GONE, f"{FACTS}.scale": GONE},
    {f"{FACTS}.whitening": "centre"},
    {f"{FACTS}.training_method": "output"},
]
REFUSED: list[tuple[list[str], list[dict[str, Any]], str]] = [
    (
        UNPROVEN,
        [PROVEN | {"guarantee.assumptions": []}],
        "'proven', but the rest of it implies 'conditional'",
    ),
    (
        ["head, classes not declared"],
        [PROVEN | {"guarantee.parameters.classes_declared": True}],
        "not declared",
    ),
    (
        ["teachers, size not declared"],
        [PROVEN | {"guarantee.parameters.size_declared": True}],
        "not declared",
    ),
    (["dpsgd"], [UNSAID], "is damaged"),
    (["teachers, size not declared"], [UNSAID | AS_DECLARED], "is damaged"),
    (["teachers"], [{"guarantee.because": lambda old: old + " It is proven."}], "states because "),
    (["teachers"], [{"guarantee.assumptions": ["Nothing."]}], "states assumptions "),
    (["teachers"], [{"guarantee.parameters.epsilons": 0}], "states parameters "),
    (ASKED, [SMALLER, SMALLER | SMALLER_FACTS], "is damaged"),
    (BY_PERSON, [{"unit": each} for each in ("person", "household", GONE)], "is damaged"),
    (BY_PERSON, [{"guarantee.unit": "person"}, {"holdout": GONE}], "is damaged"),
    (ONE_OF_EACH, [{"features": each} for each in NO_FEATURES], "is damaged"),
    (ONE_OF_EACH, [{"inputs": each} for each in (3, 0, 1e308, 10**12)], "is damaged"),
    (ONE_OF_EACH, [{"classes": each} for each in (None, ["no"], ["no", "yes", "perhaps"])], "is damaged"),
    (ONE_OF_EACH, [{"guarantee": each} for each in NO_CLAIMS], "is damaged"),
    (ONE_OF_EACH, [{"encoding": OTHER_CLASSES}], "is damaged"),
    (["head, gradient"], [{"bias": None}], "is damaged"),
    (["head, gradient"], [{f"{FACTS}.outputs": each} for each in (GONE, 0, 2, "1")], "is damaged"),
    (["head, cells"], NOT_SPENT, "is damaged"),
    (["teachers"], [{"silent": each} for each in SILENT], "is damaged"),
    (["teachers", "dpsgd"], [{"widths": each} for each in (None, [], [5, 2])], "is damaged"),
    (["teachers"], [{"queries": 0}, {"method": "best"}], "is damaged"),
]


def _without(listed: list[str], words: str) -> list[str]:
    return [each for each in listed if words not in each]


@pytest.mark.parametrize(
    ("kind", "edits", "match"),
    [(kind, edits, match) for kinds, many, match in REFUSED for kind in kinds for edits in many],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value)[:60],
)
def test_a_folder_whose_parts_contradict_each_other_is_refused_in_a_sentence(
    saved: dict[str, Path], kind: str, edits: dict[str, Any], match: str, tmp_path: Path
) -> None:
    def change(found: Any) -> None:
        for path, value in edits.items():
            *parents, name = path.split(".")
            place = found
            for parent in parents:
                place = place[parent]
            if value is GONE:
                del place[name]
            elif value == "as in teachers":
                place[name] = _claim(saved["teachers"])[name]
            else:
                place[name] = value(place[name]) if callable(value) else value

    _refused(_edit(_copied(saved[kind], tmp_path / "model"), change), match)


def test_a_model_of_another_kind_is_refused(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = _edit(_copied(saved["dpsgd"], tmp_path / "other"), lambda found: found.update(kind="mlp"))
    with pytest.raises(InvalidInput, match="not a private one"):
        open_private(folder)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_weights_of_another_folder_are_refused(saved: dict[str, Path], kind: str, tmp_path: Path) -> None:
    fitted = copy.copy(ESTIMATORS[kind]).fit(FEATURES[::-1] / 2, LABELS)
    other = save_private(fitted, tmp_path / "other", dataset="made up")
    shutil.copy(saved[kind] / "weights.safetensors", other)
    _refused(other, "are not those that model.json describes")


def test_an_encoding_that_was_measured_and_is_marked_as_declared_is_refused(tmp_path: Path) -> None:
    records = Records("made up", np.repeat(FEATURES, 2, axis=1), LABELS, 2, encoding=MEASURED)
    settings = PUBLIC | {"classes": None}
    folder = save_private(made(PrivateHead, **settings).fit(records), tmp_path / "model", dataset="made up")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        0o600
    }  # it holds what is not public
    guarantee = open_private(folder).guarantee
    assert guarantee.status == "conditional"
    assert guarantee.assumptions[-1].startswith("What was read off the records is public: ")
    declared = json.loads(Encoding(MEASURED.columns, MEASURED.label, MEASURED.classes).to_json())
    _refused(_edit(folder, lambda found: found.update(encoding=declared)))
    exact = PrivateHead(**PUBLIC).fit(FEATURES, LABELS).guarantee_.assumptions
    _refused(_edit(folder, lambda found: found["guarantee"].update(status="proven", assumptions=exact)))


@pytest.mark.parametrize("kind", BY_PERSON)
def test_a_guarantee_for_persons_lists_the_assumption_about_who_is_a_person(
    kind: str, tmp_path: Path
) -> None:
    by_groups = clone(ESTIMATORS[kind]).fit(FEATURES, LABELS, groups=np.arange(60) // 2)
    encoding = Encoding(
        MEASURED.columns, MEASURED.label, MEASURED.classes, person="customer_id", person_type="string"
    )
    records = Records("made up", np.repeat(FEATURES, 2, axis=1), LABELS, 2, encoding=encoding)
    records = replace(records, persons=np.array([f"{row // 2}" for row in range(60)], dtype=object))
    by_column = clone(ESTIMATORS[kind]).set_params(classes=None).fit(records)
    by_record = clone(ESTIMATORS[kind]).fit(FEATURES, LABELS)
    entry = "All rows of one person, and nobody else's, have the same entry in `groups`."
    value = "All rows of one person, and nobody else's, have the same value in column 'customer_id'."
    assert not {entry, value} & set(by_record.guarantee_.assumptions)
    for number, (fitted, listed) in enumerate(((by_groups, entry), (by_column, value))):
        assert fitted.guarantee_.unit == "person"
        assert fitted.guarantee_.status == by_record.guarantee_.status == "proven"
        assert listed in fitted.guarantee_.assumptions
        folder = save_private(fitted, tmp_path / str(number), dataset="made up")
        assert open_private(folder).guarantee.assumptions == fitted.guarantee_.assumptions
        _refused(_edit(folder, lambda found, text=listed: found["guarantee"]["assumptions"].remove(text)))


def test_an_encoding_with_a_person_column_and_a_guarantee_for_records_is_refused(tmp_path: Path) -> None:
    encoding = Encoding(MEASURED.columns, MEASURED.label, MEASURED.classes, person="who")
    records = Records("made up", np.repeat(FEATURES, 2, axis=1), LABELS, 2, encoding=encoding)
    settings = PUBLIC | {"classes": None}
    folder = save_private(made(PrivateHead, **settings).fit(records), tmp_path / "model", dataset="made up")
    _refused(folder, "it states unit 'record', but the rest of it implies 'person'")


def test_the_steps_that_were_fitted_before_are_a_condition_of_the_opened_model(tmp_path: Path) -> None:
    for number, kind in enumerate(BY_PERSON):
        pipeline = make_pipeline(StandardScaler(), clone(ESTIMATORS[kind])).fit(FEATURES, LABELS)
        folder = save_private(pipeline[-1], tmp_path / str(number), dataset="made up")
        opened = open_private(folder)
        assert opened.guarantee == pipeline[-1].guarantee_
        assert opened.guarantee.status == "conditional"
        assert "StandardScaler" in " ".join(opened.guarantee.assumptions)
        _refused(_edit(folder, lambda found: found["guarantee"]["parameters"].pop("own_code")))


def _leaves(value, path=()):
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    else:
        yield path, value


def _others(value):
    """Other values of the same type, and None."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [type(value)(value * 2), type(value)(value / 2), 0, 10**9, None]
    words = (
        *("proven", "conditional", "exact", "seeded", "weights", "query", "output", "gradient", "gaussian"),
        *("published", "pure", "cross-entropy", "convexified", "permute-and-flip", "exponential", "declared"),
    )
    return [*(word for word in words if word != value), None] if isinstance(value, str) else [1e-9, True, "x"]


def _promise(model):
    """All that an asker is promised and that answers are drawn with."""
    asked = model.classifier
    claim = model.guarantee
    drawn: tuple[Any, ...] = ()
    if isinstance(asked, Predictor):
        bounds: Any = asked.mechanism.bounds  # type: ignore[attr-defined]
        drawn = (
            asked.mechanism.name,
            asked.cost,
            asked.budget,
            asked.remaining,
            float(bounds.one),
            float(bounds.vector),
        )
    amounts = [f"{each or 0:.12g}" for each in (claim.epsilon, claim.mu, claim.delta)]
    return (claim.status, claim.definition, *amounts, *drawn)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if "rdp" in kind else kind for kind in ESTIMATORS],
)
def test_no_single_edit_of_a_description_changes_what_is_promised(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    """Every value of model.json is replaced by others: the folder is refused, or promises and draws as before.

    It may then list a further assumption, which promises less.
    """
    folder = _copied(saved[kind], tmp_path / "model")
    description = json.loads((folder / "model.json").read_text())
    first = open_private(folder)
    refused = 0
    for path, value in _leaves(description):
        for other in _others(value):
            edited = copy.deepcopy(description)
            place = edited
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = other
            (folder / "model.json").write_text(json.dumps(edited))
            try:
                opened = open_private(folder)
            except (DataUnavailable, InvalidInput):
                refused += 1
                continue
            assert _promise(opened) == _promise(first), (path, value, other)
            assert set(opened.guarantee.assumptions) >= set(first.guarantee.assumptions), (path, value, other)
    assert refused > 50


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS if kind.startswith("head,")])
def test_no_fact_that_is_missing_changes_what_is_promised(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    folder = _copied(saved[kind], tmp_path / "model")
    promised = _promise(open_private(folder))
    refused = 0
    for name in _claim(folder)["parameters"]:
        left = _copied(saved[kind], tmp_path / name)
        _edit(left, lambda found, name=name: found["guarantee"]["parameters"].pop(name))
        try:
            assert _promise(open_private(left)) == promised, name
        except DataUnavailable:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("kind", PAID)
def test_a_model_that_is_paid_per_answer_and_has_no_account_is_refused(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    folder = _copied(saved[kind], tmp_path / "model")
    assert FileAccount(folder / "account.json").answered == 0
    open_private(folder).predict(FEATURES[:2])
    (folder / "account.json").unlink()
    _refused(folder, r"account\.json is missing. The number of charged answers is unknown")
    assert not (folder / "account.json").exists()
    with pytest.raises(DataUnavailable, match="is missing"):
        load_models([f"m={folder}"], budget=Terms(1.0, 1e-5), accept_unproven=True)
    with pytest.raises(DataUnavailable, match="is missing"):
        save_private(clone(ESTIMATORS[kind]).fit(FEATURES, LABELS), folder, dataset="d", overwrite=True)
    FileAccount.create(folder / "account.json", answered=2)
    assert open_private(folder).remaining == 3


@pytest.mark.parametrize("kind", PAID)
def test_an_account_that_counts_more_than_the_budget_or_nothing_is_refused(
    saved: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    folder = _copied(saved[kind], tmp_path / "model")
    account = (folder / "account.json").read_text()
    (folder / "account.json").write_text(account.replace("00000000000000000000", "00000000000000000006"))
    _refused(folder, "its account counts 6 answers, but its budget is for 5")
    for broken in ("", account[:-4], "{}"):
        (folder / "account.json").write_text(broken)
        _refused(folder, "is damaged. The number of charged answers is unknown")


@pytest.mark.parametrize("estimator", [PrivateHead, DPSGD, Teachers])
def test_a_model_of_texts_names_its_sentence_encoder_and_is_opened_with_no_other(
    estimator: Any, tmp_path: Path
) -> None:
    schema = Schema(label="paid", classes=("no", "yes"), text=("note",))
    table = pd.DataFrame({"note": [f"note {number}" for number in range(12)], "paid": ["no", "yes"] * 6})
    settings = {PrivateHead: {}, DPSGD: {"delta": 1e-5, "steps": 2, "sampling_rate": 1.0}, Teachers: VOTE}
    fitted = made(estimator, schema=schema, declared_size=12, **settings[estimator]).fit(table)
    named = [each for each in fitted.guarantee_.assumptions if "was made without the private records" in each]
    assert len(named) == 1
    assert f"all-MiniLM-L6-v2 (SHA-256 {WEIGHTS_SHA256})" in named[0]
    folder = save_private(fitted, tmp_path / "notes", dataset="notes")
    assert open_private(folder).guarantee == fitted.guarantee_
    (description,) = (
        file for file in folder.glob("*.json") if WEIGHTS_SHA256 in file.read_text(encoding="utf-8")
    )
    text = description.read_text(encoding="utf-8")
    description.write_text(text.replace(WEIGHTS_SHA256, "0" * 64), encoding="utf-8")
    with pytest.raises(
        DataUnavailable, match=r"^Column 'note' needs the sentence encoder .* SHA-256 0{64}, but"
    ):
        open_private(folder)
