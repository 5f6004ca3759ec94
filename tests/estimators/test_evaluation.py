from __future__ import annotations

import copy
import errno
import itertools
import json
import math
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from quietmax import _io as io_module
from quietmax.accounting.costs import epsilon_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Holdout, Records, hold_out, is_held_out
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import evaluation as evaluation_module
from quietmax.estimators.evaluation import (
    EVALUATION_FILE,
    EvaluationCharge,
    _evaluation_mu,
    _noisy_evaluation,
    composed_guarantee,
    evaluate_folder,
    read_evaluations,
    split_name,
)
from quietmax.estimators.figures import Composition, Evaluation, sensitivity
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import decide_folder, open_private, save_private
from quietmax.estimators.teachers import Teachers
from quietmax.noise.sources import SeededNoise
from tests.estimators.evaluated import TRAINING, UNITS, noisy, sure, tables
from tests.estimators.made import interrupted_saving, made

# --- costs --------------------------------------------------------------------------------------------------------


def trained(**claimed: Any) -> Guarantee:
    return Guarantee(**({"status": "proven", "because": "Training."} | claimed))


HALF, PURE = trained(definition="gaussian", mu=0.5), trained(definition="pure", epsilon=1.0)
APPROXIMATE = trained(definition="approximate", epsilon=1.0, delta=1e-5, status="conditional")
PURE_MU, APPROXIMATE_MU = PURE.cost.as_gaussian().mu, mu_of(1.0, 1e-5)
COMPOSED: dict[str, tuple[Guarantee, list[tuple[float, Composition]], float]] = {
    "the holdout costs nothing beyond the training": (TRAINING, [(0.268, "parallel")], 0.268),
    "nor does less than that": (TRAINING, [(0.1, "parallel")], 0.268),
    "evaluations of the holdout add up": (HALF, [(0.3, "parallel"), (0.4, "parallel")], 0.5),
    "and can cost more": (HALF, [(0.3, "parallel"), (0.4, "parallel"), (1.2, "parallel")], 1.3),
    "other people may be in both": (replace(HALF, mu=0.3), [(0.4, "sequential")], 0.5),
    "both kinds": (replace(HALF, mu=0.3), [(0.3, "parallel"), (0.4, "sequential")], 0.5),
    "a pure training": (PURE, [(PURE_MU, "parallel")], PURE_MU),
}


@pytest.mark.parametrize(("training", "charged", "mu"), COMPOSED.values(), ids=COMPOSED)
def test_evaluations_compose_with_the_training(training: Guarantee, charged: Any, mu: float) -> None:
    together = composed_guarantee(training, [EvaluationCharge(*each) for each in charged])
    assert together.mu == pytest.approx(mu)
    assert (together.status, together.unit) == ("proven", training.unit)
    assert "3.8" in together.because or {kind for _, kind in charged} == {"sequential"}


def test_an_approximate_guarantee_composes_too() -> None:
    def composed(mu: float, composition: Composition) -> Guarantee:
        return composed_guarantee(APPROXIMATE, [EvaluationCharge(mu, composition)])

    free, more = composed(APPROXIMATE_MU, "parallel"), composed(1.0, "parallel")
    assert (free.epsilon, free.delta, free.status) == (1.0, 1e-5, "conditional")
    assert (more.epsilon, more.delta) == (epsilon_of(1.0, 1e-5), 1e-5)
    added = composed(APPROXIMATE_MU, "sequential")
    assert added.epsilon == pytest.approx(2.0, rel=1e-9)
    assert added.epsilon >= 1.0 + epsilon_of(APPROXIMATE_MU, 1e-5)
    assert added.delta == 2e-5


