"""`quietmax audit`: test a claim by a lower bound on its epsilon or mu, or by a counterexample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import Alpha, Model, Seed, SplitOptions, loss_of, with_groups
from quietmax.cli._output import console, print_json, print_rows, print_table, progress_bar
from quietmax.errors import QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.audit.bounds import AuditReport

app = typer.Typer(no_args_is_help=True)

Data = Annotated[str, typer.Argument(help="Data set, or .csv, .parquet or .npz file.")]
Epochs = Annotated[int, "Epochs of the network.", {"min": 0}]
Epsilon = Annotated[float, "Claimed epsilon: of one answer, or of training and answers together."]
Delta = Annotated[float, "Claimed delta; for Gaussian noise, mu is the largest within both."]

WORST_CASE = "worst-case"
_CANARY_HOLDOUT = 0.2
"""Share of the user's own table that canaries are taken from unless it is given."""
_COLOURS = {"refuted": "red", "consistent": "blue"}
"""Not green: an audit says nothing about how much the claim allows."""


@dataclass(frozen=True)
class _ReportOptions:
    """With how much noise a claim is audited, and how the report is shown."""

    noise_share: Annotated[float, "Draw this share of the noise and keep the claim, to test the auditor."] = (
        1.0
    )
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test/--no-self-test",
            help="If the claim is consistent, repeat the audit with 0.5 and 0.75 of the noise: would it have noticed?",
        ),
    ] = True

    def _run(self, how: str, audit: Callable[[float], AuditReport]) -> None:
        """Audit and print the report."""
        from quietmax.audit.bounds import self_tested

        tested = self.self_test and self.noise_share == 1
        report = self_tested(audit, (0.5, 0.75)) if tested else audit(self.noise_share)
        title = f"Audit of {report.subject}{how}"
        print_json(report.to_json())
        print_table(title, ("", ""), report.rows())
        console.print(report.meaning, style=_COLOURS[report.verdict])
        for test in report._self_tests:
            console.print(
                test.sentence(report.parameter, report.claimed), style=None if test.notices else "yellow"
            )


@dataclass(frozen=True)
class _MechanismOptions:
    """Which mechanism is audited, on which inputs."""

    mechanism: Annotated[str, "algorithm1, sampled-neuron, noisy-max, gaussian or the name of a plug-in."] = (
        "algorithm1"
    )
    classes: Annotated[int, "Number of classes.", {"min": 2}] = 10
    noise: Annotated[str, "laplace or gaussian; noisy-max also exponential or permute-and-flip."] = "laplace"
    sensitivity: Annotated[
        float, "How far one record moves one score; it moves all in L2 by sqrt(2) times as much."
    ] = 0.358
    epsilon: Epsilon = 1.0
    delta: Delta = 1e-5
    samples: Annotated[int, "Answers to draw on each input.", {"min": 1000}] = 100_000
    exact: Annotated[bool, "Draw the exact noise of a real release; not repeatable."] = False
    seed: Annotated[int, "Seed of the noise and of the pairs that are searched."] = 0


@app.command("mechanism")
@with_groups
def _mechanism(*, options: _MechanismOptions, shown: _ReportOptions) -> None:
    """Audit one answer of a mechanism: draw answers for two neighbouring score vectors and tell them apart.

    The claim of Algorithm 1 is the paper's: epsilon, or mu = epsilon with Gaussian noise; for two classes, the smaller
    cost that its noise has (THEORY 2.2).

    Example: quietmax audit mechanism --mechanism algorithm1 --epsilon 1
    """
    from quietmax.audit.distinguishing import audit_named_mechanism

    with progress_bar("searching for the worst neighbours") as progress:
        shown._run(
            f" with {options.classes} classes",
            lambda share: audit_named_mechanism(**vars(options), noise_share=share, progress=progress),
        )


