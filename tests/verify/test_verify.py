"""verify.py says of every kind of folder what Quietmax says, without Quietmax, and finds what was tampered with."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quietmax.accounting.dpsgd import Schedule, loss_delta, noise_multiplier
from quietmax.data.tables import encode_table
from quietmax.errors import QuietmaxError
from quietmax.estimators import DPSGD, PrivateHead, open_private, save_private
from quietmax.export.bundle import write_bundle
from quietmax.ledger import Charge, Ledger
from quietmax.ledger.database import _row_hash
from quietmax.ledger.witness import witness
from quietmax.server.deployment import deploy, load_models
from tests.estimators import growing
from tests.estimators.test_serialization import GREY, OF_PEOPLE, PEOPLE, PEOPLE_SCHEMA, _images
from tests.estimators.test_serialization_of_edited_folders import CELLS, ESTIMATORS, FEATURES, LABELS, SAMPLES
from tests.estimators.test_serialization_of_encoders import RECORDS, layer_encoder

PROGRAM = Path(__file__).parents[2] / "verify" / "verify.py"
MORE = ("person, head", "person, teachers", "person, dpsgd", "images", "encoder", "series", "dpsgd, cells")


def _fit_more(kind: str, place: Path) -> Any:
    if kind.startswith("person"):
        fitted = OF_PEOPLE[kind.removeprefix("person, ")]
        return fitted.fit(encode_table(PEOPLE, PEOPLE_SCHEMA))
    if kind == "images":
        return PrivateHead(50.0, 1e-5, **GREY).fit(*_images(GREY["image_shape"]))
    if kind == "encoder":
        labels = np.random.default_rng(0).integers(0, 2, 60)
        head = PrivateHead(declared_size=60, classes=(0, 1), features=layer_encoder(place))
        return head.fit(RECORDS, labels)
    if kind == "series":
        return growing.series(growing.visits(), *growing.MONTHS[:3])
    return DPSGD(**CELLS, delta=1e-5, settings=SAMPLES).fit(FEATURES, LABELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each kind of private model."""
    place = tmp_path_factory.mktemp("models")
    found = {
        kind: save_private(
            estimator.fit(FEATURES, LABELS), place / kind.replace(", ", "-"), dataset="made up"
        )
        for kind, estimator in ESTIMATORS.items()
    }
    for kind in MORE:
        found[kind] = save_private(_fit_more(kind, place), place / kind.replace(", ", "-"), dataset="made up")
    return found


def _command(folder: Path, files: dict[str, Any]) -> list[str]:
    options = (text for name, value in files.items() for text in (f"--{name.replace('_', '-')}", str(value)))
    return [str(PROGRAM), str(folder), *options]