@pytest.mark.parametrize(
    ("training", "spent", "composition", "budget", "mu"),
    [
        (TRAINING, [], "parallel", {}, 0.268),
        (HALF, [0.3], "parallel", {}, 0.4),
        (PURE, [], "parallel", {}, PURE_MU),
        (APPROXIMATE, [], "parallel", {}, APPROXIMATE_MU),
        (HALF, [0.3, 0.4], "parallel", {"mu": 1.2}, 1.2),
        (HALF, [], "sequential", {"mu": 0.4}, 0.4),
        (HALF, [], "sequential", {"epsilon": 1.0}, mu_of(1.0, 1e-5)),
        (HALF, [0.3, 0.4], "parallel", {}, "holdout have spent as much as the training"),
        (TRAINING, [], "sequential", {}, "a budget is required"),
        (HALF, [], "parallel", {"epsilon": 1.0, "mu": 1.0}, "Only one of mu and epsilon"),
        (HALF, [], "parallel", {"delta": 1e-6}, "`delta` requires `epsilon`"),
    ],
)
def test_an_evaluation_costs_its_budget_or_what_is_free(
    training: Guarantee, spent: list[float], composition: Composition, budget: Any, mu: float | str
) -> None:
    earlier = [EvaluationCharge(each, "parallel") for each in spent]
    if isinstance(mu, float):
        assert _evaluation_mu(training, earlier, composition, **budget) == mu
        return
    with pytest.raises(BudgetExhausted if "spent" in mu else InvalidInput, match=mu):
        _evaluation_mu(training, earlier, composition, **budget)


def test_seeded_noise_makes_the_guarantee_conditional() -> None:
    guarantee = noisy(np.eye(2, dtype=np.int64) * 50).guarantee
    assert guarantee.status == "conditional"
    assert any("seed" in assumption for assumption in guarantee.assumptions)
    with pytest.raises(InvalidInput, match="must be charged as one that assumes 'seeded'"):
        _noisy_evaluation(
            sure(tables(), np.eye(2, dtype=np.int64)),
            *(tables(), TRAINING, [EvaluationCharge(0.268, "parallel")], SeededNoise(0)),
        )


# --- estimators and folders ---------------------------------------------------------------------------------------


def people(count: int = 3000, *, persons: bool = True, seed: int = 0) -> Records:
    """Records whose label follows the first feature; with persons, two rows each."""
    rng = np.random.default_rng(seed)
    features = rng.random((count, 4)).astype(np.float32)
    labels = (features[:, 0] + 0.2 * rng.normal(size=count) > 0.5).astype(np.int64)
    names = np.array([f"p{row // 2}" for row in range(count)], dtype=object)
    return Records("people", features, labels, 2, persons=names if persons else None)


def head(**settings: Any) -> PrivateHead:
    return made(PrivateHead, epsilon=1.0, delta=1e-5, declared_size=1200, **settings)


def held_out(share: float = 0.3, *, persons: bool = True, **settings: Any) -> tuple[Any, PrivateHead]:
    """People of whom some were held out, and a head trained on the others."""
    split = hold_out(people(persons=persons), share)
    return split, head(**settings).fit(split.train)


def save(fitted: Any, folder: Path, **options: Any) -> Path:
    return save_private(fitted, folder, dataset="people", **options)


def evaluate(folder: Path, records: Any, **options: Any) -> Evaluation:
    return evaluate_folder(folder, open_private(folder), records, **options)


def stored(folder: Path) -> list[EvaluationCharge]:
    return read_evaluations(folder, open_private(folder))


@pytest.mark.parametrize("persons", [True, False])
def test_a_model_is_evaluated_on_its_holdout_for_free_and_on_nobody_else(persons: bool) -> None:
    split = hold_out(people(persons=persons), 0.3, seed=4)
    fitted = head().fit(split.train)
    evaluation = fitted.evaluate(split.records)  # training set and holdout
    assert evaluation.composition == "parallel"
    assert evaluation.guarantee.mu == fitted.guarantee_.mu
    assert evaluation.guarantee.status == "proven"
    assert evaluation.unit == fitted.guarantee_.unit == ("person" if persons else "record")
    held_out = len(set(split.test.persons)) if split.test.persons is not None else len(split.test)
    # 5 standard deviations of the noise; the training set is three times as large.
    assert evaluation.size.value == pytest.approx(held_out, abs=5 * evaluation.noise * 3)
    right = np.mean(fitted.predict(split.test.features) == split.test.labels)
    assert evaluation.accuracy.value == pytest.approx(right, abs=0.08)
    with pytest.raises(BudgetExhausted):
        fitted.evaluate(split.test)
    further = fitted.evaluate(split.test, mu=fitted.guarantee_.mu)
    assert further.guarantee.mu == pytest.approx(fitted.guarantee_.mu * math.sqrt(2))
    fitted.fit(split.train)
    assert fitted.evaluate(split.test).guarantee == evaluation.guarantee


