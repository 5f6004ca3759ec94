"""Which account pays for a model, and what is charged when it is deployed."""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from quietmax.accounting import GaussianCost, PureCost
from quietmax.accounting.costs import LIMIT
from quietmax.data import Schema
from quietmax.data.records import Records, hold_out
from quietmax.data.tables import table_rows
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.estimators import DPSGD, DPSGDSettings, PrivateHead, Teachers, open_private, save_private
from quietmax.estimators.evaluation import evaluate_folder, evaluated_rows
from quietmax.ledger import Charge, Ledger, Terms
from quietmax.ledger.transactions import Charged, Failed
from quietmax.models import TrainingSettings
from quietmax.models.features import Identity
from quietmax.server import Client, Service, Settings
from quietmax.server.deployment import (
    Deployment,
    ModelRepository,
    _account_name,
    check_deployments,
    deploy,
    load_models,
)
from quietmax.server.run import run_in_thread
from quietmax.server.telemetry import Log
from quietmax.spending import FileAccount
from tests.server.running_service import (
    LEDGER_DOWN,
    some_rows,
)


def test_a_retrained_model_of_the_same_data_set_continues_its_account(folder: Path, ledger: Ledger) -> None:
    loaded = load_models([f"one={folder / 'plain'}"], budget=Terms(1.0), queries=10, accept_unproven=True)
    (first,) = deploy(ledger, loaded, budget=Terms(1.0))
    retrained = load_models([f"two={folder / 'plain'}"], budget=Terms(1.0), queries=5, accept_unproven=True)
    (second,) = deploy(ledger, retrained, budget=Terms(1.0))
    assert first.account.id == second.account.id
    assert (first.unit_cost, second.unit_cost) == (LIMIT // 10, LIMIT // 5)
    with pytest.raises(InvalidInput, match="was opened with mu = 1"):
        deploy(ledger, loaded, budget=Terms(2.0))
    (again,) = deploy(ledger, loaded)
    assert again.account.id == first.account.id


def test_records_are_counted_in_a_second_account_only_with_a_reason_in_words(
    folder: Path, ledger: Ledger
) -> None:
    loaded = load_models([str(folder / "head")])
    (first,) = deploy(ledger, loaded)
    with pytest.raises(InvalidInput, match=r"belong to the account 'visitors'.*a reason"):
        deploy(ledger, loaded, account="fresh")
    with pytest.raises(InvalidInput, match="reason must have at least 3 words"):
        deploy(ledger, loaded, account="fresh", because="because")
    assert [account.name for account in ledger.accounts()] == ["visitors"]
    (second,) = deploy(ledger, loaded, account="fresh", because="New records came in under the old name.")
    assert second.account.name == "fresh"
    (third,) = deploy(ledger, loaded)
    assert third.account.id == second.account.id != first.account.id
    body = [json.loads(row.detail) for row in ledger.export() if row.kind in ("open", "reassign")]
    assert sum("New records came in" in detail.get("because", "") for detail in body) == 2
    assert ledger.verify().sound


def test_two_releases_from_the_same_records_share_one_budget(folder: Path, ledger: Ledger) -> None:
    head = load_models([str(folder / "head")])
    teachers = load_models([str(folder / "teachers")])
    budget = Terms(4.0, 1e-5)
    (one,) = deploy(ledger, head, budget=budget, account="same")
    spent = ledger.account("same").spent_units
    assert 0 < spent < LIMIT
    assert one.training_cost is not None
    assert spent == one.account.units(one.training_cost)
    (two,) = deploy(ledger, teachers, account="same")
    assert two.account.id == one.account.id
    assert ledger.account("same").spent_units == spent
    deploy(ledger, head, account="same")
    assert ledger.account("same").spent_units == spent, "training is charged once"


def test_a_head_that_cost_more_than_what_is_left_is_not_served(folder: Path, ledger: Ledger) -> None:
    head = load_models([str(folder / "head")])
    few = Terms(0.5, 1e-5)
    ledger.open_account("visitors", few.total("gaussian"), few)
    with pytest.raises(QuietmaxError, match="spent more than remains"):
        deploy(ledger, head)
    assert ledger.account("visitors").spent_units == 0


def test_a_gaussian_model_is_not_paid_from_a_pure_account(folder: Path, ledger: Ledger) -> None:
    ledger.open_account("patients", PureCost(9.0), Terms(9.0))
    with pytest.raises(InvalidInput, match="cannot be paid from the account 'patients'"):
        deploy(ledger, load_models([str(folder / "teachers")]))


def test_the_budget_of_a_folder_moves_into_the_ledger_and_nothing_is_left_in_it(
    folder: Path, ledger: Ledger, tmp_path: Path
) -> None:
    rows = some_rows(7).astype(np.float32)
    open_private(folder / "teachers").predict(rows)
    (deployment,) = deploy(ledger, load_models([str(folder / "teachers")]))
    assert deployment.account.remaining_units // deployment.unit_cost == 33
    with pytest.raises(BudgetExhausted):
        open_private(folder / "teachers").predict(rows + 1)
    deploy(ledger, load_models([str(folder / "teachers")]))
    assert ledger.account("patients").spent_units == 7 * deployment.unit_cost, "migrated once"
    assert [row.kind for row in ledger.export("patients")] == ["open", "migrated-budget", "answered"]
    with Ledger(tmp_path / "another.sqlite") as another:
        (emptied,) = deploy(another, load_models([str(folder / "teachers")]))
        assert emptied.account.remaining_units < emptied.unit_cost


def test_an_answer_from_the_folder_during_the_migration_is_charged_too(
    folder: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = FileAccount(folder / "teachers" / "account.json")
    original = Ledger.charge
    charges: list[Charge] = []

    def answer_in_between(self: Ledger, charge: Charge) -> Any:
        result = original(self, charge)
        if not charges:
            account.charge(2, 40)
        charges.append(charge)
        return result

    monkeypatch.setattr(Ledger, "charge", answer_in_between)
    (deployment,) = deploy(ledger, load_models([str(folder / "teachers")]))
    assert ledger.account("patients").spent_units == 2 * deployment.unit_cost
    assert account.answered == 40
    assert {charge.kind for charge in charges} == {"migrated-budget"}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("mnist", "mnist"),
        ("my people.csv", "my-people.csv"),
        ("/data/x", "data-x"),
        ("", "records"),
        ("(keys)", "keys"),
    ],
)
def test_a_data_set_names_its_account(dataset: str, name: str) -> None:
    assert _account_name(dataset) == name


