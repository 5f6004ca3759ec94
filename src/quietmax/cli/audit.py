"""`quietmax audit`: test a claim by a lower bound on its epsilon or mu, or by a counterexample."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quietmax.cli._options import DataDir, Download, Json, Seed, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput, QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.audit.bounds import AuditReport
    from quietmax.audit.training import Fit
    from quietmax.data.records import Records as TrainingRecords
    from quietmax.data.records import Split
    from quietmax.mechanisms.base import Mechanism
    from quietmax.models.stacked import Progress, TrainingSettings
    from quietmax.models.training import Model
    from quietmax.sensitivity.certified import ScoreBounds

app = typer.Typer(no_args_is_help=True)

Data = Annotated[str, typer.Argument(help="Data set, or .csv, .parquet or .npz file.")]
Records = Annotated[
    int | None,
    typer.Option(
        min=2, help="Data sets of the paper: number of training records. Default: that of the data set."
    ),
]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Your own table: share of the persons (without a person column: of the rows) that are not trained on, as "
        "in 0.2."
    ),
]
Epochs = Annotated[int, typer.Option(min=0, help="Epochs of the network.")]
Alpha = Annotated[float, typer.Option(help="Constant of the convexified loss; 0 is cross-entropy.")]
NoiseShare = Annotated[
    float, typer.Option(help="Draw this share of the noise and keep the claim, to test the auditor.")
]
SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test/--no-self-test",
        help="If the claim is consistent, repeat the audit with half the noise: would it have noticed?",
    ),
]
DrawSeed = Annotated[int, typer.Option(help="Seed of the noise and of the pairs that are searched.")]
Plot = Annotated[
    Path | None,
    typer.Option(help="Plot found beside claimed to this .png, .pdf or .svg file."),
]

WORST_CASE = "worst-case"
_TRAININGS, _ANSWER_DRAWS = 200, 100_000
_CANARY_HOLDOUT = 0.2
"""Share of the user's own table that canaries are taken from unless it is given."""
_BUILT_IN_MECHANISMS = ("algorithm1", "sampled-neuron", "noisy-max", "gaussian")
_COLOURS = {"refuted": "red", "consistent": "blue"}
"""Not green: an audit says nothing about how much the claim allows."""
_VERDICTS = {
    "refuted": "The claim is refuted: the event tells the inputs apart better than the claim permits.",
    "consistent": "No contradiction to the claim was found. This is evidence, not a proof.",
}