@pytest.mark.parametrize("kind", ["arrays", "records", "persons"])
def test_plain_arrays_compose_unless_they_are_declared_disjoint(kind: str) -> None:
    """No rule of a holdout is applied to them: the training set under other names is not the holdout."""
    data, groups = people(persons=False), None
    if kind == "arrays":
        fitted = head(classes=(0, 1)).fit(data.features[:2000], data.labels[:2000])
    else:
        split, fitted = held_out(persons=kind == "persons")
        data = split.train
        groups = np.arange(len(data)) if kind == "persons" else None
    arrays = (data.features, data.labels, groups)
    with pytest.raises(InvalidInput, match="a budget is required"):
        fitted.evaluate(*arrays)
    composed = fitted.evaluate(*arrays, epsilon=1.0, delta=1e-5)
    assert (composed.composition, composed.guarantee.status) == ("sequential", "proven")
    assert composed.guarantee.mu == pytest.approx(math.hypot(fitted.guarantee_.mu, mu_of(1.0, 1e-5)))
    assert composed.size.value == pytest.approx(len(data), abs=60)  # everybody is counted
    declared = fitted.evaluate(*arrays, disjoint=True).guarantee
    assert (declared.mu, declared.status) == (composed.guarantee.mu, "conditional")
    assert any("No evaluated person is in the training set" in each for each in declared.assumptions)


def test_the_evaluation_counts_the_unit_that_the_model_protects() -> None:
    data = people()
    by_person = head(classes=(0, 1)).fit(data.features, data.labels, groups=data.persons)
    with pytest.raises(InvalidInput, match="`groups` is required"):
        by_person.evaluate(data.features, data.labels, mu=1.0)
    evaluation = by_person.evaluate(data.features, data.labels, data.persons, mu=1.0)
    assert evaluation.size.value == pytest.approx(1500, abs=40)
    by_record = head(classes=(0, 1)).fit(data.features, data.labels)
    with pytest.raises(InvalidInput, match="leave out `groups`"):
        by_record.evaluate(data.features, data.labels, data.persons, mu=1.0)


def test_a_frame_is_encoded_and_its_labels_and_persons_are_found() -> None:
    data = people()
    frame = pd.DataFrame(
        {"a": data.features[:, 0], "who": data.persons, "ill": np.array(["no", "yes"])[data.labels]}
    )
    schema = Schema(label="ill", classes=("no", "yes"), bounds={"a": (0, 1)}, person="who")
    fitted = head(schema=schema).fit(frame)
    evaluation = fitted.evaluate(frame, mu=1.0)
    assert (evaluation.classes, evaluation.unit) == (("no", "yes"), "person")
    assert evaluation.size.value == pytest.approx(1500, abs=40)
    assert evaluation.recall["yes"].low > 0.6
    labels = frame.pop("ill")
    again = fitted.evaluate(frame, labels, mu=1.0)
    assert again.accuracy.value == pytest.approx(evaluation.accuracy.value, abs=0.1)
    with pytest.raises(InvalidInput, match="leave out `groups`"):
        fitted.evaluate(frame, labels, data.persons, mu=1.0)


