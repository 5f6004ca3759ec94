"""`quietmax predict` and `ask`: private answers from a trained model, with their guarantee, or from a running service.

With `predict --output`, one file of answers for each file of queries. Answers from released weights are free, so files
may be answered again. A file of answers is written completely or not at all. A hidden file lists what was answered, so
a run that was interrupted continues where it ended.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from quietmax._io import atomic_write, remove_staging
from quietmax._lazy import lazy_module
from quietmax._ray import RayEngine, ray_map
from quietmax.cli._options import Ray, arguments_of, flag, mechanism_of, with_groups
from quietmax.cli._output import console, print_guarantee, print_json, print_table, progress_bar
from quietmax.errors import (
    BudgetExhausted,
    DataUnavailable,
    InvalidData,
    InvalidInput,
    QuietmaxError,
    counted,
)
from quietmax.spending import DESCRIPTION_FILE, MOVED_FILE

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow
    import pyarrow.parquet
    from numpy.typing import NDArray

    from quietmax.accounting.guarantee import Guarantee
    from quietmax.data.sources import ParquetPart, TextPart
    from quietmax.estimators.blocks import Progress
    from quietmax.estimators.serialization import PrivateModel

    _Job = tuple[TextPart | ParquetPart, list[str], Path, bool]
    """A file of queries, its columns that are read, the file of its answers, and whether they are explained."""
    _Answered = tuple[NDArray[Any], NDArray[np.float64]]
    """Labels; probabilities, and contributions to scores if they are asked for."""
else:
    np = lazy_module("numpy")
    pyarrow = lazy_module("pyarrow")

_ROWS_SHOWN, _REASONS_SHOWN = 20, 3


@dataclass(frozen=True)
class _NetworkOptions:
    """How an ordinary network answers; a private model has its own mechanism and budget."""

    PANEL: ClassVar = "Ordinary networks"

    epsilon: Annotated[float | None, "Budget of all queries together. Required."] = None
    mechanism: Annotated[
        str | None,
        "algorithm1, the paper's with Gaussian noise, algorithm1-laplace, or the name of a plug-in; none has a proven "
        "guarantee. Default: algorithm1.",
    ] = None
    seeded: Annotated[
        int | None, "For experiments: reproducible noise from this seed, which protects nobody.", {"min": 0}
    ] = None


@with_groups
def predict(
    *,
    model: Annotated[Path, "Model folder, written by 'quietmax train'."],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="CSV, TSV, Parquet or NPZ file of queries; with --output also a folder of CSV, TSV or Parquet files, "
            "or a pattern such as 'queries/*.parquet'.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for one file of answers per file of queries, with the same name and the same order of rows. "
            "Files that were answered before are skipped. Default: print the answers.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also state what each column contributed to the score of each class. For released heads on tables.",
        ),
    ] = False,
    ray: Ray = None,
    network: _NetworkOptions,
) -> None:
    """Answer the queries in a file or folder, and print the guarantee with its status.

    A private model (train head, teachers or dpsgd) answers under its own guarantee; its folder keeps count of what
    was spent. An ordinary network answers through Algorithm 1, or the mechanism of a plug-in. With --output, a model
    whose weights are released answers any number of queries in little memory.

    Examples:

    quietmax predict --model private --input queries.csv

    quietmax predict --model income --input people.csv --explain

    quietmax predict --model private --input queries/ --output answers/

    quietmax predict --model model --input queries.csv --epsilon 1
    """
    from quietmax.data.sources import names_several_files
    from quietmax.models.serialization import read_description

    if ray is not None and output is None:
        raise InvalidInput("--ray requires --output: the workers write files of answers.")
    if output is None and names_several_files(input_file):
        raise InvalidInput(f"--output is required, because {input_file} names a folder or a pattern.")
    ordinary = read_description(model).get("kind") == "mlp"
    if ordinary and output is not None:
        raise InvalidInput(PAID)
    if ordinary and explain:
        from quietmax.estimators.head import effects

        raise InvalidInput(effects.PAID)
    given = [flag(name) for name in arguments_of(network)]
    if given and not ordinary:
        raise InvalidInput(
            f"{', '.join(given)} cannot be used with a private model, which has its own mechanism and budget."
        )
    if output is not None:
        _write_answers(model, input_file, output, ray, explain=explain)
        return
    if ordinary:
        answers, guarantee = _network_answers(model, input_file, network)
    else:
        answers, guarantee = _private_answers(model, input_file, explain=explain)
    print_json({**answers, "guarantee": guarantee})
    _print_answers(answers)
    print_guarantee(guarantee)


def _write_answers(folder: Path, queries: Path, output: Path, ray: str | None, *, explain: bool) -> None:
    """Write one file of answers for each file of queries, and report."""
    from quietmax.estimators.serialization import open_private

    engine = None if ray is None else RayEngine(ray)
    private = open_private(folder)
    with progress_bar("answering") as progress:
        done = _answer_files(
            folder, private, queries, output, explain=explain, progress=progress, engine=engine
        )
    print_json({**done, "output": str(output), "guarantee": private.guarantee})
    skipped = f" Files that had been answered before: {done['skipped']:,}." if done["skipped"] else ""
    console.print(
        f"Answers are in {output}. Files answered: {done['written']:,}, with "
        f"{counted(done['queries'], 'query', 'queries')}.{skipped}",
        soft_wrap=True,
    )
    print_guarantee(private.guarantee)


def _private_answers(folder: Path, input_file: Path, *, explain: bool) -> tuple[dict[str, Any], Guarantee]:
    """The answers of a private model, which needs no options."""
    from quietmax.data.tables import read_queries
    from quietmax.estimators.serialization import open_private

    private = open_private(folder)
    if private.remaining == 0 and (folder / MOVED_FILE).is_file():
        raise BudgetExhausted(
            f"The budget of {folder} moved to the ledger when the model was served; ask the service ('quietmax serve')."
        )
    if explain:
        private.additive()  # other models are an error before anything is paid
    queries = read_queries(input_file, encoding=private.encoding, width=private.inputs)
    classes = private.encoding.classes if private.encoding else private.classes
    answers = _answers(private, queries, classes, probable=private.remaining is None)
    if explain:
        answers["reasons"] = _reasons(private, queries)
    return {**answers, "remaining": {"queries": private.remaining}}, private.guarantee


def _reasons(private: PrivateModel, queries: Any) -> list[list[dict[str, Any]]]:
    """What each column contributed to the score of each class, for each query, in the order in which it is added."""
    listed = [
        {"column": column, "value": value, "contributions": contributions}
        for _, column, value, *contributions in private.reasons(queries).itertuples(index=False)
    ]
    count = len(private.additive().summands)
    return [listed[start : start + count] for start in range(0, len(listed), count)]


def _network_answers(
    folder: Path, input_file: Path, network: _NetworkOptions
) -> tuple[dict[str, Any], Guarantee]:
    """The answers of an ordinary network through Algorithm 1 or the mechanism of a plug-in."""
    from quietmax.accounting.costs import Budget
    from quietmax.data.tables import read_queries
    from quietmax.mechanisms.base import releases_probabilities
    from quietmax.models.serialization import load_model
    from quietmax.noise.sources import EXACT, SeededNoise
    from quietmax.predictor import Predictor

    mechanism = mechanism_of(network.mechanism or "algorithm1")
    if network.epsilon is None:
        raise InvalidInput("--epsilon is required, because the model is an ordinary network.")
    model = load_model(folder)
    queries = read_queries(input_file, encoding=model.encoding, width=model.features)
    budget = Budget(network.epsilon, 0.0, len(queries))
    noise = EXACT if network.seeded is None else SeededNoise(network.seeded)
    predictor = Predictor(model, mechanism, budget, noise=noise)
    classes = model.encoding.classes if model.encoding else tuple(map(str, range(model.classes)))
    probable = releases_probabilities(predictor.mechanism, model.classes)
    answers = _answers(predictor, queries, classes, probable=probable)
    left = predictor.remaining
    spending = {
        "cost": predictor.cost.to_json(),
        "spent": predictor.answered,
        "remaining": {"queries": left.queries, "cost": left.cost.to_json()},
    }
    return {**answers, **spending}, predictor.guarantee


def _answers(model: Any, queries: Any, classes: tuple[str, ...], *, probable: bool) -> dict[str, Any]:
    """Labels, and probabilities if they are released."""
    from quietmax.estimators.figures import decided

    probabilities = model.predict_proba(queries) if probable else None
    costs = getattr(model, "costs", None)
    labels = model.predict(queries) if probabilities is None else decided(probabilities, costs)
    return {
        "labels": [classes[label] for label in labels],
        "probabilities": None if probabilities is None else probabilities.tolist(),
        "classes": list(classes),
    }


def _print_answers(answers: dict[str, Any]) -> None:
    """Print the first answers as a table."""
    columns, rows = ["query", "label"], []
    for number, label in enumerate(answers["labels"][:_ROWS_SHOWN]):
        rows.append([str(number + 1), label])
        if answers["probabilities"] is not None:
            rows[-1].append(f"{max(answers['probabilities'][number]):.4f}")
        if "reasons" in answers:
            place = answers["classes"].index(label)
            _, *own = answers["reasons"][number]
            own.sort(key=lambda reason: -abs(reason["contributions"][place]))
            shown = (f"{each['column']} {each['contributions'][place]:+.2f}" for each in own[:_REASONS_SHOWN])
            rows[-1].append(", ".join(shown))
    if answers["probabilities"] is not None:
        columns.append("probability")
    if "reasons" in answers:
        columns.append("largest contributions")
    total = len(answers["labels"])
    more = f"The first {_ROWS_SHOWN} of {total} answers; --json prints all." if total > _ROWS_SHOWN else None
    print_table("Answers", columns, rows, more)


# --- Files of answers -------------------------------------------------------------------------------------------------

ANSWERS_FILE = ".quietmax-answers.jsonl"
"""The file of a folder of answers: which model gave them, and one line for every file of queries that was answered."""
PAID = (
    "Only released weights answer folders of queries. This model is paid per answer: its queries must be in one file, "
    "without `output`."
)


def _answer_files(
    folder: Path,
    model: PrivateModel,
    source: Path,
    output: Path,
    *,
    explain: bool = False,
    progress: Progress | None = None,
    engine: RayEngine | None = None,
) -> dict[str, int]:
    """Answer files of queries in bounded memory; return how many were written and skipped, and the new queries.

    Every file becomes one of the same name, format and order of rows, with the columns `label` and `probability of C`
    for every class C, and the contributions to its scores if they are asked for. Files that were answered in this way
    before, and have not changed since, are skipped.
    """
    from quietmax.data.sources import file_parts

    if model.remaining is not None:
        raise InvalidInput(PAID)
    if explain:
        model.additive()
    encoding, place = model.encoding, output.expanduser()
    found = file_parts(source, None if encoding is None else [column.name for column in encoding.columns])
    files = [part.file for part, _ in found]
    targets = _targets(source.expanduser(), files, place)
    sizes = [file.stat().st_size for file in files]
    skipped = queries = done = 0
    report, total = progress or (lambda _, __: None), sum(sizes)
    left: list[tuple[_Job, int, str]] = []
    with _claimed(place, folder, targets) as answered:
        for (part, columns), target, size in zip(found, targets, sizes, strict=True):
            name = target.relative_to(place).as_posix()
            entry = _entry(part.file, name, explain=explain)
            if answered.get(name) == entry and target.is_file():
                skipped += 1
                done += size
            else:
                left.append(((part, columns, target, explain), size, entry))
        if engine is None:
            counts: Iterator[int] = (
                _answer_file(model, *job, partial(_advance, report, done, size, total))
                for job, size, _ in left
            )
        else:
            counts = _counts_on_ray(engine, model, [job for job, _, _ in left])
        for (_, size, entry), count in zip(left, counts, strict=True):
            queries += count
            _note(place, entry)
            done += size
            report(done, total)
    return {"written": len(left), "skipped": skipped, "queries": queries}


def _counts_on_ray(engine: RayEngine, model: PrivateModel, jobs: list[_Job]) -> Iterator[int]:
    """Let the workers of a Ray cluster answer files; yield the number of queries of each one."""
    everywhere = [
        (replace(part, file=part.file.absolute()), columns, target.absolute(), explain)
        for part, columns, target, explain in jobs
    ]
    try:
        yield from ray_map(engine, _answer_file, everywhere, shared=(model,))
    finally:
        for folder in {target.parent for _, _, target, _ in everywhere}:
            remove_staging(folder)  # of workers that were killed


def _advance(report: Progress, done: int, size: int, total: int, share: float) -> None:
    """Report that a share of the next file is answered, after files of `done` bytes."""
    report(done + int(share * size), total)


def _targets(source: Path, files: list[Path], output: Path) -> list[Path]:
    """Return where the answers to each file go: below the output as the file is below the source."""
    place = Path(os.path.realpath(output))
    found = [Path(os.path.realpath(file)) for file in files]
    inside = source.is_dir() and place.is_relative_to(os.path.realpath(source))
    if inside or any(file.is_relative_to(place) for file in found):
        raise InvalidInput(
            f"output must be another folder than that of the queries, and not inside it, got '{output}'."
        )
    base = source if source.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    return [output / file.relative_to(base) for file in files]


@contextmanager
def _claimed(output: Path, folder: Path, targets: list[Path]) -> Iterator[dict[str, str]]:
    """Make the folder of answers, or check that it holds answers of the same model; yield what was answered last.

    Nobody else may write to the folder meanwhile: answers of another model would be mixed with these.
    """
    from quietmax.estimators.serialization import DECISION_FILE

    described = (folder / DESCRIPTION_FILE).read_bytes()  # it has the digest of the weights
    with suppress(FileNotFoundError):
        described += (folder / DECISION_FILE).read_bytes()
    owner = json.dumps({"format": "quietmax answers", "model": hashlib.sha256(described).hexdigest()})
    log = output / ANSWERS_FILE
    with ExitStack() as stack:
        try:
            existing = [] if log.exists() else [target for target in targets if target.exists()]
            if existing:
                raise InvalidInput(
                    "output must be a new folder or one with answers of the same model, but the file "
                    f"{existing[0]} is something else."
                )
            output.mkdir(parents=True, exist_ok=True)
            place = os.open(output, os.O_RDONLY)
            stack.callback(os.close, place)
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not log.exists():
                atomic_write(log, lambda staging: staging.write_text(f"{owner}\n", encoding="utf-8"))
            first, *entries = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except BlockingIOError:
            raise InvalidInput(
                f"output must be a folder that no other run writes to, got '{output}'."
            ) from None
        except OSError as problem:
            raise _not_written(output, problem) from problem
        if first != owner:
            raise InvalidInput(
                f"output must be a new folder or one with answers of the same model, but '{output}' has answers of "
                "another model."
            )
        answered = {}
        for entry in entries:
            with suppress(ValueError, TypeError, KeyError):  # a line that was cut off by a crash
                answered[json.loads(entry)["file"]] = entry
        yield answered


def _entry(file: Path, name: str, *, explain: bool) -> str:
    """Return what the log says of a file of queries; another line once the file has changed."""
    found = file.stat()
    # The last of the two times changes with every change of the file; `cp -p` and `touch` can set the other one.
    times = (found.st_mtime_ns, found.st_ctime_ns)
    of = str(file.absolute())
    entry = {"file": name, "of": of, "inode": found.st_ino, "bytes": found.st_size, "times": times}
    return json.dumps({**entry, "explain": True} if explain else entry)


def _note(output: Path, entry: str) -> None:
    """Add a line to the log, apart from a line that was cut off."""
    try:
        with (output / ANSWERS_FILE).open("a", encoding="utf-8") as log:
            log.write(f"\n{entry}\n")
    except OSError as problem:
        raise _not_written(output, problem) from problem


def _not_written(place: Path, problem: OSError) -> QuietmaxError:
    return QuietmaxError(f"The answers cannot be written to {place} ({problem.strerror or problem}).")


def _answer_file(
    model: PrivateModel,
    part: TextPart | ParquetPart,
    columns: list[str],
    target: Path,
    explain: bool,
    advance: Callable[[float], None] | None = None,
) -> int:
    """Write the answers to one file, and return their number. `advance` gets the share that is done, if known."""
    from quietmax.data.sources import ParquetPart, converted_frames, rows_at_once
    from quietmax.data.tables import query_features

    features = model.inputs if model.features is None else model.features.dimension(model.inputs)
    height = rows_at_once(max(model.inputs, features))
    names = model.encoding.classes if model.encoding else model.classes
    labels = np.array([str(name) for name in names], dtype=object)
    headings = ["label", *(f"probability of {label}" for label in labels)]
    if explain:
        summands = model.additive().summands
        headings += [f"contribution of {summand} to {label}" for summand in summands for label in labels]
    changed, total, queries = part.file.stat().st_mtime_ns, part.count(), 0

    def _encoded(frame: pd.DataFrame) -> NDArray[np.float32]:
        return query_features(frame, encoding=model.encoding, width=model.inputs, place=part.place)

    def _all_answers() -> Iterator[_Answered]:
        nonlocal queries
        for records in converted_frames(part, columns, height, _encoded):
            queries += len(records)
            probabilities = model.predict_proba(records)
            numbers = [probabilities]
            if explain:
                numbers.append(model.additive().contributions(records).reshape(len(records), -1))
            yield labels[model.decided(probabilities)], np.hstack(numbers)
            if advance is not None and total:
                advance(queries / total)
        if part.file.stat().st_mtime_ns != changed:
            raise InvalidData(f"{part.place} changed while it was read.")

    separator = "\t" if target.suffix.lower() == ".tsv" else ","
    write = _write_parquet if isinstance(part, ParquetPart) else partial(_write_text, separator)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, lambda staging: write(staging, headings, _all_answers()))
    except OSError as problem:
        raise _not_written(target, problem) from problem
    return queries


def _write_parquet(path: Path, headings: list[str], answers: Iterator[_Answered]) -> None:
    kinds = [pyarrow.string(), *(pyarrow.float64() for _ in headings[1:])]
    schema = pyarrow.schema(list(zip(headings, kinds, strict=True)))
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for chosen, numbers in answers:
            columns = [chosen, *numbers.T]
            writer.write_table(pyarrow.table([*map(pyarrow.array, columns)], schema=schema))


def _write_text(separator: str, path: Path, headings: list[str], answers: Iterator[_Answered]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerow(headings)
        for chosen, numbers in answers:
            writer.writerows([label, *row] for label, row in zip(chosen, numbers.tolist(), strict=True))


# --- ask -------------------------------------------------------------------------------------------------------------


@with_groups
def ask(
    *,
    url: Annotated[str, typer.Argument(help="Address of the service, such as http://127.0.0.1:8080.")],
    model: Annotated[
        str, typer.Argument(help="NAME or NAME/VERSION of a model; by default its highest version.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="CSV, TSV or Parquet file with the columns of the model, in any order. Others are not sent.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="CSV file of answers, in the order of the rows. It is written completely or not at all. Default: "
            "beside FILE, with the ending .answers.csv.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the API key. Default: the environment variable QUIETMAX_KEY, if it is set."
        ),
    ] = None,
) -> None:
    """Ask a running service ('quietmax serve') about all rows of a file.

    Rows are sent in as many requests as needed. If a run ends early, run the same command again: what was charged is
    not charged again.

    Examples:

    quietmax ask http://127.0.0.1:8080 affair people.csv

    quietmax ask https://my.org affair/2 a.csv --key-file key.txt -o b.csv
    """
    from quietmax.server.client import Client

    target = output or source.with_suffix(".answers.csv")
    name, _, version = model.partition("/")
    with Client(url, _key(key_file)) as client, progress_bar("asking") as progress:
        try:
            done = client.ask_file(name, source, target, version=version or None, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "Interrupted. Run the same command again: what was charged is not charged again."
            ) from None
    print_json({**done, "output": str(target)})
    left = done["remaining_answers"]
    paid = (
        "The answers were free: training was charged."
        if left is None
        else f"{counted(done['new_answers'], 'new answer was', 'new answers were')} charged; {left:,} are left."
    )
    console.print(f"{counted(done['rows'], 'answer is', 'answers are')} in {target}. {paid}", soft_wrap=True)


def _key(file: Path | None) -> str | None:
    """The API key in a file or in the environment; None for anonymous access."""
    if file is None:
        return os.environ.get("QUIETMAX_KEY") or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnavailable(
            f"key_file cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}."
        ) from None
    if not key.isascii() or not key.isprintable() or not key:
        raise InvalidData(f"key_file must hold one API key and nothing else, but '{file}' does not.")
    return key