def verify(folder: Path, **files: Any) -> tuple[int, str]:
    """Run the program; return its exit code and what it printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stdout(printed):
        changed.setattr(sys, "argv", _command(folder, files))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROGRAM), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.getvalue()


def test_a_stranger_without_quietmax_can_run_it(saved: dict[str, Path]) -> None:
    program = _command(saved["head, gradient"], {})
    ran = subprocess.run([sys.executable, "-I", "-S", *program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (0, ran.stdout) == verify(saved["head, gradient"])


def _numbers(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(epsilon|mu|delta) ([\d.e+-]+)", text)}


def test_the_program_is_short_and_imports_the_standard_library_and_cryptography_alone() -> None:
    source = PROGRAM.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 500
    assert max(map(len, source.splitlines())) <= 120
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names <= {*sys.stdlib_module_names, "cryptography"}
    assert not re.search(r"__import__|importlib|exec\(|eval\(", source)


@pytest.mark.parametrize("kind", [*ESTIMATORS, *MORE])
def test_the_verdict_is_that_of_quietmax(saved: dict[str, Path], kind: str) -> None:
    guarantee = open_private(saved[kind]).guarantee
    code, text = verify(saved[kind])
    verdict = text.splitlines()[-1]
    assert (code, verdict.split()[1]) == (0, f"{guarantee.status}:"), text
    assert f" {guarantee.definition} " in verdict
    assert verdict.endswith(f"for one {guarantee.unit}")
    stated = {name: getattr(guarantee, name) for name in ("epsilon", "mu", "delta")}
    assert _numbers(verdict) == pytest.approx({k: v for k, v in stated.items() if v is not None}, rel=1e-5)


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps"),
    [
        (1.0, 1e-5, 0.5, 2),
        (0.1, 1e-7, 0.1, 100),
        pytest.param(8.0, 1e-5, 0.05, 300, marks=pytest.mark.slow),
        pytest.param(3.0, 1e-9, 0.02, 200, marks=pytest.mark.slow),
    ],
)
def test_the_bound_on_sampled_steps_agrees_with_the_accountant(
    epsilon: float, delta: float, rate: float, steps: int
) -> None:
    names: dict[str, Any] = {"__name__": "verify"}
    exec(compile(PROGRAM.read_text(encoding="utf-8"), PROGRAM.name, "exec"), names)
    schedule = Schedule(rate, steps)
    sigma = noise_multiplier(epsilon, delta, schedule)
    bound = names["sampled_delta"](sigma, rate, steps, epsilon)
    assert bound == pytest.approx(loss_delta(sigma, epsilon, schedule), rel=0.005)
    assert names["sampled_delta"](0.9 * sigma, rate, steps, epsilon) > 1.1 * delta


# --- a ledger, a bundle and a witness ---------------------------------------------------------------------------------


class Case:
    """A served model, its ledger's export, a bundle and a witness."""

    def __init__(self, place: Path, folder: Path, address: str) -> None:
        self.place, self.folder = place, Path(shutil.copytree(folder, place / "model"))
        self.export, self.bundle, self.witness = place / "export.jsonl", place / "b.json", place / "w.jsonl"
        self.key, self.address = place / "key.pem", address
        model = open_private(self.folder)
        paid = model.remaining is not None
        if paid:
            model.predict(np.zeros((2, model.inputs), dtype=np.float32))
            self.public = write_bundle(self.folder, self.key, self.bundle)["public_key"]
            witness(self.witness, None, [self.folder], key=self.key)
        with Ledger(address) as ledger:
            (served,) = deploy(
                ledger, load_models([f"m={self.folder}"], accept_unproven=True), accept_weak=True
            )
            if paid:
                client = ledger.create_key("ann")[1].client_id
                for number in range(2):
                    request = ledger.request_key(client, f"id {number}")
                    charge = Charge(
                        served.account.id, client, "m/1", served.unit_cost, 1, request=request, body=b"x"
                    )
                    ledger.charge(charge)
            rows = [asdict(entry) for entry in ledger.export(None)]
        if not paid:
            self.public = write_bundle(self.folder, self.key, self.bundle)["public_key"]
        self.write(rows)
        witness(self.witness, rows, [self.folder] if paid else [], key=self.key)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.export.read_text(encoding="utf-8").splitlines()]

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.export.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def verify(self) -> tuple[int, str]:
        files = {"ledger": self.export, "bundle": self.bundle, "witness": self.witness, "key": self.public}
        return verify(self.folder, served_as="m/1", **files)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, saved: dict[str, Path]) -> dict[str, Case]:
    """Each on SQLite: two models that are paid per answer, and one whose weights are released."""
    found = {}
    for kind in ("teachers", "head asked", "head, gradient"):
        place = tmp_path_factory.mktemp("case")
        found[kind] = Case(place, saved[kind], f"sqlite:///{place / 'ledger.sqlite'}")
    return found


@pytest.mark.parametrize("kind", ["teachers", "head, gradient", "series"])
def test_a_ledger_on_either_database_verifies(
    saved: dict[str, Path], address: str, tmp_path: Path, kind: str
) -> None:
    case = Case(tmp_path, saved[kind], address)
    with Ledger(address) as ledger:
        assert ledger.verify().sound
    code, text = case.verify()
    assert code == 0, text
    assert "as its guarantee requires" in text


Change = Callable[[Any], object]


def _model(case: Case, change: Change) -> None:
    path = case.folder / "model.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def _fact(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: _model(case, lambda said: said["guarantee"]["parameters"].update({name: value}))


def _claim(**values: Any) -> Callable[[Case], None]:
    return lambda case: _model(case, lambda said: said["guarantee"].update(values))


def _said(**values: Any) -> Callable[[Case], None]:
    return lambda case: _model(case, lambda said: said.update(values))


def _halved(*names: str) -> Callable[[Case], None]:
    def change(said: dict[str, Any]) -> None:
        for name in names:
            for place in (said, said["guarantee"], said["guarantee"]["parameters"]):
                if isinstance(place.get(name), float):
                    place[name] /= 2

    return lambda case: _model(case, change)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        path = case.folder / "weights.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        _said(weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())(case)

    return edit


def _account(**values: Any) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        path = case.folder / "account.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _rehashed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chain rows anew, as somebody would who can write to the database."""
    heads: dict[int, tuple[int, str, int]] = {}
    for row in rows:
        sequence, head, spent = heads.get(row["account"], (0, "0" * 64, 0))
        row["sequence"], row["previous"], row["spent_units"] = sequence + 1, head, spent + row["units"]
        row["hash"] = _row_hash(tuple(row[name] for name in row if name != "hash"))
        heads[row["account"]] = sequence + 1, row["hash"], row["spent_units"]
    return rows


