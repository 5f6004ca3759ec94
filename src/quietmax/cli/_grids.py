"""What the commands that run trials share: options, the run with its progress, failures, the files it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from quietmax.cli._output import console, errors
from quietmax.errors import InvalidInput, counted

if TYPE_CHECKING:
    from quietmax.experiments.grid import Trial
    from quietmax.experiments.runner import Progress, Run

Output = Annotated[Path, typer.Option(help="Folder of results. Trials that it contains are not run again.")]
WorkerCount = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Worker processes of one thread each. Default: one per core."),
]


def run_with_progress(
    trials: Sequence[Trial],
    output: Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> Run:
    """Run trials with a progress bar, and print those that failed."""
    from quietmax.experiments.runner import run_trials

    with _progress(len(set(trials)), quiet) as advance:
        try:
            done = run_trials(trials, output, workers=workers, ray=ray, data_dir=data_dir, progress=advance)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Interrupted. Finished trials are stored in {output}; the same command continues from there."
            ) from None
    for trial, failure in done.failures.items():
        errors.print(f"failed: {trial}: {failure}", style="red", soft_wrap=True)
    return done


def finish(done: Run, written: Sequence[Path], *, quiet: bool) -> None:
    """Print the written files and the counts of a run; exit with code 1 if a trial failed."""
    if not quiet:
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True)
        found = len(done.results) - done.computed
        console.print(
            f"{counted(done.computed, 'trial')} computed in {done.seconds:.0f} s, {found} found, "
            f"{len(done.failures)} failed."
        )
    if done.failures:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with ProgressBar(
        *columns, console=errors, transient=True, disable=quiet or not errors.is_terminal
    ) as bar:
        task = bar.add_task("trials", total=total, left="")

        def advance(progress: Progress) -> None:
            left = "" if progress.seconds_left is None else f"about {duration(progress.seconds_left)} left"
            failed = f", {progress.failed} failed" if progress.failed else ""
            bar.update(task, completed=progress.done, total=progress.total, left=left + failed)

        yield advance


def duration(seconds: float) -> str:
    """Format a duration."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def listed(values: list[str] | None) -> list[str]:
    """Split the values of a list option, each of which may contain several separated by commas."""
    return [part for value in values or [] for part in value.split(",") if part]


def numbers(values: list[str] | None, option: str) -> list[float]:
    """Parse the positive numbers of a list option."""
    try:
        found = [float(value) for value in listed(values)]
    except ValueError:
        found = [float("nan")]
    if not all(0 < value < float("inf") for value in found):
        raise InvalidInput(
            f"{option} must be positive numbers, as in 0.1 1 10, got {' '.join(values or [])!r}."
        )
    return sorted(set(found))
