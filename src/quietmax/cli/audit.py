"""`quietmax audit`: lower bounds on a claimed epsilon or mu, and empirical sensitivity beside the published one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from quietmax import audit
from quietmax._io import check_figure
from quietmax.accounting.budget import Budget, per_query
from quietmax.accounting.costs import Cost, GaussianCost, Measure, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.report import AuditReport, Finding, plot_findings
from quietmax.cli._options import DataDir, Download, Json, Seed
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.data.load import load
from quietmax.data.records import Records as LoadedRecords
from quietmax.data.records import Split
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.dpsgd.config import LENGTH_PER_COLUMN, plan
from quietmax.estimators.dpsgd.estimator import DPSGD, claim
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import open_private
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms.algorithm1 import Algorithm1, budget_split
from quietmax.mechanisms.base import Mechanism
from quietmax.mechanisms.noisy_max import GaussianScores, NoisyMax
from quietmax.mechanisms.sampled_neuron import SampledNeuron
from quietmax.models.losses import Convexified, CrossEntropy
from quietmax.models.stacked import TrainingSettings, train_stack
from quietmax.models.training import Model
from quietmax.noise.sources import EXACT
from quietmax.sensitivity.base import ScoreBounds, Sensitivity
from quietmax.sensitivity.empirical import empirical_sensitivity
from quietmax.sensitivity.published import published_sensitivity_for

app = typer.Typer(help="Test a claim: what an adversary can show against it.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set's name, or a CSV, Parquet or NPZ file.")]
Records = Annotated[int | None, typer.Option(min=2, help="Training records; default: the data set's own.")]
Epochs = Annotated[int, typer.Option(min=0, help="Passes over the training records.")]
Alpha = Annotated[float, typer.Option(help="Constant of the convexified loss; 0 means cross-entropy.")]
Plot = Annotated[
    Path | None,
    typer.Option(help="Write a picture of found against claimed to this .png, .pdf or .svg file."),
]
Confidence = Annotated[float, typer.Option(help="Of the lower bound.")]

_COLOURS = {"refuted": "red", "consistent": "green"}


@app.command("mechanism")
def mechanism(
    name: Annotated[
        str, typer.Option("--mechanism", help="algorithm1, sampled-neuron, noisy-max or gaussian.")
    ] = "algorithm1",
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    epsilon: Annotated[float, typer.Option(help="Claimed of one answer.")] = 1.0,
    delta: Annotated[
        float, typer.Option(help="For Gaussian noise: mu is the largest within (epsilon, delta).")
    ] = 1e-5,
    noise: Annotated[
        str, typer.Option(help="laplace or gaussian; noisy-max also exponential, permute-and-flip.")
    ] = "laplace",
    one_score: Annotated[float, typer.Option(help="How far one record moves one score.")] = 0.358,
    all_scores: Annotated[
        float | None, typer.Option(help="How far in L2 all of them; default: sqrt(2) times one.")
    ] = None,
    noise_share: Annotated[
        float, typer.Option(help="Try the auditor: draw only this part of the noise, claim as before.")
    ] = 1.0,
    samples: Annotated[int, typer.Option(min=1000, help="Answers drawn in each of two worlds.")] = 100_000,
    confidence: Confidence = audit.CONFIDENCE,
    exact: Annotated[
        bool, typer.Option("--exact", help="Draw the exact noise of a release, not repeatable.")
    ] = False,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """An adversary who knows both neighbouring worlds' scores draws answers and tells the worlds apart.

    The claim of Algorithm 1 is the paper's: epsilon, or mu = epsilon with Gaussian noise; for two classes the
    smaller cost that its noise really has (THEORY 2.2).

    Example: quietmax audit mechanism --mechanism algorithm1 --epsilon 1
    """
    check_figure(plot)
    _check_share(noise_share)
    bounds = _bounds(one_score, all_scores)
    claiming = _prepared(name, noise, classes, epsilon, delta, bounds, 1.0)
    released = _prepared(name, noise, classes, epsilon, delta, bounds, noise_share)
    with progress_bar("looking for the worst neighbours", quiet=as_json) as progress:
        report = audit.mechanism(
            released,
            classes,
            claimed=claiming.guarantee(classes),
            samples=samples,
            confidence=confidence,
            delta=delta,
            source=EXACT if exact else None,
            seed=seed,
            progress=progress,
        )
    _print_report(f"Audit of {name} with {classes} classes", report, plot, as_json)


def _bounds(one: float, all_scores: float | None) -> ScoreBounds:
    because = "Stated on the command line."
    return ScoreBounds(
        Sensitivity(one, "certified", because),
        Sensitivity(math.sqrt(2) * one if all_scores is None else all_scores, "certified", because),
    )


def _prepared(
    name: str, noise: str, classes: int, epsilon: float, delta: float, bounds: ScoreBounds, share: float
) -> Mechanism:
    """The mechanism with its budget for one answer, and with only a share of the noise that takes."""
    if name == "algorithm1":
        drawn: Literal["gaussian", "laplace"] = "gaussian" if noise == "gaussian" else "laplace"
        _one_of("--noise", noise, ("laplace", "gaussian"))
        part = budget_split(epsilon, classes, drawn)
        probability = min(math.expm1(2 * bounds.one.value), 1.0)
        return Algorithm1(drawn, part, part / share, bounds.one.value, probability)
    if name == "sampled-neuron":
        _one_of("--noise", noise, ("laplace", "gaussian"))
        cost = _cost("pure" if noise == "laplace" else "gaussian", epsilon, delta, share)
        return SampledNeuron(noise, bounds=bounds, per_query=cost)  # type: ignore[arg-type]
    if name == "noisy-max":
        method = "exponential" if noise == "laplace" else noise
        _one_of("--noise", method, ("exponential", "permute-and-flip", "gaussian"))
        cost = _cost("gaussian" if method == "gaussian" else "pure", epsilon, delta, share)
        return NoisyMax(method, bounds=bounds, per_query=cost)  # type: ignore[arg-type]
    if name == "gaussian":
        cost = _cost("gaussian", epsilon, delta, share)
        return GaussianScores(bounds=bounds, per_query=cost)
    raise InvalidInput(
        f"There is no mechanism {name!r}; choose algorithm1, sampled-neuron, noisy-max or gaussian."
    )


def _cost(measure: Measure, epsilon: float, delta: float, share: float) -> Cost:
    cost = per_query(Budget(epsilon, delta), measure)
    return PureCost(cost.epsilon / share) if isinstance(cost, PureCost) else GaussianCost(cost.mu / share)


@app.command("sensitivity")
def sensitivity(
    data: Name,
    records: Records = None,
    removals: Annotated[
        int, typer.Option(min=1, help="Records to retrain without: mislabelled, extreme, ordinary in turn.")
    ] = 6,
    queries: Annotated[int, typer.Option(min=0, help="Test records whose logits are compared.")] = 1000,
    epochs: Epochs = 100,
    alpha: Alpha = 1.0,
    seed: Seed = 0,
    plot: Plot = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Retrain without single records, same start and order, and compare the changes with the paper's bounds.

    Example: quietmax audit sensitivity mnist-5k --removals 3
    """
    check_figure(plot)
    split = load(data, records=records, seed=seed, data_dir=data_dir, download=download)
    settings = _settings(epochs, alpha)
    with progress_bar(f"{removals + 1} networks", quiet=as_json) as progress:
        found = empirical_sensitivity(
            split.train,
            removals=removals,
            queries=split.test.features[:queries],
            settings=settings,
            seed=seed,
            progress=progress,
        )
    formulas = published_sensitivity_for(
        split.records.features.shape[1], settings.hidden, split.classes, len(split.train), l2=settings.l2
    )
    checks = found.against(formulas)
    title = f"Removing one of {found.records:,} records of {split.name}"
    if as_json:
        print_json(
            {
                "dataset": split.name,
                "verdict": "refuted" if any(check.verdict == "refuted" for check in checks) else "consistent",
                "bounds": [check.to_json() for check in checks],
                **found.to_json(),
            }
        )
    else:
        print_table(
            title,
            ("removed", "one weight", "weights (L2)", "one logit"),
            (
                (removal.kind, f"{removal.weight:.4f}", f"{removal.weights_l2:.4f}", f"{removal.logit:.4f}")
                for removal in found.removals
            ),
        )
        print_table(
            "Beside the paper's bounds",
            ("quantity", "empirical", "bound", "verdict"),
            (
                (
                    check.quantity.replace("_", " "),
                    f"{check.empirical:.4f}",
                    f"{check.bound:.4f}",
                    check.verdict,
                )
                for check in checks
            ),
            caption="An observed change above the bound refutes it; one below proves nothing.",
        )
    if plot is not None:
        plot_findings([Finding.of_check(check) for check in checks], plot, title=title)