@app.command("sensitivity")
@with_groups
def _sensitivity(
    *,
    data: Data,
    source: SplitOptions,
    removals: Annotated[
        int,
        "Records (persons with a person column) to retrain without: mislabelled, extreme and ordinary ones in turn.",
        {"min": 1},
    ] = 6,
    queries: Annotated[int, "Test records whose logits are compared.", {"min": 0}] = 1000,
    epochs: Epochs = 100,
    alpha: Alpha = None,
) -> None:
    """Retrain without single records, or persons, and compare the changes with the paper's bounds.

    All networks have the same initial weights and the same batches. With a person column all rows of a person are left
    out together.

    Example: quietmax audit sensitivity mnist-5k --removals 3
    """
    from quietmax.models.stacked import TrainingSettings
    from quietmax.sensitivity.network import empirical_sensitivity, published_sensitivity_for

    split = source.load(data)
    settings = TrainingSettings(epochs=epochs, loss=loss_of(alpha, data))
    with progress_bar(f"training {removals + 1} networks") as progress:
        found = empirical_sensitivity(
            split.train,
            removals=removals,
            queries=split.test.features[:queries],
            settings=settings,
            seed=source.seed,
            progress=progress,
        )
    formulas = published_sensitivity_for(
        split.records.features.shape[1], settings.hidden, split.classes, len(split.train), l2=settings.l2
    )
    checks = found.against(formulas)
    title = f"Removing one {found.unit} of {split.name}, {found.records:,} records"
    verdict = max(check.verdict for check in checks)  # refuted if one is
    print_json({"dataset": split.name, "verdict": verdict, "bounds": checks, **found.to_json()})
    columns = {"removed": "{.kind}", "one weight": "{.weight:.4f}", "weights (L2)": "{.weights_l2:.4f}"}
    print_rows(title, {**columns, "one logit": "{.logit:.4f}"}, found.removals)
    print_rows(
        "Comparison with the paper's bounds",
        {"quantity": "{.quantity}", "empirical": "{.empirical:.4f}", "bound": "{.bound:.4f}"}
        | {"verdict": "{.verdict}"},
        checks,
        "A change above the bound refutes it; a change below proves nothing.",
    )


@dataclass(frozen=True)
class _TrainingOptions:
    """What is trained, and how it is audited."""

    estimator: Annotated[
        str, "teachers, head (released weights), head-query (answers per query) or dpsgd."
    ] = "head"
    canaries: Annotated[
        int,
        "Number of mislabelled records (persons with a person column), each added by a fair coin.",
        {"min": 2},
    ] = 500
    times: Annotated[
        int | None,
        "worst-case: canaries in one training (head); trainings with, and as many without, one canary (dpsgd); draws "
        "of the answers of two models (teachers, head-query). Default: 4,000, 10,000 or 100,000.",
        {"min": 64},
    ] = None
    queries: Annotated[int, "worst-case: answers of teachers and head-query.", {"min": 1}] = 1
    sampling_rate: Annotated[float, "worst-case, dpsgd: Poisson sampling rate; 1 for full batches."] = 1.0
    epsilon: Epsilon = 1.0
    delta: Delta = 1e-5


