"""`quietmax audit`: test a claim by a lower bound on its epsilon or mu, or by a counterexample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax.cli._options import Json, Seed, SplitOptions, with_groups
from quietmax.cli._output import console, print_json, print_table, progress_bar
from quietmax.errors import InvalidInput, QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.accounting.guarantee import Guarantee
    from quietmax.audit.bounds import AuditReport
    from quietmax.audit.distinguishing import Draw
    from quietmax.data.records import Records, Split
    from quietmax.mechanisms.base import Mechanism
    from quietmax.models.stacked import Progress, TrainingSettings
    from quietmax.models.training import Model
    from quietmax.sensitivity.certified import ScoreBounds

app = typer.Typer(no_args_is_help=True)

Data = Annotated[str, typer.Argument(help="Data set, or .csv, .parquet or .npz file.")]
Epochs = Annotated[int, "Epochs of the network.", {"min": 0}]
Alpha = Annotated[float, "Constant of the convexified loss; 0 is cross-entropy."]
Plot = Annotated[Path | None, "Plot found beside claimed to this .png, .pdf or .svg file."]

WORST_CASE = "worst-case"
_TRAININGS, _ANSWER_DRAWS = 200, 100_000
_CANARY_HOLDOUT = 0.2
"""Share of the user's own table that canaries are taken from unless it is given."""
_NOISES = {
    "algorithm1": ("laplace", "gaussian"),
    "sampled-neuron": ("laplace", "gaussian"),
    "noisy-max": ("exponential", "permute-and-flip", "gaussian"),
    "gaussian": (),
}
"""The mechanisms of this library, and the noise that each can have."""
_COLOURS = {"refuted": "red", "consistent": "blue"}
"""Not green: an audit says nothing about how much the claim allows."""
_VERDICTS = {
    "refuted": "The claim is refuted: the event tells the inputs apart better than the claim permits.",
    "consistent": "No contradiction to the claim was found. This is evidence, not a proof.",
}


@dataclass(frozen=True)
class _ClaimOptions:
    """The claim that is audited, with how much noise, and how the report is shown."""

    epsilon: Annotated[float, "Claimed epsilon: of one answer, or of training and answers together."] = 1.0
    delta: Annotated[float, "Claimed delta; for Gaussian noise, mu is the largest within both."] = 1e-5
    noise_share: Annotated[float, "Draw this share of the noise and keep the claim, to test the auditor."] = (
        1.0
    )
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test/--no-self-test",
            help="If the claim is consistent, repeat the audit with half the noise: would it have noticed?",
        ),
    ] = True
    plot: Plot = None
    as_json: Json = False

    def check(self) -> None:
        """Raise if an option is not valid, before the work."""
        from quietmax._io import check_figure

        check_figure(self.plot)
        if not 0 < self.noise_share <= 1:
            raise InvalidInput(f"--noise-share must be above 0 and at most 1, got {self.noise_share}.")

    def run(self, title: str, audit: Callable[[float], AuditReport], *, draws_noise: bool = True) -> None:
        """Audit, and print the report before the plot, so that a plot that fails does not lose it."""
        from quietmax.audit.bounds import Finding, plot_findings, self_tested

        tested = self.self_test and self.noise_share == 1 and draws_noise
        report = self_tested(audit) if tested else audit(self.noise_share)
        if self.as_json:
            print_json(report.to_json())
        else:
            print_table(title, ("", ""), report.rows())
            console.print(_VERDICTS[report.verdict], style=_COLOURS[report.verdict])
            if report.self_test is not None:
                console.print(
                    report.self_test.sentence(report.parameter, report.claimed),
                    style=None if report.self_test.notices else "yellow",
                )
        if self.plot is not None:
            plot_findings([Finding.of_report(report)], self.plot, title=title)