@app.command("training")
def training(
    data: Name,
    estimator: Annotated[
        str, typer.Option(help="teachers, head, dpsgd, or network (no privacy at all).")
    ] = "head",
    method: Annotated[str, typer.Option(help="one-run or repeated.")] = "one-run",
    records: Records = None,
    canaries: Annotated[
        int, typer.Option(min=2, help="one-run: mislabelled records, each in by a fair coin.")
    ] = 500,
    times: Annotated[
        int, typer.Option(min=64, help="repeated: trainings with, and as many without, one canary.")
    ] = 200,
    epsilon: Annotated[float, typer.Option(help="Claimed of the whole training and its answers.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Claimed of the whole training and its answers.")] = 1e-5,
    noise_share: Annotated[
        float,
        typer.Option(help="dpsgd, repeated: draw only this part of the noise, claim as before."),
    ] = 1.0,
    epochs: Epochs = 20,
    confidence: Confidence = audit.training.CONFIDENCE,
    seed: Seed = 0,
    plot: Plot = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Put the auditor's own mislabelled records into the training set or not, and guess from the model which.

    The canaries come from the pool, disjoint from the training part. Seeded noise, so a run can be repeated.

    Example: quietmax audit training mnist-5k --estimator head --canaries 500
    """
    _one_of("--estimator", estimator, ("teachers", "head", "dpsgd", "network"))
    _one_of("--method", method, ("one-run", "repeated"))
    if noise_share != 1 and (estimator, method) != ("dpsgd", "repeated"):
        raise InvalidInput("--noise-share belongs to --estimator dpsgd --method repeated; leave it out.")
    check_figure(plot)
    split = load(data, records=records, seed=seed, data_dir=data_dir, download=download)
    count = canaries if method == "one-run" else 1
    chosen = audit.training.mislabelled(split.pool, count=count, seed=seed)
    subject = f"{estimator} on {split.name}"
    stated = Guarantee("approximate", epsilon=epsilon, delta=delta, because="Stated on the command line.")
    with progress_bar(f"training {estimator}", quiet=as_json) as progress:
        if estimator == "network" and method == "repeated":
            without, inside = audit.training.network_draws(
                split.train, chosen, settings=_settings(epochs, 0.0), seed=seed, progress=progress
            )
            report = audit.distinguish(
                without,
                inside,
                stated,
                samples=times,
                confidence=confidence,
                subject=subject,
                details={"method": "repeated training", "records": len(split.train)},
            )
        elif estimator == "dpsgd" and method == "repeated":
            report = _repeated_dpsgd(
                split, chosen, epsilon, delta, times, noise_share, confidence, seed, subject, progress
            )
        else:
            fit = _fit(estimator, split, epsilon, delta, count, epochs, seed)
            claimed = stated if estimator == "network" else None
            if method == "one-run":
                report = audit.training.one_run(
                    fit,
                    audit.training.label_score,
                    split.train,
                    chosen,
                    claimed,
                    confidence=confidence,
                    delta=delta,
                    seed=seed,
                    subject=subject,
                )
            else:
                report = audit.training.repeated(
                    fit,
                    audit.training.label_score,
                    split.train,
                    chosen,
                    claimed,
                    times=times,
                    confidence=confidence,
                    delta=delta,
                    subject=subject,
                    progress=progress,
                )
    _print_report(f"Audit of {subject}, {method}", report, plot, as_json)


def _fit(
    estimator: str, split: Split, epsilon: float, delta: float, canaries: int, epochs: int, seed: int
) -> audit.training.Fit[Any]:
    """Train afresh at every call, each time from another seed."""
    classes = tuple(range(split.classes))
    size = len(split.train)
    seeds = itertools.count(seed)

    def fit(features: Any, labels: Any) -> Any:
        state = next(seeds) % 2**32
        if estimator == "network":
            return _plain_network(features, labels, split.classes, epochs, state)
        if estimator == "dpsgd":
            return _dpsgd(epsilon, delta, classes, size, state).fit(features, labels)
        model: Teachers | PrivateHead = (
            Teachers(
                epsilon, delta, queries=canaries, classes=classes, declared_size=size, random_state=state
            )
            if estimator == "teachers"
            else PrivateHead(epsilon, delta, classes=classes, declared_size=size, random_state=state)
        )
        return model.fit(features, labels)

    return fit


def _dpsgd(epsilon: float, delta: float, classes: tuple[int, ...], size: int, state: int) -> DPSGD:
    return DPSGD(epsilon, delta, classes=classes, declared_size=size, random_state=state)


def _repeated_dpsgd(
    split: Split,
    canary: LoadedRecords,
    epsilon: float,
    delta: float,
    times: int,
    noise_share: float,
    confidence: float,
    seed: int,
    subject: str,
    progress: audit.training.Progress,
) -> AuditReport:
    """The default DP-SGD for this many records, trained often without and with the canary."""
    _check_share(noise_share)
    size, columns = len(split.train), split.train.features.shape[1]
    planned = plan(size, epsilon=epsilon, delta=delta, length=LENGTH_PER_COLUMN * math.sqrt(columns))
    without, inside = audit.training.private_network_draws(
        split.train,
        canary,
        settings=planned.settings,
        noise_multiplier=noise_share * planned.noise_multiplier,
        size=size,
        seed=seed,
        progress=progress,
    )
    return audit.distinguish(
        without,
        inside,
        claim(planned, exact=False, own_module=False, size_declared=True, classes_declared=True),
        samples=times,
        confidence=confidence,
        delta=delta,
        subject=subject,
        details={"method": "repeated training", "records": size},
    )


def _plain_network(features: Any, labels: Any, classes: int, epochs: int, seed: int) -> Model:
    settings = _settings(epochs, 0.0)
    rows = [np.arange(len(labels))]
    stack = train_stack(features, labels, classes, rows, settings=settings, seeds=[seed])
    return Model(stack, settings, len(labels), "audit", seed)


@app.command("stability")
def stability(
    data: Name,
    records: Records = None,
    removed: Annotated[int, typer.Option(min=2, help="Random records to retrain without.")] = 31,
    noise: Annotated[
        list[float] | None, typer.Option(help="Standard deviation of noise on every weight; repeat.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each noise.")] = 32,
    confidence: Annotated[float, typer.Option(help="Of all intervals together.")] = 0.95,
    epochs: Epochs = 100,
    alpha: Alpha = 1.0,
    seed: Seed = 0,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Measure On-Average-Remove-One stability by retraining, and what noise on the weights does to it.

    Example: quietmax audit stability mnist-5k --records 300 --epochs 60
    """
    split = load(data, records=records, seed=seed, data_dir=data_dir, download=download)
    with progress_bar(f"{removed + 1} networks", quiet=as_json) as progress:
        report = audit.stability(
            split.train,
            removed=removed,
            settings=_settings(epochs, alpha),
            noise=noise or (),
            draws=draws,
            confidence=confidence,
            seed=seed,
            progress=progress,
        )
    if as_json:
        print_json({"dataset": split.name, **report.to_json()})
        return
    print_table(
        f"On-Average-Remove-One stability on {split.name}, {report.removed} of {report.records:,} records removed",
        ("", "measured", "interval", "beside", "verdict"),
        [
            (
                "plain",
                f"{report.plain.value:.4f}",
                f"{report.plain.low:.4f} to {report.plain.high:.4f}",
                f"bound {report.bound.value:.4f}",
                report.verdict,
            ),
            *(
                (
                    f"noise {each.noise:g}",
                    f"{each.both_noisy.value:.4f}",
                    f"{each.both_noisy.low:.4f} to {each.both_noisy.high:.4f}",
                    f"change {each.change.low:+.4f} to {each.change.high:+.4f}",
                    each.verdict,
                )
                for each in report.noisy
            ),
        ],
        caption="Plain: of the paper's bound. Noise: of its corollary that noise makes training more stable.",
    )


@app.command("invariant")
def invariant(
    model: Annotated[Path, typer.Argument(help="Folder of a private model, written by 'quietmax train'.")],
    records: Annotated[int, typer.Option(min=3, help="Number of synthetic records.")] = 200,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Check on this machine that no record changes what is computed from another record before the noise.

    Encodes, maps and trains on synthetic records, with records removed, added, repeated and reordered, at several
    memory alignments and with 1 and 2 threads, and compares bit for bit. Exits with 1 if anything differs.

    Example: quietmax audit invariant model --records 500
    """
    report = audit.invariant_of_model(open_private(model), records=records, seed=seed)
    if as_json:
        print_json({"model": str(model), **report.to_json()})
    else:
        print_table(
            f"Invariant of {model}, {report.records:,} synthetic records, 1 and 2 threads",
            ("part", "comparisons", "verdict"),
            [
                (check.part, f"{check.comparisons:,}", "consistent" if check.broken is None else "refuted")
                for check in report.checks
            ],
            caption="A difference is a counterexample. No difference is evidence for this machine, not a proof.",
        )
    if report.broken is not None:
        raise QuietmaxError(f"The invariant is broken on this machine: {report.broken}.")


def _settings(epochs: int, alpha: float) -> TrainingSettings:
    settings = TrainingSettings(epochs=epochs)
    return replace(settings, loss=CrossEntropy() if alpha == 0 else Convexified(alpha))


def _check_share(noise_share: float) -> None:
    if not 0 < noise_share <= 1:
        raise InvalidInput(
            f"--noise-share is {noise_share}, but must be above 0 and at most 1; give such a share."
        )


def _one_of(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InvalidInput(f"{option} is {given!r}, but must be one of {', '.join(allowed)}; choose one.")


def _print_report(title: str, report: AuditReport, plot: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
    else:
        print_table(title, ("", ""), report.rows())
        console.print(
            {
                "refuted": "The claim is refuted: the event tells the worlds apart better than it permits.",
                "consistent": "Nothing found against the claim; that is evidence, not a proof.",
            }[report.verdict],
            style=_COLOURS[report.verdict],
        )
    if plot is not None:
        plot_findings([Finding.of_report(report)], plot, title=title)