@app.command("mechanism")
def mechanism(
    name: Annotated[
        str,
        typer.Option(
            "--mechanism", help="algorithm1, sampled-neuron, noisy-max, gaussian or the name of a plug-in."
        ),
    ] = "algorithm1",
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    epsilon: Annotated[float, typer.Option(help="Claimed epsilon of one answer.")] = 1.0,
    delta: Annotated[
        float, typer.Option(help="Gaussian noise: mu is the largest within (epsilon, delta).")
    ] = 1e-5,
    noise: Annotated[
        str, typer.Option(help="laplace or gaussian; noisy-max also exponential or permute-and-flip.")
    ] = "laplace",
    sensitivity: Annotated[float, typer.Option(help="How far one record moves one score.")] = 0.358,
    l2_sensitivity: Annotated[
        float | None,
        typer.Option(help="How far one record moves all scores in L2. Default: sqrt(2) times --sensitivity."),
    ] = None,
    noise_share: NoiseShare = 1.0,
    self_test: SelfTest = True,
    samples: Annotated[int, typer.Option(min=1000, help="Answers to draw on each input.")] = 100_000,
    confidence: Annotated[
        float | None, typer.Option(help="Confidence of the lower bound. Default: 0.999999.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Draw the exact noise of a real release; not repeatable.")
    ] = False,
    seed: DrawSeed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Audit one answer of a mechanism: draw answers for two neighbouring score vectors and tell them apart.

    The claim of Algorithm 1 is the paper's: epsilon, or mu = epsilon with Gaussian noise; for two classes, the smaller
    cost that its noise has (THEORY 2.2).

    Example: quietmax audit mechanism --mechanism algorithm1 --epsilon 1
    """
    from quietmax._io import check_figure
    from quietmax.audit.bounds import CONFIDENCE, self_tested
    from quietmax.audit.distinguishing import audit_mechanism
    from quietmax.noise.sources import EXACT

    check_figure(plot)
    _check_noise_share(noise_share)
    bounds = _score_bounds(sensitivity, l2_sensitivity)
    plug_in = name not in _BUILT_IN_MECHANISMS
    claiming = _prepared(name, noise, classes, epsilon, delta, bounds, 1.0)
    with progress_bar("searching for the worst neighbours", quiet=as_json) as progress:

        def audit(share: float) -> AuditReport:
            return audit_mechanism(
                _prepared(name, noise, classes, epsilon, delta, bounds, share),
                classes,
                claimed=claiming.guarantee(classes),
                change=bounds if plug_in else None,
                samples=samples,
                confidence=CONFIDENCE if confidence is None else confidence,
                delta=delta,
                noise=EXACT if exact else None,
                seed=seed,
                progress=progress,
            )

        report = self_tested(audit) if self_test and noise_share == 1 else audit(noise_share)
    _print_report(f"Audit of {name} with {classes} classes", report, plot, as_json)


def _score_bounds(one: float, vector: float | None) -> ScoreBounds:
    from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

    because = "Stated on the command line."
    return ScoreBounds(
        Sensitivity(one, "certified", because),
        Sensitivity(math.sqrt(2) * one if vector is None else vector, "certified", because),
    )


def _prepared(
    name: str, noise: str, classes: int, epsilon: float, delta: float, bounds: ScoreBounds, share: float
) -> Mechanism:
    """Return the mechanism with its budget for one answer, and with a share of the noise that this requires."""
    from quietmax.accounting.costs import Budget, per_query
    from quietmax.audit.distinguishing import StatedScores
    from quietmax.audit.training import cost_with_share, mechanism_with_share
    from quietmax.mechanisms.base import plugin_mechanisms

    if name in _BUILT_IN_MECHANISMS:
        return mechanism_with_share(_built_in(name, noise, classes, epsilon, delta, bounds), share)
    plug_ins = plugin_mechanisms()
    _check_choice("--mechanism", name, (*_BUILT_IN_MECHANISMS, *plug_ins))
    own = plug_ins[name]
    cost = per_query(Budget(epsilon, delta), own.measure, own.analysis)
    return own.prepared(StatedScores(classes, bounds), cost_with_share(cost, share))


def _built_in(
    name: str, noise: str, classes: int, epsilon: float, delta: float, bounds: ScoreBounds
) -> Mechanism:
    """Return a built-in mechanism with its budget for one answer."""
    from quietmax.accounting.costs import Budget, per_query
    from quietmax.mechanisms.algorithm1 import Algorithm1, budget_split
    from quietmax.mechanisms.base import GaussianScores, NoisyMax, SampledNeuron

    if name == "algorithm1":
        drawn: Literal["gaussian", "laplace"] = "gaussian" if noise == "gaussian" else "laplace"
        _check_choice("--noise", noise, ("laplace", "gaussian"))
        part = budget_split(epsilon, classes, drawn)
        probability = min(math.expm1(2 * bounds.one.value), 1.0)
        return Algorithm1(drawn, part, part, bounds.one.value, probability)
    if name == "sampled-neuron":
        _check_choice("--noise", noise, ("laplace", "gaussian"))
        cost = per_query(Budget(epsilon, delta), "pure" if noise == "laplace" else "gaussian")
        return SampledNeuron(noise, bounds=bounds, per_query=cost)  # type: ignore[arg-type]
    if name == "noisy-max":
        method = "exponential" if noise == "laplace" else noise
        _check_choice("--noise", method, ("exponential", "permute-and-flip", "gaussian"))
        cost = per_query(Budget(epsilon, delta), "gaussian" if method == "gaussian" else "pure")
        return NoisyMax(method, bounds=bounds, per_query=cost)  # type: ignore[arg-type]
    return GaussianScores(bounds=bounds, per_query=per_query(Budget(epsilon, delta), "gaussian"))


@app.command("sensitivity")
def sensitivity(
    data: Data,
    records: Records = None,
    holdout: Holdout = None,
    removals: Annotated[
        int,
        typer.Option(
            min=1,
            help="Records (persons with a person column) to retrain without: mislabelled, extreme and ordinary ones "
            "in turn.",
        ),
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
    """Retrain without single records, or persons, and compare the changes with the paper's bounds.

    All networks have the same initial weights and the same batches. With a person column all rows of a person are left
    out together.

    Example: quietmax audit sensitivity mnist-5k --removals 3
    """
    from quietmax._io import check_figure
    from quietmax.audit.bounds import Finding, plot_findings
    from quietmax.data.load import load
    from quietmax.sensitivity.network import empirical_sensitivity, published_sensitivity_for

    check_figure(plot)
    split = load(data, records=records, holdout=holdout, seed=seed, data_dir=data_dir, download=download)
    settings = _settings(epochs, alpha)
    with progress_bar(f"training {removals + 1} networks", quiet=as_json) as progress:
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
    title = f"Removing one {found.unit} of {split.name}, {found.records:,} records"
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
            "Comparison with the paper's bounds",
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
            caption="A change above the bound refutes it; a change below proves nothing.",
        )
    if plot is not None:
        plot_findings([Finding.of_check(check) for check in checks], plot, title=title)


@dataclass(frozen=True)
class TrainingOptions:
    """What is trained, and how it is audited."""

    estimator: Annotated[
        str,
        typer.Option(
            help="teachers, head (released weights), head-query (answers per query), dpsgd, or network (an ordinary "
            "network without privacy)."
        ),
    ] = "head"
    method: Annotated[str, typer.Option(help="one-run or repeated.")] = "one-run"
    canaries: Annotated[
        int,
        typer.Option(
            min=2,
            help="one-run: number of mislabelled records (persons with a person column), each added by a fair coin.",
        ),
    ] = 500
    times: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="repeated, worst-case: trainings with, and as many without, one canary; for answers (teachers, "
            "head-query), draws of the answers of two models. Default: 200, for answers 100,000; worst-case: 6,000 "
            "(head), 10,000 (dpsgd) or 100,000.",
        ),
    ] = None
    queries: Annotated[
        int, typer.Option(min=1, help="repeated, worst-case: answers of teachers and head-query.")
    ] = 1
    sampling_rate: Annotated[
        float, typer.Option(help="worst-case, dpsgd: Poisson sampling rate; 1 for full batches.")
    ] = 1.0
    epsilon: Annotated[float, typer.Option(help="Claimed epsilon of training and answers together.")] = 1.0
    delta: Annotated[float, typer.Option(help="Claimed delta of training and answers together.")] = 1e-5
    noise_share: NoiseShare = 1.0
    self_test: SelfTest = True
    epochs: Annotated[int, typer.Option(min=0, help="network: epochs.")] = 20
    confidence: Annotated[
        float | None, typer.Option(help="Confidence of the lower bound. Default: 0.99.")
    ] = None
    seed: Seed = 0

    def check(self) -> None:
        """Raise if options are unknown or contradict each other."""
        _check_choice("--estimator", self.estimator, ("teachers", "head", "head-query", "dpsgd", "network"))
        _check_choice("--method", self.method, ("one-run", "repeated"))
        _check_noise_share(self.noise_share)
        if self.noise_share != 1 and self.estimator == "network":
            raise InvalidInput(
                "--noise-share cannot be combined with --estimator network, which draws no noise."
            )

    @property
    def answers(self) -> bool:
        """Whether the estimator releases answers, and its training draws no noise."""
        return self.estimator in ("teachers", "head-query")


@app.command("training")
@with_groups
def training(
    *,
    data: Annotated[str, typer.Argument(help="Data set, .csv, .parquet or .npz file, or worst-case.")],
    options: TrainingOptions,
    records: Records = None,
    holdout: Holdout = None,
    plot: Plot = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Audit a training algorithm with canaries: mislabelled records that are in the training set or not.

    With "worst-case" in place of a data set, the training sets are made so that one record changes the release as much
    as we know how; this notices most. On real records one canary changes less. The canaries then come from the records
    outside the training and test parts; of your own table, from the holdout, which is 0.2 here unless --holdout says
    otherwise. With a person column a canary is a person with all rows. The noise is seeded, so a run can be repeated.

    Examples:

    quietmax audit training worst-case --estimator teachers --queries 4

    quietmax audit training mnist-5k --estimator head --canaries 500
    """
    from quietmax._io import check_figure
    from quietmax.audit.bounds import self_tested
    from quietmax.audit.training import TRAINING_CONFIDENCE, mislabelled
    from quietmax.data.load import load
    from quietmax.data.tables import is_table_path

    options.check()
    check_figure(plot)
    confidence = TRAINING_CONFIDENCE if options.confidence is None else options.confidence
    tested = options.self_test and options.noise_share == 1 and options.estimator != "network"
    if data == WORST_CASE:
        title = f"Audit of {options.estimator}, worst case"
        with progress_bar(f"training {options.estimator}", quiet=as_json) as progress:
            worst = partial(_audit_worst_case, options, confidence, progress)
            report = self_tested(worst) if tested else worst(options.noise_share)
        _print_report(title, report, plot, as_json)
        return
    if holdout is None and is_table_path(data):
        holdout = _CANARY_HOLDOUT
    split = load(
        data, records=records, holdout=holdout, seed=options.seed, data_dir=data_dir, download=download
    )
    count = options.canaries if options.method == "one-run" else 1
    outside = split.pool if split.holdout is None else split.test
    canaries = mislabelled(outside, count=count, seed=options.seed)
    subject = f"{options.estimator} on {split.name}"
    with progress_bar(f"training {options.estimator}", quiet=as_json) as progress:
        audit = partial(_audit_training, split, canaries, options, confidence, subject, progress)
        report = self_tested(audit) if tested else audit(options.noise_share)
    _print_report(f"Audit of {subject}, {options.method}", report, plot, as_json)


def _audit_worst_case(
    options: TrainingOptions, confidence: float, progress: Progress, noise_share: float
) -> AuditReport:
    """Audit on training sets that are made to be told apart."""
    from quietmax.audit.training import WORST_CASES, audit_worst_case

    _check_choice("--estimator", options.estimator, WORST_CASES)
    return audit_worst_case(
        options.estimator,  # type: ignore[arg-type]
        epsilon=options.epsilon,
        delta=options.delta,
        queries=options.queries,
        sampling_rate=options.sampling_rate,
        samples=options.times,
        noise_share=noise_share,
        confidence=confidence,
        seed=options.seed,
        progress=progress,
    )


def _audit_training(
    split: Split,
    canaries: TrainingRecords,
    options: TrainingOptions,
    confidence: float,
    subject: str,
    progress: Progress,
    noise_share: float,
) -> AuditReport:
    """Train one by one, or many networks at once where that is possible."""
    from quietmax.accounting.guarantee import Guarantee
    from quietmax.audit.distinguishing import distinguish
    from quietmax.audit.training import audit_training, fit_like, label_score, network_draws

    stated = Guarantee(
        "approximate", epsilon=options.epsilon, delta=options.delta, because="Stated on the command line."
    )
    repeated = options.method == "repeated"
    times = _TRAININGS if options.times is None else options.times
    if repeated and options.estimator == "dpsgd":
        return _audit_repeated_dpsgd(split, canaries, options, confidence, subject, progress, noise_share)
    if repeated and options.answers:
        return _audit_answers(split, canaries, options, confidence, subject, noise_share)
    if repeated and options.estimator == "network":
        without, inside = network_draws(
            split.train,
            canaries,
            settings=_settings(options.epochs, 0.0),
            seed=options.seed,
            progress=progress,
        )
        return distinguish(
            without,
            inside,
            stated,
            samples=times,
            confidence=confidence,
            subject=subject,
            details={"method": "repeated training", "records": len(split.train)},
            unit=canaries.unit,
        )
    fit = _fit(split, len(canaries), options)
    claimed: Guarantee | None = stated if options.estimator == "network" else None
    if noise_share != 1:
        reference = fit(split.train)
        fit, claimed = fit_like(reference, options.seed, noise_share), reference.guarantee_
    return audit_training(
        fit,
        label_score,
        split.train,
        canaries,
        claimed,
        method="repeated" if repeated else "one-run",
        times=times,
        confidence=confidence,
        delta=options.delta,
        seed=options.seed,
        subject=subject,
        progress=progress,
    )


def _fit(split: Split, queries: int, options: TrainingOptions) -> Fit[Any]:
    """Return a function that trains from another seed at every call."""
    from quietmax.estimators.dpsgd.estimator import DPSGD
    from quietmax.estimators.head.estimator import PrivateHead
    from quietmax.estimators.teachers import Teachers

    seeds = itertools.count(options.seed)
    units = int(split.train.units.max()) + 1

    def fit(records: TrainingRecords) -> Any:
        state = next(seeds) % 2**32
        if options.estimator == "network":
            return _ordinary_network(records, options.epochs, state)
        public: dict[str, Any] = {
            "classes": tuple(range(split.classes)),
            "declared_size": units,
            "random_state": state,
        }
        private: DPSGD | Teachers | PrivateHead = PrivateHead(options.epsilon, options.delta, **public)
        if options.estimator == "dpsgd":
            private = DPSGD(options.epsilon, options.delta, **public)
        elif options.estimator == "teachers":
            private = Teachers(options.epsilon, options.delta, queries=queries, **public)
        elif options.estimator == "head-query":
            private.set_params(release="query", queries=queries)
        return private.fit(records.features, records.labels, groups=records.persons)

    return fit


def _audit_answers(
    split: Split,
    canary: TrainingRecords,
    options: TrainingOptions,
    confidence: float,
    subject: str,
    noise_share: float,
) -> AuditReport:
    """Train without and with the canary from one seed, and draw the answers to queries beside it many times."""
    import numpy as np

    from quietmax.audit.distinguishing import distinguish
    from quietmax.audit.training import answer_draws, joined

    # Both from the same seed: the shards of teachers must not differ.
    without = _fit(split, options.queries, options)(split.train)
    inside = _fit(split, options.queries, options)(joined(split.train, canary))
    asked = [canary.features[place % len(canary)] * (1 - 0.001 * place) for place in range(options.queries)]
    first, second = answer_draws(without, inside, np.stack(asked), noise_share=noise_share, seed=options.seed)
    return distinguish(
        first,
        second,
        without.guarantee_,
        samples=_ANSWER_DRAWS if options.times is None else options.times,
        confidence=confidence,
        delta=options.delta,
        subject=subject,
        details={"method": "repeated answers", "records": len(split.train), "queries": options.queries},
        unit=canary.unit,
    )


def _ordinary_network(records: TrainingRecords, epochs: int, seed: int) -> Model:
    """Train one network without privacy."""
    import numpy as np

    from quietmax.models.stacked import train_stack
    from quietmax.models.training import Model

    settings = _settings(epochs, 0.0)
    rows = [np.arange(len(records))]
    stack = train_stack(
        records.features, records.labels, records.classes, rows, settings=settings, seeds=[seed]
    )
    return Model(stack, settings, len(records), "audit", seed)


def _audit_repeated_dpsgd(
    split: Split,
    canary: TrainingRecords,
    options: TrainingOptions,
    confidence: float,
    subject: str,
    progress: Progress,
    noise_share: float,
) -> AuditReport:
    """Train DP-SGD without centring many times, without and with the canary."""
    from quietmax.audit.distinguishing import distinguish
    from quietmax.audit.training import private_network_draws
    from quietmax.estimators.dpsgd.config import default_length, make_plan
    from quietmax.estimators.dpsgd.estimator import network_guarantee

    size, columns = int(split.train.units.max()) + 1, split.train.features.shape[1]
    planned = make_plan(
        size,
        epsilon=options.epsilon,
        delta=options.delta,
        length=default_length(columns),
    )
    without, inside = private_network_draws(
        split.train,
        canary,
        settings=planned.settings,
        noise_multiplier=noise_share * planned.noise_multiplier,
        size=size,
        seed=options.seed,
        progress=progress,
    )
    return distinguish(
        without,
        inside,
        network_guarantee(
            planned,
            exact=False,
            own_module=False,
            size_declared=True,
            classes_declared=True,
            unit=canary.unit,
        ),
        samples=_TRAININGS if options.times is None else options.times,
        confidence=confidence,
        delta=options.delta,
        subject=subject,
        details={"method": "repeated training", "records": len(split.train)},
        unit=canary.unit,
    )


@app.command("stability")
def stability(
    data: Data,
    records: Records = None,
    holdout: Holdout = None,
    removed: Annotated[int, typer.Option(min=2, help="Number of random records to retrain without.")] = 31,
    noise: Annotated[
        list[float] | None, typer.Option(help="Standard deviation of noise on every weight. Repeatable.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each noise.")] = 32,
    confidence: Annotated[float, typer.Option(help="Confidence of all intervals together.")] = 0.95,
    epochs: Epochs = 100,
    alpha: Alpha = 1.0,
    seed: Seed = 0,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Measure On-Average-Remove-One stability by retraining, and the effect of noise on the weights.

    Example: quietmax audit stability mnist-5k --records 300 --epochs 60
    """
    from quietmax.audit.stability import audit_stability
    from quietmax.data.load import load

    split = load(data, records=records, holdout=holdout, seed=seed, data_dir=data_dir, download=download)
    with progress_bar(f"training {removed + 1} networks", quiet=as_json) as progress:
        report = audit_stability(
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
        f"On-Average-Remove-One stability on {split.name}, {report.removed} of "
        f"{counted(report.records, 'record')} removed",
        ("", "measured", "interval", "compared with", "verdict"),
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
        caption="plain: the paper's bound. noise: its corollary that noise makes training more stable.",
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

    Example: quietmax audit invariant private --records 500
    """
    from quietmax.audit.invariant import audit_model_invariant
    from quietmax.estimators.serialization import open_private

    report = audit_model_invariant(open_private(model), records=records, seed=seed)
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
    from quietmax.models.losses import Convexified, CrossEntropy
    from quietmax.models.stacked import TrainingSettings

    return TrainingSettings(epochs=epochs, loss=CrossEntropy() if alpha == 0 else Convexified(alpha))


def _check_noise_share(noise_share: float) -> None:
    if not 0 < noise_share <= 1:
        raise InvalidInput(f"--noise-share must be above 0 and at most 1, got {noise_share}.")


def _check_choice(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InvalidInput(f"{option} must be one of {', '.join(allowed)}; got {given!r}.")


def _print_report(title: str, report: AuditReport, plot: Path | None, as_json: bool) -> None:
    """Print the report first, so that a plot that fails does not lose it."""
    from quietmax.audit.bounds import Finding, plot_findings

    if as_json:
        print_json(report.to_json())
    else:
        print_table(title, ("", ""), report.rows())
        console.print(_VERDICTS[report.verdict], style=_COLOURS[report.verdict])
        if report.self_test is not None:
            console.print(
                report.self_test.sentence(report.parameter, report.claimed),
                style=None if report.self_test.notices else "yellow",
            )
    if plot is not None:
        plot_findings([Finding.of_report(report)], plot, title=title)