@app.command("training")
@with_groups
def _training(
    *,
    data: Annotated[str, typer.Argument(help="Data set, .csv, .parquet or .npz file, or worst-case.")],
    options: _TrainingOptions,
    shown: _ReportOptions,
    source: SplitOptions,
) -> None:
    """Audit a training algorithm with canaries: mislabelled records that are in the training set or not.

    With "worst-case" in place of a data set, the sets are made so that one record changes the release as much as we
    know how; this notices most. On real records there is one training with many canaries, which
    come from the records outside the training and test parts; of your own table, from the holdout, which is 0.2 here
    unless --holdout says otherwise. With a person column a canary is a person with all rows. The noise is seeded, so a
    run can be repeated.

    Examples:

    quietmax audit training worst-case --estimator teachers --queries 4

    quietmax audit training mnist-5k --estimator head --canaries 500
    """
    from quietmax.audit.training import audit_estimator, audit_worst_case, check_estimator
    from quietmax.data.sources import is_table_path

    worst = data == WORST_CASE
    other = ("canaries", "times") if worst else ("times", "queries", "sampling_rate")
    arguments = {name: value for name, value in vars(options).items() if name not in other}
    if not worst:
        check_estimator(options.estimator, shown.noise_share)
        if source.holdout is None and is_table_path(data):
            source = replace(source, holdout=_CANARY_HOLDOUT)
    audit: Callable[..., AuditReport]
    if worst:
        audit = partial(audit_worst_case, samples=options.times)
    else:
        audit = partial(audit_estimator, data=source.load(data))
    shown._run(
        "" if worst else ", one run", lambda share: audit(noise_share=share, seed=source.seed, **arguments)
    )


@app.command("stability")
@with_groups
def _stability(
    *,
    data: Data,
    source: SplitOptions,
    removed: Annotated[int, "Number of random records to retrain without.", {"min": 2}] = 31,
    noise: Annotated[list[float] | None, "Standard deviation of noise on every weight. Repeatable."] = None,
    draws: Annotated[int, "Draws of each noise.", {"min": 1}] = 32,
    epochs: Epochs = 100,
    alpha: Alpha = None,
) -> None:
    """Measure On-Average-Remove-One stability by retraining, and the effect of noise on the weights.

    Example: quietmax audit stability mnist-5k --records 300 --epochs 60
    """
    from quietmax.audit.stability import audit_stability
    from quietmax.models.stacked import TrainingSettings

    split = source.load(data)
    with progress_bar(f"training {removed + 1} networks") as progress:
        report = audit_stability(
            split.train,
            removed=removed,
            settings=TrainingSettings(epochs=epochs, loss=loss_of(alpha, data)),
            noise=noise or (),
            draws=draws,
            seed=source.seed,
            progress=progress,
        )
    print_json({"dataset": split.name, **report.to_json()})
    rows = [("plain", report.plain, f"bound {report.bound.value:.4f}", report.verdict)]
    for each in report.noisy:
        change = f"change {each.change.low:+.4f} to {each.change.high:+.4f}"
        rows.append((f"noise {each.noise:g}", each.both_noisy, change, each.verdict))
    print_table(
        f"On-Average-Remove-One stability on {split.name}, {report.removed} of "
        f"{counted(report.records, 'record')} removed",
        ("", "measured", "interval", "compared with", "verdict"),
        (
            (name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}", *rest)
            for name, found, *rest in rows
        ),
        caption="plain: the paper's bound. noise: its corollary that noise makes training more stable.",
    )


@app.command("invariant")
@with_groups
def _invariant(
    *,
    model: Model,
    records: Annotated[int, "Number of synthetic records.", {"min": 3}] = 200,
    seed: Seed = 0,
) -> None:
    """Check on this machine that no record changes what is computed from another record before the noise.

    Encodes, maps and trains on synthetic records, with records removed, added, repeated and reordered, at several
    memory alignments and with 1 and 2 threads, and compares bit for bit. Exits with 1 if anything differs.

    Example: quietmax audit invariant private --records 500
    """
    from quietmax.audit.invariant import audit_model_invariant
    from quietmax.estimators.serialization import open_private

    report = audit_model_invariant(open_private(model), records=records, seed=seed)
    print_json({"model": str(model), **report.to_json()})
    print_rows(
        f"Invariant of {model}, {report.records:,} synthetic records, 1 and 2 threads",
        {"part": "{.part}", "comparisons": "{.comparisons:,}", "verdict": "{.verdict}"},
        report.checks,
        "A difference is a counterexample. No difference is evidence for this machine, not a proof.",
    )
    if report.broken is not None:
        raise QuietmaxError(f"The invariant is broken on this machine: {report.broken}.")