PUBLIC: dict[str, Any] = {"declared_size": 120, "classes": (0, 1)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    rng = np.random.default_rng(0)
    features = rng.random((120, 3), dtype=np.float32)
    labels = (features[:, 0] > 0.5).astype(int)
    for name, epsilon in (("strong", 1.0), ("weak", 50.0)):
        private = DPSGD(epsilon, 1e-5, settings=DPSGDSettings(sampling_rate=0.5, steps=4), **PUBLIC).fit(
            features, labels
        )
        assert private.guarantee_.definition == "approximate"
        save_private(private, folder / name, dataset="people")
    asked = Teachers(1.0, 1e-5, 10, 3, network=TrainingSettings((4,), epochs=1), **PUBLIC)
    save_private(asked.fit(features, labels), folder / "asked", dataset="people")
    released = PrivateHead(1.0, 1e-5, features=Identity(), **PUBLIC).fit(features, labels)
    save_private(released, folder / "released", dataset="people")
    return folder


@pytest.fixture
def folders(trained: Path, tmp_path: Path) -> Path:
    """Copies of the model folders: serving one takes its account into the ledger."""
    return shutil.copytree(trained, tmp_path / "models")


def _deploy(ledger: Ledger, folders: Path, name: str, **options: Any) -> Deployment:
    return deploy(ledger, load_models([str(folders / name)]), **options)[0]


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_a_model_weaker_than_the_budget_is_refused_and_opens_no_account(
    folders: Path, ledger: Ledger, delta: float
) -> None:
    name, epsilon = ("weak", 1.0) if delta == 1e-5 else ("strong", 2.0)
    with pytest.raises(InvalidInput, match="but its account allows epsilon"):
        _deploy(ledger, folders, name, budget=Terms(epsilon, delta))
    assert ledger.accounts() == []
    assert _deploy(ledger, folders, "strong").status == "proven"


def test_it_takes_the_account_whole_once_and_nothing_can_be_granted_afterwards(
    folders: Path, ledger: Ledger
) -> None:
    for _ in range(2):
        deployment = _deploy(ledger, folders, "strong")
        assert deployment.account.remaining_units == 0
        assert deployment.total_guarantee(deployment.account).epsilon == 1.0
    with pytest.raises(InvalidInput, match="reserved for the model strong/1"):
        ledger.grant("people", Terms(2.0, 1e-5), "more budget for another model")
    with pytest.raises(InvalidInput, match="but its account allows epsilon"):
        _deploy(ledger, folders, "weak")
    kinds = [entry.kind for entry in ledger.export("people")]
    assert kinds == ["open", "exclusive", "training", "answered"]
    assert ledger.verify().sound


def test_it_takes_grants_made_before_too_and_leaves_nothing_for_others(folders: Path, ledger: Ledger) -> None:
    assert _deploy(ledger, folders, "asked").account.remaining_units > 0
    ledger.grant("people", Terms(2.0, 1e-5), "more budget for the second model")
    assert _deploy(ledger, folders, "strong").account.remaining_units == 0
    assert _deploy(ledger, folders, "asked").account.remaining_units == 0
    assert ledger.verify().sound


def test_it_comes_too_late_for_an_account_that_has_paid_already(folders: Path, ledger: Ledger) -> None:
    deployment = _deploy(ledger, folders, "asked")
    charge = Charge(
        deployment.account.id, ledger.client("ann"), deployment.label, deployment.unit_cost, rows=1
    )
    assert isinstance(ledger.charge(charge), Charged)
    with pytest.raises(InvalidInput, match="has already paid for something"):
        _deploy(ledger, folders, "strong")
    assert ledger.account("people").spent_units == deployment.unit_cost


def test_a_model_that_has_spent_more_than_the_budget_asked_for_opens_no_account(
    folders: Path, ledger: Ledger
) -> None:
    with pytest.raises(QuietmaxError, match=r"more than the budget of epsilon 0\.5 and delta 1e-05"):
        _deploy(ledger, folders, "released", budget=Terms(0.5, 1e-5))
    assert ledger.accounts() == []
    assert _deploy(ledger, folders, "released").account.spent_units > 0


@pytest.mark.parametrize("lowered", ["grant", "revoke"])
def test_it_is_not_served_from_an_account_that_was_lowered_below_its_terms(
    folders: Path, ledger: Ledger, lowered: str
) -> None:
    _deploy(ledger, folders, "asked")
    if lowered == "grant":
        ledger.grant("people", Terms(0.1, 1e-5), "less budget than at first")
    else:
        ledger.revoke("people", None, "nothing more for anybody")
    with pytest.raises(InvalidInput, match="budget was lowered"):
        _deploy(ledger, folders, "strong")
    assert "exclusive" not in [entry.kind for entry in ledger.export("people")]


def test_answers_given_outside_that_the_account_cannot_pay_stop_the_service(
    folder: Path, ledger: Ledger
) -> None:
    """A folder that answered before, and an account of which nothing is left."""
    deploy(ledger, load_models([str(shutil.copytree(folder / "teachers", folder / "first"))]))
    ledger.revoke("patients", None, "The study is over.")
    FileAccount(folder / "teachers" / "account.json").charge(3, 40)
    with pytest.raises(QuietmaxError, match="quietmax ledger grant"):
        deploy(ledger, load_models([str(folder / "teachers")]))


def test_a_ledger_that_fails_during_the_migration_stops_the_service(
    folder: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "charge", lambda *_: Failed(LEDGER_DOWN))
    with pytest.raises(LedgerUnavailable, match="down"):
        deploy(ledger, load_models([str(folder / "teachers")]))


@pytest.mark.parametrize(
    ("steps", "spent"),
    [
        ([("here", 3, ""), ("there", None, "")], 3),
        ([("here", 0, ""), ("here", 4, "trained again")], 4),
        ([("here", 3, ""), ("here", 5, ""), ("here", 2, "")], 10),
        ([("one", 3, ""), ("two", 5, "")], 8),
    ],
    ids=[
        "moved",
        "another model in a marked folder",
        "put back after it had been moved",
        "a copy made before",
    ],
)
def test_the_answers_of_every_folder_are_charged_once_and_leave_nothing_in_it(
    tmp_path: Path, models: Path, ledger: Ledger, steps: list[tuple[str, int | None, str]], spent: int
) -> None:
    """A step puts a folder in its place that has given some answers, or moves the one of the step before."""
    before = tmp_path
    for name, answered, note in steps:
        place = tmp_path / name
        account = FileAccount(place / "account.json")
        if answered is None:
            before.rename(place)
        else:
            shutil.copytree(models / "teachers", place, dirs_exist_ok=True)
            account.charge(answered, 40)
        if note:
            description = json.loads((place / "model.json").read_text())
            (place / "model.json").write_text(json.dumps({**description, "note": note}))
        for _ in range(2):
            (deployment,) = deploy(ledger, load_models([str(place)]))
        assert account.answered == 40
        before = place
    assert ledger.account("patients").spent_units == spent * deployment.unit_cost


def test_a_model_without_a_budget_requires_one_for_a_new_account(folder: Path, ledger: Ledger) -> None:
    (model,) = load_models([str(folder / "head")])
    with pytest.raises(QuietmaxError, match="The model head/1 is not bound to an account"):
        _ = model.account
    unbudgeted = replace(model, terms=None)
    with pytest.raises(InvalidInput, match=r"'visitors' does not exist and .* `budget` is required"):
        deploy(ledger, [unbudgeted])
    assert ledger.accounts() == []
    deploy(ledger, [model])
    assert deploy(ledger, [unbudgeted])[0].account.name == "visitors"


def test_a_cost_per_answer_of_zero_is_refused(folder: Path, ledger: Ledger) -> None:
    (model,) = load_models([str(folder / "asked")])
    with pytest.raises(InvalidInput, match="must be greater than 0"):
        deploy(ledger, [replace(model, cost=PureCost(0.0))])
    assert ledger.accounts() == []


def _records(scale: int = 1) -> Records:
    features = np.random.default_rng(0).random((2000, 3)).astype(np.float32)
    return Records("people", scale * features, (features[:, 0] > 0.5).astype(np.int64), 2)


@pytest.fixture
def held_out() -> PrivateHead:
    return PrivateHead(epsilon=1.0, delta=1e-5, declared_size=1600).fit(hold_out(_records(), 0.2).train)


def _charged(ledger: Ledger) -> list[tuple[str, int]]:
    return [(row.kind, row.units) for row in ledger.export("people") if row.kind != "answered"]


TRAINED_AND_EVALUATED = [("open", 0), ("training", LIMIT), ("evaluation", 0)]


def test_evaluations_of_the_holdout_are_free_and_others_are_charged(
    tmp_path: Path, ledger: Ledger, held_out: PrivateHead
) -> None:
    folder = save_private(held_out, tmp_path / "income", dataset="people")
    deploy(ledger, load_models([str(folder)]))
    evaluate_folder(folder, open_private(folder), _records())
    for _ in range(2):
        deploy(ledger, load_models([str(folder)]))
    assert _charged(ledger) == TRAINED_AND_EVALUATED
    assert ledger.account("people").remaining_units == 0
    evaluate_folder(folder, open_private(folder), _records(), mu=0.1)
    with pytest.raises(QuietmaxError, match="Evaluating the model income/1 spent more than remains"):
        deploy(ledger, load_models([str(folder)]))
    ledger.grant("people", Terms(2.0, 1e-5), "A second evaluation was allowed.")
    deploy(ledger, load_models([str(folder)]))
    spent = ledger.account("people").spent
    assert isinstance(spent, GaussianCost)
    assert spent.mu == pytest.approx((held_out.guarantee_.mu**2 + 0.01) ** 0.5)
    assert ledger.verify().sound


def test_every_evaluation_is_charged_once_whatever_folder_it_comes_from(
    tmp_path: Path, ledger: Ledger, held_out: PrivateHead
) -> None:
    first = save_private(held_out, tmp_path / "first", dataset="people")
    unspent = (first / "evaluation.json").read_bytes()
    evaluate_folder(first, open_private(first), _records())
    second = save_private(held_out, tmp_path / "second", dataset="people")
    deploy(ledger, load_models([str(first), str(second)]))
    assert _charged(ledger) == TRAINED_AND_EVALUATED
    # The same budget spent again, from an old copy of the file: another evaluation.
    (first / "evaluation.json").write_bytes(unspent)
    evaluate_folder(first, open_private(first), _records())
    with pytest.raises(QuietmaxError, match="Evaluating the model first/1 spent more than remains"):
        deploy(ledger, load_models([str(first)]))
    (first / "evaluation.json").unlink()
    with pytest.raises(DataUnavailable, match="What was spent on them is unknown"):
        load_models([str(first)])


def test_the_same_rows_at_another_scale_are_another_split(tmp_path: Path, ledger: Ledger) -> None:
    """Rows that one model was trained on are held out by the other: their costs add up."""
    folders = []
    for scale, mu in ((1, 1.0), (2, 0.1)):
        fitted = PrivateHead(mu=mu, declared_size=1000).fit(hold_out(_records(scale), 0.5).train)
        folders.append(save_private(fitted, tmp_path / f"scale{scale}", dataset="people"))
    evaluate_folder(folders[1], open_private(folders[1]), _records(2), mu=1.0)
    deploy(ledger, load_models([str(folder) for folder in folders]), budget=Terms(10.0, 1e-5))
    spent = ledger.account("people").spent
    assert isinstance(spent, GaussianCost)
    assert spent.mu == pytest.approx(2**0.5)


def test_a_check_opens_charges_and_migrates_nothing(folder: Path, ledger: Ledger) -> None:
    def state() -> tuple[Any, ...]:
        files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        return files, [(each.name, each.spent_units) for each in ledger.accounts()]

    loaded = load_models([str(folder / name) for name in ("head", "asked", "teachers")])
    before = state()
    check_deployments(ledger, loaded)
    check_deployments(None, loaded)
    assert state() == before
    deploy(ledger, loaded)
    deployed = state()
    check_deployments(ledger, loaded)  # what was charged is not due again
    assert state() == deployed != before


def test_a_check_finds_a_training_that_the_account_cannot_pay_for(folder: Path, ledger: Ledger) -> None:
    (model,) = load_models([str(folder / "head")])
    deploy(ledger, [model])
    retrained = replace(model, version="2", digest=bytes(32))
    for check in (check_deployments, deploy):
        with pytest.raises(QuietmaxError, match="spent more than remains in the account 'visitors'"):
            check(ledger, [retrained])
    with pytest.raises(QuietmaxError, match="has already spent more than the budget"):
        check_deployments(None, [model], budget=Terms(0.1, 1e-5))


def test_a_budget_on_a_read_only_mount_is_served_only_after_it_has_moved(
    folder: Path, tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that stays in the folder could be spent again from another ledger."""
    FileAccount(folder / "teachers" / "account.json").charge(3, 40)
    real = os.statvfs

    def read_only(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_flag=real(path).f_flag | os.ST_RDONLY)

    monkeypatch.setattr(os, "statvfs", read_only)
    with pytest.raises(QuietmaxError, match="Serve it once from a writable folder"):
        deploy(ledger, load_models([str(folder / "teachers")]))
    monkeypatch.undo()
    (served,) = deploy(ledger, load_models([str(folder / "teachers")]))
    monkeypatch.setattr(os, "statvfs", read_only)
    deploy(ledger, load_models([str(folder / "teachers")]))
    assert ledger.account("patients").spent_units == 3 * served.unit_cost
    assert ledger.verify().sound
    with Ledger(tmp_path / "another.sqlite") as another, pytest.raises(QuietmaxError, match="read-only"):
        deploy(another, load_models([str(folder / "teachers")]))


def test_copies_of_a_folder_that_was_never_served_are_one_budget_in_one_ledger(
    folder: Path, tmp_path: Path, ledger: Ledger
) -> None:
    copy = shutil.copytree(folder / "teachers", tmp_path / "copy")
    served = deploy(ledger, load_models([f"a={folder / 'teachers'}", f"b={copy}"]))
    assert len({each.account.id for each in served}) == 1
    client = ledger.client("ann")
    results = [
        ledger.charge(Charge(each.account.id, client, each.label, each.unit_cost, rows=1))
        for _ in range(40)
        for each in served
    ]
    assert sum(isinstance(result, Charged) for result in results) == 40


def test_a_proven_guarantee_that_is_weak_is_served_only_if_it_is_accepted(
    folder: Path, ledger: Ledger
) -> None:
    (votes,) = load_models([str(folder / "teachers")])
    weak = {"budget": Terms(20.0, 1e-5), "account": "votes"}
    for refuse in (deploy, check_deployments):
        with pytest.raises(
            InvalidInput, match=r"teachers/1 is proven, no protection \[---\]: .*`accept_weak`"
        ):
            refuse(ledger, [votes], **weak)
    assert ledger.accounts() == []
    check_deployments(ledger, [votes], **weak, accept_weak=True)
    (served,) = deploy(ledger, [votes], **weak, accept_weak=True)
    assert served.total_guarantee(served.account).strength == "none"


def test_a_budget_that_was_raised_until_it_is_weak_must_be_accepted_at_the_next_start(
    folder: Path, ledger: Ledger
) -> None:
    (served,) = deploy(ledger, load_models([str(folder / "teachers")]))
    ledger.grant(served.account.name, Terms(20.0, 1e-5), "The board has allowed it.")
    with pytest.raises(InvalidInput, match="requires `accept_weak`"):
        deploy(ledger, load_models([str(folder / "teachers")]))
    deploy(ledger, load_models([str(folder / "teachers")]), accept_weak=True)


# --- series -------------------------------------------------------------------------------------------------------

MONTHS = ("2026-10", "2026-11", "2026-12")
VISITS = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100)},
    dates={"visit": ("2026-01-01", "2027-12-31")},
    complete=("age", "visit"),
    person="who",
    cohort="visit:month",
)


def visits(people: int = 300) -> pd.DataFrame:
    """A table with as many new people in each month."""
    rng = np.random.default_rng(0)
    age = rng.integers(0, 100, 3 * people)
    return pd.DataFrame(
        {
            "who": [f"P{number}" for number in range(3 * people)],
            "age": age,
            "visit": np.repeat([f"{month}-07" for month in MONTHS], people),
            "ill": np.where(age + rng.normal(0, 20, 3 * people) > 50, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `visits` with the versions 1 to 3 of a series, and `again`, trained once more on the second month."""
    folder, table = tmp_path_factory.mktemp("series"), visits()
    rows = table_rows(table, VISITS, holdout=0.2)
    for number, (name, month) in enumerate([*zip("123", MONTHS, strict=True), ("again", MONTHS[1])]):
        head = PrivateHead(1.0, 1e-5, declared_size=240)
        if number == 0:
            head.fit(rows, cohort=month)
        else:
            head.update(
                rows, cohort=month, after=folder / "visits" / str(min(number, 3)), again=name == "again"
            )
        save_private(head, folder / ("again" if name == "again" else f"visits/{name}"), dataset="visits")
    return folder


def test_a_version_of_a_series_is_served_under_its_number_unless_another_is_stated(series: Path) -> None:
    folder = series / "visits" / "3"
    (own,), (stated,) = load_models([f"visits={folder}"]), load_models([f"visits/9={folder}"])
    assert (own.label, stated.label) == ("visits/3", "visits/9")


def test_a_version_is_charged_with_those_before_it_each_once_and_to_its_own_cohort(
    series: Path, ledger: Ledger
) -> None:
    first, second, third = (load_models([f"visits/{each}={series / 'visits' / each}"]) for each in "123")
    (served,) = deploy(ledger, third)  # the others may have been served elsewhere
    spent = served.account.spent_units
    assert 0.95 * LIMIT < spent <= LIMIT
    deploy(ledger, [*first, *second, *third])
    charged = [row for row in ledger.export("visits") if row.kind == "training"]
    assert [(row.model, json.loads(row.detail)["cohort"]) for row in charged] == [
        (f"visits/{number}", month) for number, month in enumerate(MONTHS, 1)
    ]
    assert max(ledger.cohorts(ledger.account("visits")).values()) == spent
    assert min(ledger.cohorts(ledger.account("visits")).values()) > 0.95 * LIMIT
    assert ledger.verify().sound


def test_a_cohort_that_was_trained_on_twice_needs_twice_the_budget(series: Path, ledger: Ledger) -> None:
    deploy(ledger, load_models([f"visits/3={series / 'visits' / '3'}"]))
    again = load_models([f"visits/4={series / 'again'}"])
    with pytest.raises(QuietmaxError, match="visits/4 spent more than remains for the cohort '2026-11'"):
        deploy(ledger, again)
    assert ledger.account("visits").spent_units <= LIMIT
    ledger.grant("visits", Terms(2.0, 1e-5), "November is trained twice.")
    deploy(ledger, again)
    spent = ledger.cohorts(ledger.account("visits"))
    assert {month: round(units / LIMIT) for month, units in spent.items()} == dict(
        zip(MONTHS, (1, 2, 1), strict=True)
    )


def test_the_holdout_of_each_version_is_evaluated_for_free(
    series: Path, ledger: Ledger, tmp_path: Path
) -> None:
    folder = shutil.copytree(series / "visits", tmp_path / "visits")
    visits().to_csv(tmp_path / "visits.csv", index=False)
    for version in "123":
        model = open_private(folder / version)
        rows = evaluated_rows(model, str(tmp_path / "visits.csv"), in_parts=True)
        evaluate_folder(folder / version, model, rows)
        deploy(ledger, load_models([f"visits/{version}={folder / version}"]))
    assert [row.kind for row in ledger.export("visits")].count("evaluation") == 3
    assert ledger.account("visits").spent_units <= LIMIT
    assert ledger.verify().sound


def test_a_new_account_does_not_open_for_a_series_that_costs_more_than_it_promises(
    series: Path, ledger: Ledger
) -> None:
    again = load_models([f"visits/4={series / 'again'}"])
    with pytest.raises(QuietmaxError, match="has already spent more than the budget of epsilon 1"):
        deploy(ledger, again)
    assert not ledger.accounts()
    deploy(ledger, again, budget=Terms(2.0, 1e-5))
    assert max(ledger.cohorts(ledger.account("visits")).items(), key=lambda item: item[1])[0] == MONTHS[1]


def test_a_version_by_another_rule_is_refused(series: Path, ledger: Ledger) -> None:
    (first,) = deploy(ledger, load_models([f"visits={series / 'visits' / '1'}"]))
    other = replace(
        first, cohorts="visit:year of the persons", series=(replace(first.series[0], digest="ab" * 32),)
    )
    with pytest.raises(InvalidInput, match="a person could be in two of them"):
        deploy(ledger, [other])


def test_rows_known_by_their_features_have_other_cohorts_in_another_encoding(
    tmp_path: Path, ledger: Ledger
) -> None:
    plain = replace(VISITS, person=None, ignore=("who",), cohort="hash:2")
    for name, schema in {"one": plain, "other": replace(plain, bounds={"age": (0, 99)})}.items():
        head = PrivateHead(1.0, 1e-5, schema=schema, declared_size=450).fit(visits(), cohort="1")
        save_private(head, tmp_path / name, dataset="visits")
    deploy(ledger, load_models([str(tmp_path / "one")]))
    with pytest.raises(InvalidInput, match="a person could be in two of them"):
        deploy(ledger, load_models([str(tmp_path / "other")]))


def test_an_accuracy_that_travels_with_the_next_version_is_charged_with_it(
    tmp_path: Path, ledger: Ledger
) -> None:
    rows = table_rows(visits(), VISITS, holdout=0.2)
    head = PrivateHead(1.0, 1e-5, declared_size=240).fit(rows, cohort=MONTHS[0])
    first = save_private(head, tmp_path / "visits" / "1", dataset="visits")
    head.evaluate(rows.test)
    head.update(rows, cohort=MONTHS[1], after=first)
    second = save_private(head, tmp_path / "visits" / "2", dataset="visits")
    for version, folder in (("2", second), ("1", first)):
        deploy(ledger, load_models([f"visits/{version}={folder}"]))
        charged = [row.detail for row in ledger.export("visits") if row.kind == "evaluation"]
        assert [json.loads(each)["cohort"] for each in charged] == [MONTHS[0]]


def test_a_model_of_everybody_adds_to_every_cohort(series: Path, ledger: Ledger) -> None:
    deploy(ledger, load_models([f"visits={series / 'visits' / '2'}"]), budget=Terms(2.0, 1e-5))
    before = ledger.account("visits").spent_units
    head = PrivateHead(0.5, 1e-5, schema=VISITS, declared_size=240).fit(visits())
    deploy(ledger, load_models([f"all={save_private(head, series / 'all', dataset='visits')}"]))
    after = ledger.account("visits").spent_units
    assert after > before
    assert set(ledger.cohorts(ledger.account("visits")).values()) == {after}


def test_the_metadata_state_the_series_and_a_version_can_be_pinned(
    series: Path, tmp_path: Path, ledger: Ledger
) -> None:
    folder = shutil.copytree(series / "visits", tmp_path / "models" / "visits")
    repository = ModelRepository(folder.parent, load_models, deploy, keep=2)
    repository.start(ledger)
    service = Service(ledger, [], Settings(anonymous=True), Log(io.BytesIO()), repository=repository)
    query = {"age": [30.0], "visit": ["2026-11-07"]}
    with run_in_thread(service) as url, Client(url) as client:
        told = client.metadata("visits")
        assert told["versions"] == ["2", "3"]
        stated = told["parameters"]["series"]
        assert stated["rule"].startswith("visit:month of the persons")
        assert [(each["version"], each["cohort"], each["served"]) for each in stated["versions"]] == [
            (1, MONTHS[0], False),
            (2, MONTHS[1], True),
            (3, MONTHS[2], True),
        ]
        assert stated["mu"] == max(each["mu"] for each in stated["versions"])
        for version, cohorts in (("2", 2), ("3", 3)):
            pinned = client.metadata("visits", version=version)["parameters"]["series"]
            assert len(pinned["versions"]) == cohorts
            assert len(client.infer("visits", pd.DataFrame(query), version=version).labels) == 1
        with pytest.raises(QuietmaxError, match="Version 1 of this model is retired"):
            client.infer("visits", pd.DataFrame(query), version="1")