@pytest.mark.parametrize("kind", ["teachers", "head"])
def test_a_model_that_is_paid_per_answer_cannot_be_evaluated(kind: str, tmp_path: Path) -> None:
    """Its account and its stored answers would tell exactly who was held out."""
    split = hold_out(people(400), 0.3, seed=1)
    fitted: Teachers | PrivateHead = (
        Teachers(epsilon=10.0, delta=1e-5, queries=200, teachers=5, declared_size=140)
        if kind == "teachers"
        else PrivateHead(epsilon=9.0, release="query", queries=600, declared_size=140)
    ).fit(split.train)
    refused = r"paid per answer cannot be evaluated: .* people whose records are public"
    for budget in ({}, {"epsilon": 1.0}):
        with pytest.raises(InvalidInput, match=refused):
            fitted.evaluate(split.records, **budget)
    folder = save(fitted, tmp_path / "model")
    for exact in (False, True):
        with pytest.raises(InvalidInput, match=refused):
            evaluate(folder, split.records, exact=exact)
    assert fitted.predictor_.answered == 0
    assert not (folder / EVALUATION_FILE).exists()
    assert stored(folder) == []


def test_records_that_were_split_by_row_cannot_be_trained_on_by_person() -> None:
    data = people()
    split = hold_out(people(persons=False), 0.3)
    assert data.persons is not None
    with pytest.raises(InvalidInput, match="split without knowing `groups`"):
        head().fit(split.train, groups=data.persons[split.train_rows])
    head().fit(hold_out(people(persons=False), 0.0).train, groups=data.persons)