def _ledger(
    change: Callable[[list[dict[str, Any]]], object], *, rehash: bool = False
) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        rows = case.rows()
        change(rows)
        case.write(_rehashed(rows) if rehash else rows)

    return edit


def _charge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in reversed(rows) if row["kind"] in ("charge", "training"))


def _forked(case: Case) -> None:
    """The last charge is undone, another one made in its place, and the chain is intact."""
    rows = case.rows()
    _charge(rows)["time"] += 1
    case.write(_rehashed(rows))


def _lines(change: Callable[[list[str]], list[str]]) -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        case.witness.write_text(
            "".join(f"{each}\n" for each in change(case.witness.read_text().splitlines()))
        )

    return edit


def _seen(**values: Any) -> Callable[[Case], None]:
    """Somebody without the witness's key edits a line."""

    def edit(lines: list[str]) -> list[str]:
        entry = json.loads(lines[-1])
        entry["content"] = json.dumps(json.loads(entry["content"]) | values)
        return [*lines[:-1], json.dumps(entry)]

    return _lines(edit)


def _resigned(case: Case) -> None:
    _fact("noise_source", {"source": "exact", "exact": True})(case)
    write_bundle(case.folder, case.place / "another.pem", case.bundle)


def _copied(case: Case) -> None:
    """A copy of the folder, from before it was served, is seen by the witness."""
    copy = Path(shutil.copytree(case.folder, case.place / "copy" / "model"))
    witness(case.witness, None, [copy], key=case.key, moved=True)


