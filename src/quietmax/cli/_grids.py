"""What the commands that run a grid share: options, progress with the time left, failures, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quietmax.cli._output import console, errors
from quietmax.errors import InvalidInput
from quietmax.experiments import runner
from quietmax.experiments.grid import Trial
from quietmax.experiments.runner import Where, run_cells

Output = Annotated[Path, typer.Option(help="Folder of results; what it holds already is not computed again.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes of one thread each; default: one per core.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Compute on a Ray cluster at this address; 'local' starts one here. Needs quietmax[ray].",
    ),
]


def where(workers: int | None, ray: str | None) -> Where:
    """Where the cells are computed."""
    return Where(workers, "" if ray == "local" else ray)


def compute(
    trials: Sequence[Trial], output: Path, place: Where, data_dir: Path | None, *, quiet: bool
) -> runner.Run:
    """Run the cells with a progress bar; Ctrl-C ends with a sentence, as everything finished is stored."""
    with _progress(len(set(trials)), quiet) as advance:
        try:
            done = run_cells(trials, output, where=place, data_dir=data_dir, progress=advance)
        except KeyboardInterrupt:
            errors.print(
                f"Stopped. Finished cells are in {output}; the same command goes on from there.",
                soft_wrap=True,
            )
            raise typer.Exit(1) from None
    for trial, failure in done.failures.items():
        errors.print(
            f"failed: {trial}: {failure}", style="red", markup=False, highlight=False, soft_wrap=True
        )
    return done


def finish(done: runner.Run, written: Sequence[Path], *, quiet: bool) -> None:
    """Name what was written; exit code 1 if any cell failed."""
    if not quiet:
        for path in written:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
        found = len(done.results) - done.computed
        console.print(
            f"{done.computed} cells computed in {done.seconds:.0f} s, {found} found, {len(done.failures)} failed.",
            markup=False,
            highlight=False,
        )
    if done.failures:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task("cells", total=total, left="")

        def advance(progress: runner.Progress) -> None:
            left = "" if progress.seconds_left is None else f"about {duration(progress.seconds_left)} left"
            failed = f", {progress.failed} failed" if progress.failed else ""
            bar.update(task, completed=progress.done, total=progress.total, left=left + failed)

        yield advance


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(7500)
    '2 h 5 min'
    """
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def listed(values: list[str] | None) -> list[str]:
    """Values given one by one, several in a row, or separated by commas.

    >>> listed(["a,b", "c"])
    ['a', 'b', 'c']
    """
    return [part for value in values or [] for part in value.split(",") if part]


def numbers(values: list[str] | None, what: str) -> list[float]:
    """Positive numbers, each once, in order.

    >>> numbers(["0.1,1", "10"], "--epsilons")
    [0.1, 1.0, 10.0]
    """
    try:
        found = [float(value) for value in listed(values)]
    except ValueError:
        raise InvalidInput(
            f"{what} is {' '.join(values or [])!r}, but must be numbers; write them as in 0.1 1 10."
        ) from None
    if any(not 0 < value < float("inf") for value in found):
        raise InvalidInput(
            f"{what} is {' '.join(values or [])!r}, but must be positive numbers; give such ones."
        )
    return sorted(set(found))