@dataclass(frozen=True)
class _MechanismOptions(_ClaimOptions):
    """Which mechanism is audited, on which inputs."""

    mechanism: Annotated[str, "algorithm1, sampled-neuron, noisy-max, gaussian or the name of a plug-in."] = (
        "algorithm1"
    )
    classes: Annotated[int, "Number of classes.", {"min": 2}] = 10
    noise: Annotated[str, "laplace or gaussian; noisy-max also exponential or permute-and-flip."] = "laplace"
    sensitivity: Annotated[
        float, "How far one record moves one score; it moves all in L2 by sqrt(2) times as much."
    ] = 0.358
    samples: Annotated[int, "Answers to draw on each input.", {"min": 1000}] = 100_000
    exact: Annotated[bool, "Draw the exact noise of a real release; not repeatable."] = False
    seed: Annotated[int, "Seed of the noise and of the pairs that are searched."] = 0

    @property
    def bounds(self) -> ScoreBounds:
        """How far one record moves the scores."""
        from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

        one, vector = (
            Sensitivity(moved, "certified", "Stated on the command line.")
            for moved in (self.sensitivity, math.sqrt(2) * self.sensitivity)
        )
        return ScoreBounds(one, vector)

    def prepared(self, share: float) -> Mechanism:
        """Return the mechanism with its budget for one answer, and with a share of the noise that this requires."""
        from quietmax.accounting.costs import Budget, per_query
        from quietmax.audit.distinguishing import StatedScores
        from quietmax.audit.training import cost_with_share, mechanism_with_share
        from quietmax.mechanisms.base import plugin_mechanisms

        if self.mechanism in _NOISES:
            return mechanism_with_share(self._built_in(), share)
        plug_ins = plugin_mechanisms()
        _check_choice("--mechanism", self.mechanism, (*_NOISES, *plug_ins))
        own = plug_ins[self.mechanism]
        cost = per_query(Budget(self.epsilon, self.delta), own.measure, own.analysis)
        return own.prepared(StatedScores(self.classes, self.bounds), cost_with_share(cost, share))

    def _built_in(self) -> Mechanism:
        """Return a mechanism of this library with its budget for one answer."""
        from quietmax.accounting.costs import Budget, per_query
        from quietmax.mechanisms.algorithm1 import Algorithm1, budget_split
        from quietmax.mechanisms.base import GaussianScores, NoisyMax, SampledNeuron

        noise: Any = self.noise
        if (self.mechanism, noise) == ("noisy-max", "laplace"):
            noise = "exponential"
        if self.mechanism == "gaussian":
            noise = "gaussian"
        else:
            _check_choice("--noise", noise, _NOISES[self.mechanism])
        if self.mechanism == "algorithm1":
            part = budget_split(self.epsilon, self.classes, noise)
            moved = self.bounds.one.value
            return Algorithm1(noise, part, part, moved, min(math.expm1(2 * moved), 1.0))
        cost = per_query(Budget(self.epsilon, self.delta), "gaussian" if noise == "gaussian" else "pure")
        if self.mechanism == "gaussian":
            return GaussianScores(bounds=self.bounds, per_query=cost)
        kind = SampledNeuron if self.mechanism == "sampled-neuron" else NoisyMax
        return kind(noise, bounds=self.bounds, per_query=cost)


@app.command("mechanism")
@with_groups
def mechanism(*, options: _MechanismOptions) -> None:
    """Audit one answer of a mechanism: draw answers for two neighbouring score vectors and tell them apart.

    The claim of Algorithm 1 is the paper's: epsilon, or mu = epsilon with Gaussian noise; for two classes, the smaller
    cost that its noise has (THEORY 2.2).

    Example: quietmax audit mechanism --mechanism algorithm1 --epsilon 1
    """
    from quietmax.audit.distinguishing import audit_mechanism
    from quietmax.noise.sources import EXACT

    options.check()
    claimed = options.prepared(1.0).guarantee(options.classes)
    with progress_bar("searching for the worst neighbours", quiet=options.as_json) as progress:

        def audit(share: float) -> AuditReport:
            return audit_mechanism(
                options.prepared(share),
                options.classes,
                claimed=claimed,
                change=None if options.mechanism in _NOISES else options.bounds,
                samples=options.samples,
                delta=options.delta,
                noise=EXACT if options.exact else None,
                seed=options.seed,
                progress=progress,
            )

        options.run(f"Audit of {options.mechanism} with {options.classes} classes", audit)