def test_people_who_may_have_other_names_are_refused(tmp_path: Path) -> None:
    """A file calls them 00007, and pandas reads 7: with other names, most people would be counted as held out."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": [f"{row:05d}" for row in range(800)], "age": rng.integers(0, 100, 800)})
    frame["ill"] = np.where(frame["age"] > 50, "yes", "no")
    schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, person="who")
    split = hold_out(encode_table(frame, schema), 0.5, seed=1)
    fitted = head().fit(split.train)
    renamed = frame.assign(who=frame["who"].astype(int))
    for who in (renamed["who"], renamed["who"].astype(float), frame["who"].astype(object)):
        with pytest.raises(InvalidInput, match=r"the same type as in training \(string\)"):
            fitted.evaluate(frame.assign(who=who))
    with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
        fitted.evaluate(encode_table(renamed, schema))
    evaluation = fitted.evaluate(frame.astype({"who": "category"}))
    assert evaluation.guarantee.status == "proven"
    assert "The evaluated people have the same names as in training." in evaluation.guarantee.assumptions
    folder = save(fitted, tmp_path / "model")
    with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
        evaluate(folder, encode_table(renamed, schema), exact=True)


def test_records_of_another_encoding_are_refused() -> None:
    """Rows are held out by their encoded content: with other bounds, other rows would be."""
    frame = pd.DataFrame({"a": people().features[:, 0], "ill": people().labels})
    narrow, wide = (
        encode_table(frame, Schema(label="ill", classes=("0", "1"), bounds={"a": (0, bound)}))
        for bound in (1, 2)
    )
    fitted = head().fit(hold_out(narrow, 0.3).train)
    for other in (wide, replace(narrow, encoding=None)):
        with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
            fitted.evaluate(other)
    plain = head().fit(hold_out(people(persons=False), 0.3).train).evaluate(people(persons=False))
    assert "The evaluated records are encoded as in training." in plain.guarantee.assumptions


def test_a_free_evaluation_of_records_assumes_that_they_are_encoded_as_in_training() -> None:
    """Records that were trained on have other numbers in a column of another type, and so may seem held out."""
    frame = pd.DataFrame({"a": np.random.default_rng(0).random(2000), "ill": np.arange(2000) % 2})
    schema = Schema(label="ill", classes=("0", "1"), bounds={"a": (0, 3)}, complete=("a",))
    split = hold_out(encode_table(frame, schema), 0.3)
    fitted, trained = head(steps=1).fit(split.train), frame.iloc[split.train_rows]
    evaluation = fitted.evaluate(trained.astype({"a": "float32"}))
    assert evaluation.composition == "parallel"
    assert evaluation.size.low > 0
    assumed = (*fitted.guarantee_.assumptions, "The evaluated records are encoded as in training.")
    assert evaluation.guarantee.assumptions == assumed


def saved(tmp_path: Path) -> tuple[Path, Records]:
    """A folder with a model, and the people on whom it can be evaluated."""
    split, fitted = held_out()
    return save(fitted, tmp_path / "model"), split.records


def test_a_folder_keeps_its_evaluations_and_what_they_cost(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    model = open_private(folder)
    assert stored(folder) == []
    first = evaluate_folder(folder, model, records, mu=0.1)
    second = evaluate_folder(folder, model, records)  # what is left
    assert second.guarantee.mu == model.guarantee.mu
    assert math.hypot(0.1, second.mu or 0.0) == pytest.approx(model.guarantee.mu or 0.0)
    assert [each.result for each in stored(folder)] == [first, second]
    with pytest.raises(BudgetExhausted, match="as much as the training"):
        evaluate_folder(folder, model, records)
    third = evaluate_folder(folder, model, records, mu=1.0)
    assert third.guarantee.mu == pytest.approx(math.hypot(model.guarantee.mu or 0.0, 1.0))
    assert len(stored(folder)) == 3


def test_an_estimator_that_is_saved_keeps_its_evaluations_in_the_folder(tmp_path: Path) -> None:
    split, fitted = held_out()
    before = fitted.evaluate(split.test, mu=0.1)
    folder = save(fitted, tmp_path / "model")
    assert [each.result for each in stored(folder)] == [before]
    evaluate(folder, split.records, mu=0.1)
    rest = fitted.evaluate(split.test)
    assert rest.mu == pytest.approx(math.sqrt(fitted.guarantee_.mu**2 - 0.02))
    assert [each.result for each in stored(folder)][2] == rest
    save(fitted, folder, overwrite=True)
    assert [each.result for each in stored(folder)][2] == rest
    save(head().fit(split.train), folder, overwrite=True)
    assert stored(folder) == []
    with pytest.raises(DataUnavailable, match="those of another model"):
        fitted.evaluate(split.test, mu=0.1)


def test_of_several_folders_only_the_first_evaluates_for_free(tmp_path: Path) -> None:
    split, fitted = held_out()
    training = fitted.guarantee_.mu
    first, second = (save(fitted, tmp_path / name) for name in "ab")
    assert (first / "model.json").read_bytes() == (second / "model.json").read_bytes()
    model = open_private(second)
    with pytest.raises(BudgetExhausted, match=r"saved before, and only the first one.* requires a budget"):
        evaluate_folder(second, model, split.records)
    evaluation = fitted.evaluate(split.records)
    assert [each.result for each in read_evaluations(first, model)] == [evaluation]
    further = evaluate_folder(second, model, split.records, mu=0.1)
    assert further.guarantee.mu == pytest.approx(
        math.hypot(training, 0.1)
    )  # with what the first one may spend
    assert "left to another copy" in further.guarantee.because
    third = save(fitted, tmp_path / "c")
    assert [each.result for each in read_evaluations(third, model)] == [evaluation]
    with pytest.raises(BudgetExhausted):
        evaluate(third, split.records)
    shutil.rmtree(first)
    fourth = save(fitted, tmp_path / "d")
    with pytest.raises(BudgetExhausted, match="only the first one"):
        evaluate(fourth, split.records)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_save_leaves_one_free_evaluation(tmp_path: Path, moment: str) -> None:
    split, fitted = held_out()
    with interrupted_saving(moment):
        save(fitted, tmp_path / "model")
    assert fitted.evaluate(split.records).mu == fitted.guarantee_.mu
    if moment == "before":
        save(fitted, tmp_path / "model")
    with pytest.raises(BudgetExhausted):
        evaluate_folder(tmp_path / "model", open_private(tmp_path / "model"), split.records)


def test_a_folder_with_another_holdout_than_its_guarantee_names_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)[0] / "model.json"
    content = json.loads(path.read_text())
    assert content["guarantee"]["parameters"]["holdout"] == content["holdout"] == {"share": 0.3, "seed": 0}
    for edited in ({"share": 0.999, "seed": 0}, {"share": 0.3, "seed": 1}, None):
        path.write_text(json.dumps(content | {"holdout": edited}))
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(path.parent)
    del content["evaluation_id"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataUnavailable, match="id of its evaluations"):
        open_private(path.parent)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_copy_of_an_estimator_cannot_evaluate_the_holdout_for_free(evaluated: bool, tmp_path: Path) -> None:
    split, fitted = held_out()
    if evaluated:
        fitted.evaluate(split.test, mu=0.1)
    copies = [copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))]
    copies.append(copy.deepcopy(copies[0]))
    for number, copied in enumerate(copies):
        with pytest.raises(BudgetExhausted, match="copied or saved before"):
            copied.evaluate(split.test)
        folder = save(copied, tmp_path / str(number))
        with pytest.raises(BudgetExhausted, match="copied or saved before"):
            evaluate(folder, split.test)
        paid = copied.evaluate(split.test, mu=0.1).guarantee
        assert paid.mu == pytest.approx(math.hypot(fitted.guarantee_.mu, 0.1))
    free = fitted.evaluate(split.test).guarantee
    assert free.mu == fitted.guarantee_.mu


def test_two_references_to_one_estimator_share_its_account(tmp_path: Path) -> None:
    split, fitted = held_out()
    shared = copy.copy(fitted)
    folder = save(fitted, tmp_path / "model")
    shared.evaluate(split.test)
    with pytest.raises(BudgetExhausted):
        evaluate(folder, split.test)


def test_a_fork_cannot_evaluate_and_saves_without_the_free_evaluation(tmp_path: Path) -> None:
    split, fitted = held_out()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            fitted.evaluate(split.test)
        except QuietmaxError:
            save(fitted, tmp_path / "forked")
        os._exit(0)
    os.waitpid(child, 0)
    folder = tmp_path / "forked"
    with pytest.raises(BudgetExhausted, match="only the first one"):
        evaluate(folder, split.test)
    fitted.evaluate(split.test)


def test_what_an_evaluation_assumes_is_stored_with_its_charge(tmp_path: Path) -> None:
    data = people(persons=False)
    fitted = head(classes=(0, 1), random_state=0).fit(data.features[:2000], data.labels[:2000])
    evaluation = fitted.evaluate(data.features[2000:], data.labels[2000:], disjoint=True)
    folder = save(fitted, tmp_path / "model")
    (found,) = stored(folder)
    assert found.assumes == ("disjoint", "seeded")
    assert composed_guarantee(open_private(folder).guarantee, [found]) == evaluation.guarantee


def test_exact_figures_are_neither_charged_nor_stored(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    exact = evaluate(folder, records, exact=True)
    assert exact.exact
    assert exact.guarantee is None
    assert exact.to_json()["publishable"] is False
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    held_out = hold_out(records, 0.3).test
    assert exact.size.value == pytest.approx(len(set(held_out.persons)), abs=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "failing", "problem"),
    [
        (evaluation_module, "release_gaussian", KeyboardInterrupt()),
        (io_module, "atomic_write", KeyboardInterrupt()),
        (io_module, "atomic_write", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_an_evaluation_that_does_not_end_costs_nothing(
    where: Any, failing: str, problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, records = saved(tmp_path)
    model = open_private(folder)
    before = (folder / EVALUATION_FILE).read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr(where, failing, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(problem, KeyboardInterrupt) else QuietmaxError):
        evaluate_folder(folder, model, records)
    monkeypatch.undo()
    assert (folder / EVALUATION_FILE).read_bytes() == before
    evaluate_folder(folder, model, records)
    with pytest.raises(BudgetExhausted):
        evaluate_folder(folder, model, records)


def test_evaluations_that_are_missing_edited_or_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    evaluate(folder, records)
    path = folder / EVALUATION_FILE
    text = path.read_text()
    content = json.loads(text)
    other = save(head().fit(hold_out(records, 0.3).train), tmp_path / "other")
    entry = content["evaluations"][0]
    edits: list[object] = [
        None, json.loads((other / EVALUATION_FILE).read_text()),
        [], {}, {**content, "format": "x"}, {**content, "id": "0" * 32}, {**content, "evaluations": 3},
        {**content, "evaluations": []} | {"id": None},
        {**content, "evaluations": [{**entry, "mu": 0.01}]},
        {**content, "evaluations": [{**entry, "composition": "none", "result": None}]},
        {**content, "evaluations": [{**entry, "assumes": ["nothing"]}]},
        {**content, "evaluations": [{**entry, "assumes": []}]},
        {**content, "evaluations": [{**entry, "reserved": True}]},
        {**content, "evaluations": [{**entry, "result": None}]},
        {**content, "evaluations": [{**entry, "result": {**entry["result"], "noise": 0}}]},
        {**content, "evaluations": [{**entry, "result": {**entry["result"], "unit": "record"}}]},
        *(
            {**content, "evaluations": [{**entry, "result": {**entry["result"], "guarantee": edited}}]}
            for edited in (
                {**entry["result"]["guarantee"], "mu": 0.01},
                {**entry["result"]["guarantee"], "status": "conditional"},
                {**entry["result"]["guarantee"], "unit": "record"},
                {**entry["result"]["guarantee"], "assumptions": []},
            )
        ),
    ]  # fmt: skip
    for edited in edits:
        path.unlink()
        if edited is not None:
            path.write_text(json.dumps(edited))
        for use in (stored, partial(evaluate, records=records, mu=0.1)):
            with pytest.raises(
                DataUnavailable, match=r"those of another model\. What was spent on them is unknown"
            ):
                use(folder)
        path.write_text(text)
    evaluate(folder, records, mu=0.1)


def test_models_that_hold_out_different_people_have_splits_of_different_names(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": people().features[:, 0], "ill": people().labels, "who": people().persons})

    def name(records: Records, share: float = 0.3, seed: int = 0) -> str | None:
        fitted = head(steps=1).fit(hold_out(records, share, seed=seed).train)
        return split_name(open_private(save(fitted, tmp_path / "model", overwrite=True)))

    def table(person: str | None, bound: int = 1) -> Records:
        columns: dict[str, Any] = {"label": "ill", "classes": ("0", "1"), "bounds": {"a": (0, bound)}}
        return encode_table(frame, Schema(**columns, person=person, ignore=() if person else ("who",)))

    by_person = table("who")
    names = {
        name(by_person),
        name(by_person, seed=1),
        name(by_person, 0.2),
        name(table(None)),
        name(table(None, 2)),
    }
    assert len(names - {None}) == 5
    assert name(by_person) in names
    for persons in (True, False):  # nothing says how the people or rows of two arrays are related
        names |= {name(people(persons=persons)) for _ in range(2)}
    assert len(names) == 9
    assert name(people(), 0.0) is None


def test_a_person_changes_the_counts_by_what_this_person_adds_and_nobody_elses(tmp_path: Path) -> None:
    """From the table to the counts, bit for bit: encoding, side of the split, features, answers, groups and shares."""
    rng = np.random.default_rng(8)
    count = 400
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 90, count),
            "city": rng.choice(["a", "b", "c", "elsewhere"], count),
            "who": [f"p{each}" for each in rng.integers(0, 120, count)],
        }
    )
    frame["ill"] = np.where(frame["age"] + 20 * rng.normal(size=count) > 50, "yes", "no")
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"age": (18, 90)},
        categories={"city": ("a", "b", "c")},
        person="who",
    )
    folder = save_private(
        head().fit(hold_out(encode_table(frame, schema), 0.5).train), tmp_path / "model", dataset="people"
    )
    decide_folder(folder, threshold={"yes": 0.4})
    model = open_private(folder)

    def counts(rows: pd.DataFrame, by: Any = "city") -> NDArray[np.float64]:
        exact = evaluate_folder(folder, model, encode_table(rows, schema), exact=True, by=by, at=[0.3])
        assert exact.by_group is not None
        tables = (exact.confusion, exact.calibration, exact.by_group.counts)
        return np.concatenate([np.ravel(table) for table in tables]) * UNITS

    everybody = counts(frame)
    parts = np.cumsum([0, 4, 2 * 16, 4 * 2 * 2 * 2]).tolist()
    assert len(everybody) == parts[-1]
    assert np.array_equal(everybody, counts(frame.sample(frac=1, random_state=1)))
    both_classes = frame.groupby("who")["ill"].nunique() == 2  # encode_table needs two classes
    moved = 0
    for who in both_classes.index[both_classes][:25]:
        own = counts(frame[frame["who"] == who])
        assert np.array_equal(everybody - counts(frame[frame["who"] != who]), own)
        assert (own >= 0).all()
        for start, end in itertools.pairwise(parts):
            assert own[start:end].sum() <= UNITS
        assert np.linalg.norm(own / UNITS) <= sensitivity(3)
        several = frame[frame["who"] == who]["city"].nunique()
        assert not own.any() or (own[parts[2] :].reshape(4, 8).sum(1) > 0).sum() == several
        moved += bool(own.any())
    assert 3 < moved < 22  # the others were in the training set
    ages = counts(frame, ("age", [30, 60]))[parts[2] :].reshape(4, 8).sum(1)
    held = frame[is_held_out(encode_table(frame, schema), Holdout(0.5, 0))]
    shares = 1 / held.groupby("who")["who"].transform("size")
    for number, (low, high) in enumerate([(0, 30), (30, 60), (60, 100)]):
        chosen = held["age"].between(low, high, inclusive="left")
        assert ages[number] / UNITS == pytest.approx(shares[chosen].sum(), abs=1e-3)
    assert ages[3] == 0


def test_groups_and_thresholds_are_free_next_to_the_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"age": rng.integers(18, 90, 3000), "sex": rng.choice(["f", "m"], 3000)})
    frame["who"] = [f"p{row // 2}" for row in range(3000)]
    frame["ill"] = np.where(frame["age"] + 15 * rng.normal(size=3000) > 50, "yes", "no")
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"age": (18, 90)},
        categories={"sex": ("f", "m")},
        person="who",
    )
    fitted = head().fit(hold_out(encode_table(frame, schema), 0.4).train)
    folder = save(fitted, tmp_path / "model")
    refused: dict[Any, str] = {
        "who": "must be a column of the schema, got 'who'; the columns are 'age', 'sex'",
        "age": "age=30,50; got 'age'",
        ("sex", (1.0,)): "got 'sex' with numbers",
        ("age", (18.0,)): "above 18 and at most 90, got 18",
    }
    for wrong, words in refused.items():
        with pytest.raises(InvalidInput, match=words):
            fitted.evaluate(frame, by=wrong)
    with pytest.raises(InvalidInput, match="between 0 and 1, got 1"):
        fitted.evaluate(frame, at=[1.0])
    evaluation = fitted.evaluate(frame, by="sex", at=[0.3])  # what was refused has cost nothing
    assert evaluation.guarantee.mu == fitted.guarantee_.mu
    assert evaluation.noise == pytest.approx(math.sqrt(3) / fitted.guarantee_.mu, rel=1e-3)
    assert [each.result for each in stored(folder)] == [evaluation]
    first, second, nobody = evaluation.groups
    assert (first.name, second.name, nobody.name) == ("f", "m", "missing or other")
    assert nobody.accuracy.value is None
    for group in (first, second):
        assert group.size.value == pytest.approx(300, abs=110)
    with pytest.raises(BudgetExhausted):
        fitted.evaluate(frame, by="sex")
    data = people(persons=False)
    plain = head(classes=(0, 1)).fit(data.features, data.labels)
    with pytest.raises(InvalidInput, match="trained on a table with a schema"):
        plain.evaluate(data.features, data.labels, by="sex", mu=1.0)