PUT_BACK = _account(answered=f"{1:020d}")
HEAD, ASKED, VOTES = "head, gradient", "head asked", "teachers"
TAMPERINGS: dict[str, tuple[str, Callable[[Case], object], str]] = {
    "a smaller mu": (HEAD, _halved("mu"), "mu"),
    "a smaller mu of training": (HEAD, _halved("mu_training"), "mu"),
    "a smaller mu everywhere": (HEAD, _halved("mu", "mu_training", "mu_centring"), "not what epsilon"),
    "a part that nothing paid for": (HEAD, _fact("mu_centring", None), "nothing paid for"),
    "a scale that nothing paid for": (HEAD, _fact("scale", 0.5), "scale"),
    "a smaller sensitivity": (HEAD, _halved("sensitivity"), "sensitivity"),
    "a smaller clipping norm": (HEAD, _halved("max_grad_norm"), "sensitivity"),
    "a better delta": (HEAD, _said(delta=1e-9), "delta"),
    "a better unit": (HEAD, _said(unit="person"), "unit"),
    "another definition": (HEAD, _claim(definition="pure"), "definition"),
    "other neighbours": (HEAD, _claim(neighbours="replace-one"), "neighbours"),
    "a delta that is added": (HEAD, _claim(extra_delta=-1e-6), "extra_delta"),
    "an assumption that is left out": (HEAD, _claim(assumptions=[]), "assumptions that follow"),
    "an assumption that is put in": (
        VOTES,
        _claim(assumptions=["Nothing.", "Nothing.", "Nothing."]),
        "assum",
    ),
    "noise of a seed": (
        HEAD,
        _fact("noise_source", {"source": "seeded", "exact": False}),
        "Nobody knows the seed",
    ),
    "classes that were not declared": (HEAD, _fact("classes_declared", False), "set of classes"),
    "code that saw the records": (HEAD, _fact("own_code", ["Scaler"]), "This code"),
    "other weights": (
        HEAD,
        lambda case: (case.folder / "weights.safetensors").write_bytes(b"0" * 99),
        "SHA-256",
    ),
    "weights of another shape": (
        HEAD,
        _tensors(lambda found: found.update(weights=np.zeros((2, 9)))),
        "shape",
    ),
    "a tensor too many": (HEAD, _tensors(lambda found: found.update(records=np.zeros(9))), "shape"),
    "other classes": (HEAD, _said(classes=["a", "b", "c"]), "classes"),
    "a whitening that nothing paid for": (
        HEAD,
        _tensors(lambda found: found.update(whitening=np.eye(4))),
        "whitening",
    ),
    "longer weights": (ASKED, _tensors(lambda found: found.update(weights=found["weights"] * 1e6)), "longer"),
    "smaller bounds": (ASKED, _halved("one_score", "score_vector_l2"), "bounds on scores"),
    "a smaller tolerance": (ASKED, _halved("tolerance"), "tolerance"),
    "more answers": (ASKED, _said(queries=50), "number of answers"),
    "weights that are marked as released": (ASKED, _fact("release", "weights"), "released"),
    "another account": (ASKED, _account(id="0" * 32), "id of the account"),
    "answers that are forgotten": (ASKED, PUT_BACK, "than the folder counts"),
    "a budget at two places": (ASKED, PUT_BACK, "the folder can spend it too"),
    "more answers than paid for": (ASKED, _account(answered=f"{99:020d}"), "more answers were given"),
    "fewer teachers": (
        VOTES,
        _tensors(lambda found: [found.update({name: found[name][:2]}) for name in found]),
        "teachers",
    ),
    "a better method": (VOTES, _said(method="best"), "method"),
    "an edited row": (VOTES, _ledger(lambda rows: _charge(rows).update(units=1)), "was edited"),
    "a missing row": (VOTES, _ledger(lambda rows: rows.remove(_charge(rows))), "not in the ledger"),
    "a charge that is too small, rehashed": (
        VOTES,
        _ledger(lambda rows: _charge(rows).update(units=1), rehash=True),
        "for what costs",
    ),
    "a larger budget, rehashed": (
        VOTES,
        _ledger(lambda rows: _charge(rows).update(limit_units=6040 * 10**12), rehash=True),
        "changes the budget",
    ),
    "a row that is charged twice, rehashed": (
        VOTES,
        _ledger(lambda rows: rows.append(dict(_charge(rows))), rehash=True),
        "charged before",
    ),
    "a rolled-back ledger": (VOTES, _ledger(lambda rows: rows.remove(rows[-1])), "went back or was forked"),
    "a forked ledger": (VOTES, _forked, "went back or was forked"),
    "a training that was not charged": (
        HEAD,
        _ledger(lambda rows: rows.remove(_charge(rows)), rehash=True),
        "did not charge for the training",
    ),
    "an evaluation that was not charged": (
        HEAD,
        lambda case: (case.folder / "evaluation.json").write_text(
            json.dumps(
                json.loads((case.folder / "evaluation.json").read_text())
                | {
                    "evaluations": [
                        {
                            "mu": 0.1,
                            "composition": "parallel",
                            "assumes": [],
                            "id": "7",
                            "reserved": False,
                            "result": None,
                        }
                    ]
                }
            )
        ),
        "evaluation",
    ),
    "evaluations of another model": (
        HEAD,
        lambda case: (case.folder / "evaluation.json").write_text('{"id": "0", "evaluations": []}'),
        "evaluations",
    ),
    "a file that was added": (HEAD, lambda case: (case.folder / "x").write_text("x"), "file x"),
    "a file that was edited": (HEAD, _said(dataset="famous"), "file model.json"),
    "a bundle that was edited": (
        HEAD,
        lambda case: case.bundle.write_text(case.bundle.read_text().replace("model.json", "model.bson")),
        "InvalidSignature",
    ),
    "a bundle of another key": (HEAD, _resigned, "another key"),
    "a witness's line that was edited": (VOTES, _seen(folders=[]), "InvalidSignature"),
    "a witness's line that was removed": (VOTES, _lines(lambda lines: lines[1:]), "follows no line"),
    "a folder that was copied": (VOTES, _copied, "several places"),
}


@pytest.mark.parametrize("kind", ["teachers", "head asked", "head, gradient"])
def test_what_nobody_tampered_with_verifies(cases: dict[str, Case], kind: str) -> None:
    code, text = cases[kind].verify()
    assert code == 0, text


@pytest.fixture
def copied(cases: dict[str, Case], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Case]:
    """The case of a tampering; afterwards it is as before."""
    case = cases[TAMPERINGS[request.param][0]]
    shutil.copytree(case.place, tmp_path / "before")
    yield case
    shutil.rmtree(case.place)
    shutil.copytree(tmp_path / "before", case.place)


@pytest.mark.parametrize(("copied", "name"), [(each, each) for each in TAMPERINGS], indirect=["copied"])
def test_tampering_is_found(copied: Case, name: str) -> None:
    _, change, said = TAMPERINGS[name]
    change(copied)
    code, text = copied.verify()
    assert code == 1
    failed = text.partition("FAILS:")[2]
    assert said in failed, text


def test_the_witness_refuses_what_went_back(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["teachers"]
    seen = Path(shutil.copy(case.witness, tmp_path / "w.jsonl"))
    for rows, said in ((case.rows()[:-1], "went back or was forked"), ([], "went back or was forked")):
        with pytest.raises(QuietmaxError, match=said):
            witness(seen, rows, [], key=case.key)
    with pytest.raises(QuietmaxError, match="A copy could be spent twice"):
        witness(seen, None, [Path(shutil.copytree(case.folder, tmp_path / "copy"))], key=case.key)
    assert seen.read_text() == case.witness.read_text()