@app.command("sensitivity")
@with_groups
def sensitivity(
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
    alpha: Alpha = 1.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Retrain without single records, or persons, and compare the changes with the paper's bounds.

    All networks have the same initial weights and the same batches. With a person column all rows of a person are left
    out together.

    Example: quietmax audit sensitivity mnist-5k --removals 3
    """
    from quietmax._io import check_figure
    from quietmax.audit.bounds import Finding, plot_findings
    from quietmax.sensitivity.network import empirical_sensitivity, published_sensitivity_for

    check_figure(plot)
    split = source.load(data, quiet=as_json)
    settings = _settings(epochs, alpha)
    with progress_bar(f"training {removals + 1} networks", quiet=as_json) as progress:
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
    if as_json:
        verdict = "refuted" if any(check.verdict == "refuted" for check in checks) else "consistent"
        bounds = [check.to_json() for check in checks]
        print_json({"dataset": split.name, "verdict": verdict, "bounds": bounds, **found.to_json()})
    else:
        print_table(
            title,
            ("removed", "one weight", "weights (L2)", "one logit"),
            (
                (each.kind, f"{each.weight:.4f}", f"{each.weights_l2:.4f}", f"{each.logit:.4f}")
                for each in found.removals
            ),
        )
        print_table(
            "Comparison with the paper's bounds",
            ("quantity", "empirical", "bound", "verdict"),
            (
                (each.quantity.replace("_", " "), f"{each.empirical:.4f}", f"{each.bound:.4f}", each.verdict)
                for each in checks
            ),
            caption="A change above the bound refutes it; a change below proves nothing.",
        )
    if plot is not None:
        plot_findings([Finding.of_check(check) for check in checks], plot, title=title)


@dataclass(frozen=True)
class _TrainingOptions(_ClaimOptions):
    """What is trained, and how it is audited."""

    estimator: Annotated[
        str,
        "teachers, head (released weights), head-query (answers per query), dpsgd, or network (an ordinary network "
        "without privacy).",
    ] = "head"
    method: Annotated[str, "one-run or repeated."] = "one-run"
    canaries: Annotated[
        int,
        "one-run: number of mislabelled records (persons with a person column), each added by a fair coin.",
        {"min": 2},
    ] = 500
    times: Annotated[
        int | None,
        "repeated, worst-case: trainings with, and as many without, one canary; for answers (teachers, head-query), "
        "draws of the answers of two models. Default: 200, for answers 100,000; worst-case: 6,000 (head), 10,000 "
        "(dpsgd) or 100,000.",
        {"min": 64},
    ] = None
    queries: Annotated[int, "repeated, worst-case: answers of teachers and head-query.", {"min": 1}] = 1
    sampling_rate: Annotated[float, "worst-case, dpsgd: Poisson sampling rate; 1 for full batches."] = 1.0
    epochs: Annotated[int, "network: epochs.", {"min": 0}] = 20
    confidence: Annotated[float, "Confidence of the lower bound."] = 0.99

    def check(self) -> None:
        """Raise if options are unknown or contradict each other."""
        super().check()
        _check_choice("--estimator", self.estimator, ("teachers", "head", "head-query", "dpsgd", "network"))
        _check_choice("--method", self.method, ("one-run", "repeated"))
        if self.noise_share != 1 and self.estimator == "network":
            raise InvalidInput(
                "--noise-share cannot be combined with --estimator network, which draws no noise."
            )


@app.command("training")
@with_groups
def training(
    *,
    data: Annotated[str, typer.Argument(help="Data set, .csv, .parquet or .npz file, or worst-case.")],
    options: _TrainingOptions,
    source: SplitOptions,
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
    from quietmax.audit.training import mislabelled
    from quietmax.data.sources import is_table_path

    options.check()
    run = partial(options.run, draws_noise=options.estimator != "network")
    describe = f"training {options.estimator}"
    if data == WORST_CASE:
        with progress_bar(describe, quiet=options.as_json) as progress:
            worst = partial(_audit_worst_case, options, source.seed, progress)
            run(f"Audit of {options.estimator}, worst case", worst)
        return
    if source.holdout is None and is_table_path(data):
        source = replace(source, holdout=_CANARY_HOLDOUT)
    split = source.load(data, quiet=options.as_json)
    outside = split.pool if split.holdout is None else split.test
    count = options.canaries if options.method == "one-run" else 1
    canaries = mislabelled(outside, count=count, seed=source.seed)
    with progress_bar(describe, quiet=options.as_json) as progress:
        audit = _TrainingAudit(options, split, canaries, source.seed, progress)
        run(f"Audit of {audit.subject}, {options.method}", audit.run)


def _audit_worst_case(
    options: _TrainingOptions, seed: int, progress: Progress, noise_share: float
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
        confidence=options.confidence,
        seed=seed,
        progress=progress,
    )


@dataclass(frozen=True)
class _TrainingAudit:
    """An audit of an estimator on records, by canaries."""

    options: _TrainingOptions
    split: Split
    canaries: Records
    seed: int
    progress: Progress

    @property
    def subject(self) -> str:
        """What is audited, for the report."""
        return f"{self.options.estimator} on {self.split.name}"

    def run(self, noise_share: float) -> AuditReport:
        """Audit with a share of the noise: many draws at once where that is possible, else training by training."""
        from quietmax.accounting.guarantee import Guarantee
        from quietmax.audit.training import audit_training, fit_like, label_score

        options, train = self.options, self.split.train
        repeated = options.method == "repeated"
        if repeated and options.estimator not in ("head", "network"):
            return self._distinguish(noise_share)
        fit = self._fit(len(self.canaries))
        claimed = None
        if options.estimator == "network":
            because = "Stated on the command line."
            claimed = Guarantee("approximate", epsilon=options.epsilon, delta=options.delta, because=because)
        if noise_share != 1:
            reference = fit(train)
            fit, claimed = fit_like(reference, self.seed, noise_share), reference.guarantee_
        return audit_training(
            fit,
            label_score,
            train,
            self.canaries,
            claimed,
            method="repeated" if repeated else "one-run",
            times=options.times or _TRAININGS,
            confidence=options.confidence,
            delta=options.delta,
            seed=self.seed,
            subject=self.subject,
            progress=self.progress,
        )

    def _distinguish(self, noise_share: float) -> AuditReport:
        """Draw many releases without and with the canary."""
        from quietmax.audit.distinguishing import distinguish

        options, answers = self.options, self.options.estimator in ("teachers", "head-query")
        details: dict[str, Any] = {"method": "repeated training", "records": len(self.split.train)}
        if answers:
            details |= {"method": "repeated answers", "queries": options.queries}
        draws = self._answer_draws if answers else self._dpsgd_draws
        first, second, claimed = draws(noise_share)
        return distinguish(
            first,
            second,
            claimed,
            samples=options.times or (_ANSWER_DRAWS if answers else _TRAININGS),
            confidence=options.confidence,
            delta=options.delta,
            subject=self.subject,
            details=details,
            unit=self.canaries.unit,
        )

    def _dpsgd_draws(self, noise_share: float) -> tuple[Draw, Draw, Guarantee]:
        """Margins of networks trained by DP-SGD without centring."""
        from quietmax.audit.training import private_network_draws
        from quietmax.estimators.dpsgd.estimator import network_guarantee
        from quietmax.estimators.dpsgd.training import default_length, make_plan

        train = self.split.train
        size, length = int(train.units.max()) + 1, default_length(train.features.shape[1])
        plan = make_plan(size, epsilon=self.options.epsilon, delta=self.options.delta, length=length)
        claimed = network_guarantee(
            plan,
            exact=False,
            own_module=False,
            size_declared=True,
            classes_declared=True,
            unit=self.canaries.unit,
        )
        drawn = private_network_draws(
            train,
            self.canaries,
            settings=plan.settings,
            noise_multiplier=noise_share * plan.noise_multiplier,
            size=size,
            seed=self.seed,
            progress=self.progress,
        )
        return *drawn, claimed

    def _answer_draws(self, noise_share: float) -> tuple[Draw, Draw, Guarantee]:
        """Answers to queries beside the canary, from a model trained without it and one trained with it."""
        import numpy as np

        from quietmax.audit.training import answer_draws, joined

        train, canary, count = self.split.train, self.canaries, self.options.queries
        # Both from the same seed: the shards of teachers must not differ.
        without, inside = self._fit(count)(train), self._fit(count)(joined(train, canary))
        asked = [canary.features[place % len(canary)] * (1 - 0.001 * place) for place in range(count)]
        drawn = answer_draws(without, inside, np.stack(asked), noise_share=noise_share, seed=self.seed)
        return *drawn, without.guarantee_

    def _fit(self, queries: int) -> Callable[[Records], Any]:
        """Return a function that trains from another seed at every call."""
        from quietmax.estimators.dpsgd.estimator import DPSGD
        from quietmax.estimators.head.estimator import PrivateHead
        from quietmax.estimators.teachers import Teachers

        options, seeds = self.options, itertools.count(self.seed)
        public = {
            "classes": tuple(range(self.split.classes)),
            "declared_size": int(self.split.train.units.max()) + 1,
        }
        kinds: dict[str, Callable[..., Any]] = {
            "head": PrivateHead,
            "head-query": partial(PrivateHead, release="query", queries=queries),
            "teachers": partial(Teachers, queries=queries),
            "dpsgd": DPSGD,
        }

        def fit(records: Records) -> Any:
            state = next(seeds) % 2**32
            if options.estimator == "network":
                return _ordinary_network(records, options.epochs, state)
            private = kinds[options.estimator](options.epsilon, options.delta, **public, random_state=state)
            return private.fit(records.features, records.labels, groups=records.persons)

        return fit


def _ordinary_network(records: Records, epochs: int, seed: int) -> Model:
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


@app.command("stability")
@with_groups
def stability(
    *,
    data: Data,
    source: SplitOptions,
    removed: Annotated[int, "Number of random records to retrain without.", {"min": 2}] = 31,
    noise: Annotated[list[float] | None, "Standard deviation of noise on every weight. Repeatable."] = None,
    draws: Annotated[int, "Draws of each noise.", {"min": 1}] = 32,
    epochs: Epochs = 100,
    alpha: Alpha = 1.0,
    as_json: Json = False,
) -> None:
    """Measure On-Average-Remove-One stability by retraining, and the effect of noise on the weights.

    Example: quietmax audit stability mnist-5k --records 300 --epochs 60
    """
    from quietmax.audit.stability import audit_stability

    split = source.load(data, quiet=as_json)
    with progress_bar(f"training {removed + 1} networks", quiet=as_json) as progress:
        report = audit_stability(
            split.train,
            removed=removed,
            settings=_settings(epochs, alpha),
            noise=noise or (),
            draws=draws,
            seed=source.seed,
            progress=progress,
        )
    if as_json:
        print_json({"dataset": split.name, **report.to_json()})
        return
    rows = [("plain", report.plain, f"bound {report.bound.value:.4f}", report.verdict)]
    rows += [
        (
            f"noise {each.noise:g}",
            each.both_noisy,
            f"change {each.change.low:+.4f} to {each.change.high:+.4f}",
            each.verdict,
        )
        for each in report.noisy
    ]
    print_table(
        f"On-Average-Remove-One stability on {split.name}, {report.removed} of "
        f"{counted(report.records, 'record')} removed",
        ("", "measured", "interval", "compared with", "verdict"),
        (
            (name, f"{found.value:.4f}", f"{found.low:.4f} to {found.high:.4f}", compared, verdict)
            for name, found, compared, verdict in rows
        ),
        caption="plain: the paper's bound. noise: its corollary that noise makes training more stable.",
    )


@app.command("invariant")
@with_groups
def invariant(
    *,
    model: Annotated[Path, typer.Argument(help="Folder of a private model, written by 'quietmax train'.")],
    records: Annotated[int, "Number of synthetic records.", {"min": 3}] = 200,
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
    from quietmax.models.stacked import Convexified, CrossEntropy, TrainingSettings

    return TrainingSettings(epochs=epochs, loss=CrossEntropy() if alpha == 0 else Convexified(alpha))


def _check_choice(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InvalidInput(f"{option} must be one of {', '.join(allowed)}; got {given!r}.")
