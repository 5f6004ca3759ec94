"""The privacy card of a model: one page in plain words, for people who decide whether a model may be used.

It says what an adversary can learn at most, for whom, under which assumptions, how good the model is, and what attacks
saw. It is made from the model folder and from the attack results that `quietmax attack` writes beside the folder.
Attack results are computed from private records and have no guarantee, so they are not kept in a folder that may be
published, and a card that shows them says on top that it is not for publication.

`nist_checklist` answers the factors of NIST SP 800-226 (March 2025) from the card. It was written from the public
document; NIST has not reviewed it. `edpb_checklist` does so for EDPB Opinion 28/2024 (December 2024); the EDPB has not
reviewed it either. What the software cannot know is marked, for people to fill in.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, cast

from quietmax._io import write_text
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Holdout
from quietmax.errors import DataUnavailable, InvalidInput, counted, short_message
from quietmax.estimators.evaluation import composed_guarantee, read_evaluations
from quietmax.estimators.figures import Bin, Evaluation, decision_in_words
from quietmax.estimators.head.effects import Effects, curve_svg
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.estimators.series import Version
from quietmax.estimators.training_set import size_condition
from quietmax.models.serialization import read_description
from quietmax.spending import ACCOUNT_FILE, MOVED_FILE, FileAccount

OBSERVED = (
    "Not for publication: computed from the private training records without noise. The guarantee covers the model's "
    "answers, but not these numbers."
)
_PLAIN = (
    "No guarantee: this is an ordinary model. Its answers and its files may reveal who was in the training data. Keep "
    "both private, or answer through a mechanism."
)
_ADDS_UP = "Other models or figures of the same people add to this; the ledger of the service adds them up."
_MOVED = (
    "The model was served: a ledger charges its answers, and its budget may allow more of them. 'quietmax ledger "
    "status' and the page of the service state that budget."
)
_BANNER = "Not for publication: this card shows results of attacks. `quietmax card --public` leaves them out."
_NOT_PUBLIC = (
    "the report of the training, exact figures, the output of 'quietmax schema check', results of attacks"
)
_COLOURS = {
    "strong": "#1a7f37",
    "moderate": "#1a7f37",
    "weak": "#bc4c00",
    "none": "#cf222e",
    "proven": "#57606a",
    "conditional": "#9a6700",
    "refuted": "#cf222e",
}
"""The colour of each status and grade of a guarantee: green only what is proven and not weak."""
_MOST_CLASSES = 10
"""Recalls that the card shows; of more classes it shows the lowest."""
_MOST_CURVES = 3
_EFFECTS = (
    "What a value adds to the score of a class, compared with the average person, for the columns that matter most. "
    "The bands are two standard deviations of noise, the bars shares of people."
)
_SERIES = (
    "Each version was trained on the people of one cohort, starting from the version before. All versions together "
    "cost a person what the trainings on their own cohort cost; the guarantee above is for the most expensive cohort."
)
_SERIES_HEAD = ("version", "cohort", "mu of this training", "published accuracy")
_MOST_CELLS = 16
"""Cells of the confusion matrix that the card shows; a larger one is left to the JSON."""
BLANK = "[to be filled in]"
"""Stands in a form wherever the software cannot know the answer."""
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PrivacyCard:
    """What a reviewer needs to know about one model; `read_card` makes it."""

    model: str  # The model folder
    kind: str  # The kind of model
    dataset: str  # What it was trained on
    declared_size: int | None  # The number of training records or persons that the folder states
    guarantee: Guarantee | None  # What is guaranteed of the model; None for an ordinary model
    delta: float | None  # delta of the budget
    epsilon_at_delta: float | None  # epsilon of the guarantee of the model and its evaluations, at this delta
    queries: int | None  # Number of answers that the budget pays for; None if answers are not charged
    answered: int | None  # Answers charged so far; None if answers are not charged
    leakage: tuple[dict[str, Any], ...]  # Results of attacks
    holdout: Holdout | None = None  # How people were held out of training; None if nobody was
    # Those of held-out people first, of these that with the least noise
    evaluations: tuple[Evaluation, ...] = ()
    released: Guarantee | None = None  # Of the model and its evaluations together, if it has any
    person_column: str | None = None  # The column of the table whose value tells whose row a row is
    decision: str | None = None  # How the model answers now
    public: bool = False  # Whether the card leaves out what is not for publication
    # Whether the budget moved into a ledger, because the model was served. Then the folder does not know how many
    # answers may be given, and the guarantee is for `queries` of them.
    moved: bool = False
    effects: Effects | None = None  # What each column does to the scores; None if they are no such sum
    series: tuple[Version, ...] = ()  # All versions of a series up to this one

    @property
    def status(self) -> str:
        """``proven``, ``conditional``, ``refuted``, or ``none`` for an ordinary model."""
        return "none" if self._total is None else self._total.status

    @property
    def strength(self) -> str:
        """``strong``, ``moderate``, ``weak`` or ``none``: what the guarantee is worth, see `Guarantee.strength`."""
        return "none" if self._total is None else self._total.strength

    @property
    def title(self) -> str:
        """The heading of the card."""
        return f"Privacy card: {self._summary}"

    @property
    def evaluation(self) -> Evaluation | None:
        """The best evaluation; None if there is none."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def publishable(self) -> bool:
        """Whether everything on the card may be published."""
        return self.public or not self.leakage

    def for_publication(self) -> PrivacyCard:
        """Return the card without the results of attacks, which are not for publication."""
        return replace(self, leakage=(), public=True)

    def rows(self) -> list[tuple[str, str]]:
        """Return the card as a list of (name, value), the most important first."""
        return [
            *([] if self.publishable else [("not for publication", _BANNER)]),
            ("model", self.model),
            *self._described_rows(),
            ("status", self._summary),
            *(("in plain words", sentence) for sentence in self.in_words()),
            *self._guarantee_rows(),
            *(("series", f"version {each.version} on cohort {said}") for each, said in self._versions()),
            *self._evaluation_rows(),
            *self._count_rows(),
            *self._leakage_rows(),
            *((f"parameter {name}", value) for name, value in self._parameters()),
        ]

    def in_words(self) -> list[str]:
        """Return what the guarantee of the model and its evaluations means, as plain sentences."""
        if self._total is None:
            return [_PLAIN]
        if self.moved:
            return [*self._total.in_words(f"{counted(self.queries or 0, 'answer')} of this model"), _MOVED]
        released = "everything released by this model and its evaluations"
        if len(self.series) > 1:
            released = (
                "everything released by this model, the earlier versions of its series and its evaluations"
            )
        return [*self._total.in_words(released), _ADDS_UP]

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON values: every field, and what follows from the fields."""
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "evaluations"
        }
        values |= {
            "status": self.status,
            "strength": self.strength,
            "in_words": self.in_words(),
            "evaluation": self.evaluation,
            "further_evaluations": [each.to_json() for each in self.evaluations[1:]],
            "protects": None if self.guarantee is None else self._protects,
            "publishable": self.publishable,
            "leakage": list(self.leakage),
            "series": [each.to_json() for each in self.series],
            "effects": None if self.effects is None else self.effects.to_json()["importance"],
            "leakage_caveat": OBSERVED if self.leakage else None,
        }
        return {
            name: part.to_json() if isinstance(part, Guarantee | Holdout | Evaluation) else part
            for name, part in values.items()
        }

    def to_html(self) -> str:
        """Return the card as one self-contained HTML page, which prints on one sheet of A4."""
        return _PAGE.substitute(
            model=escape(self.model),
            status=escape(self.status),
            colour=_COLOURS[self.status],
            strength="" if self._total is None else escape(self._total.protection),
            strength_colour=_COLOURS["none" if self._total is None else self._total.grade],
            banner="" if self.publishable else f'<p class="banner">{escape(_BANNER)}</p>',
            described=escape("; ".join(f"{name}: {value}" for name, value in self._described_rows())),
            words=_paragraphs(self.in_words()),
            guarantee=_table(self._guarantee_rows()),
            evaluation=_table(self._evaluation_rows()),
            counts=self._counts_html(),
            attacks="" if self.public else f"<h2>What attacks saw</h2>\n{_table(self._leakage_rows())}",
            parameters=_table(self._parameters()),
            calibration="" if self.evaluation is None else _calibration_html(self.evaluation),
            effects=self._series_html() + self._effects_html(),
        )

    def _effects_html(self) -> str:
        """Return figures of the columns that matter most, and the importances of all."""
        if self.effects is None:
            return ""
        most = [curve_svg(self.effects, name) for name in [*self.effects.curves][:_MOST_CURVES]]
        rows = [
            (name, [f"{size:.3f}", "unknown" if math.isnan(noise) else f"{noise:.3f}"])
            for name, size, noise in self.effects.importance.itertuples(index=False)
        ]
        head = ["column", "importance (mean absolute effect)", "noise"]
        return (
            f'<section class="looks">\n<h2>What it looks at</h2>\n<p>{escape(_EFFECTS)}</p>\n'
            f'<div class="effects">{"".join(most)}</div>\n'
            f"<details>\n<summary>All columns by importance</summary>\n{_grid('', head, rows)}\n</details>\n</section>"
        )

    def _versions(self) -> list[tuple[Version, str]]:
        """Return each version of a series with its cohort, what it cost and its published accuracy, as text."""
        return [
            (each, f"{each.cohort}: mu {each.mu:.4g}, accuracy {each.accuracy or 'none stated'}")
            for each in self.series
        ]

    def _series_html(self) -> str:
        """Return the versions of a series over time, as a figure of the accuracies and a table."""
        if not self.series:
            return ""
        rows = [
            (f"{each.version}", [each.cohort, f"{each.mu:.4g}", str(each.accuracy or "none stated")])
            for each in self.series
        ]
        return (
            f"<section>\n<h2>The series</h2>\n<p>{escape(_SERIES)}</p>\n{_accuracy_svg(self.series)}"
            f"<details><summary>All versions</summary>{_grid('', _SERIES_HEAD, rows)}</details>\n</section>"
        )

    @property
    def _total(self) -> Guarantee | None:
        """What is guaranteed of the model and its evaluations together."""
        return self.guarantee if self.released is None else self.released

    @property
    def _summary(self) -> str:
        """Status and strength in one line."""
        return "none" if self._total is None else self._total.summary

    @property
    def _many(self) -> str:
        """What the guarantee protects, as a plural."""
        return "people" if self.guarantee is not None and self.guarantee.unit == "person" else "records"

    def _parameters(self) -> list[tuple[str, str]]:
        """Return the parameters of the training."""
        parameters = {} if self.guarantee is None else self.guarantee.parameters
        return [(name, f"{value}") for name, value in parameters.items() if name != "series"]

    def _described_rows(self) -> list[tuple[str, str]]:
        """Return what the model is and what it was trained on."""
        size = [] if self.declared_size is None else [(self._size_name, f"{self.declared_size:,}")]
        return [("kind", self.kind), ("trained on", self.dataset), *size]

    def _guarantee_rows(self) -> list[tuple[str, str]]:
        """Return what is guaranteed, for whom, for how many answers, and what it assumes."""
        guarantee = self._total
        if guarantee is None:
            return [("answers", self._answers)]
        epsilon = self.epsilon_at_delta
        finite = self.delta is not None and epsilon is not None and epsilon < math.inf
        return [
            ("answers", self._answers),
            ("guarantee", str(guarantee)),
            *([("in (epsilon, delta)", f"({epsilon:.4g}, {self.delta:g})")] if finite else []),
            ("protects", self._protects),
            *(("assumes", assumption) for assumption in guarantee.assumptions or ("nothing further",)),
            ("may be published", self._may_be_published),
            ("not for publication", _NOT_PUBLIC),
        ]

    @property
    def _may_be_published(self) -> str:
        """What the guarantee allows to publish."""
        if self.status == "refuted":
            return "nothing: the claimed guarantee does not hold"
        if self.queries is not None:
            return "the answers that were charged; not the model folder, which holds weights without noise"
        known = "" if self.evaluation is None else ", the figures of the evaluations"
        return f"the model folder with its weights, any number of answers{known}"

    @property
    def _answers(self) -> str:
        """How many answers the budget pays for."""
        if self.guarantee is None:
            return "no budget"
        if self.queries is None:
            return "paid at training, any number of answers"
        if self.moved:
            return f"charged by a ledger since the model was served; the guarantee is for {self.queries:,}"
        return f"{self.answered or 0:,} of {counted(self.queries, 'answer')} charged so far"

    @property
    def _protects(self) -> str:
        """Whom the guarantee protects."""
        if self._many == "records":
            one = "one record; a person with several records is protected less"
        elif self.person_column is None:
            one = "one person, with all rows of this person"
        else:
            one = f"one person: all rows with the same value in column {self.person_column!r}"
        if self.holdout is None:
            return one
        return (
            f"{one}. {self.holdout.share:.0%} of the {self._many} in the table were held out of training, chosen by a "
            "keyed hash. Nobody is in both parts, and both parts are protected."
        )

    @property
    def _size_name(self) -> str:
        """Where the number of records or people comes from: declared, released with noise, or counted."""
        claimed = self.guarantee
        if claimed is None or size_condition(claimed.unit).assumptions[0] in claimed.assumptions:
            return f"true number of {self._many}, assumed to be public"
        noisy = claimed.parameters.get("size_from") == "noisy count"
        return f"{'noisy' if noisy else 'declared'} number of {self._many}"

    def _evaluation_rows(self) -> list[tuple[str, str]]:
        """Return how good the model is."""
        if self.evaluation is None:
            known = "; run 'quietmax evaluate'"
            if self.guarantee is None:
                known = ""
            elif self.queries is not None:
                known = "; a model that is paid per answer cannot be"
            return [("accuracy", f"not evaluated{known}")]
        answer = self.evaluation.decision
        if self.decision not in (None, answer):
            answer = f"evaluated: {answer}; now: {self.decision}"
        recalls = list(self.evaluation.recall.items())
        which = "recall by class"
        if len(recalls) > _MOST_CLASSES:
            recalls.sort(key=lambda recall: math.inf if recall[1].value is None else recall[1].value)
            which = f"lowest recalls of {len(recalls)} classes"
        return [
            ("accuracy", str(self.evaluation.accuracy)),
            *((name, str(value)) for name, value in self.evaluation.curves.items()),
            (which, "; ".join(f"{name}: {estimate}" for name, estimate in recalls[:_MOST_CLASSES])),
            ("answer", answer),
            (
                "evaluated on",
                f"{self._evaluated(self.evaluation)}. The figures have noise and may be published. In brackets: 95% "
                "intervals for sampling and noise.",
            ),
            *(
                ("further evaluation", f"accuracy {each.accuracy} on {self._evaluated(each)}")
                for each in self.evaluations[1:]
            ),
        ]

    def _evaluated(self, evaluation: Evaluation) -> str:
        """Return on whom an evaluation was made."""
        size = f"{evaluation.size.value:,.0f}"
        if evaluation.composition == "parallel":
            return f"about {size} held-out {self._many}"
        return f"about {size} {self._many}, who may be in the training set"

    def _count_rows(self) -> list[tuple[str, str]]:
        """Return the confusion matrix, the calibration and what must be known of them, as text."""
        if self.evaluation is None:
            return []
        rows = []
        for name, counts in _matrix(self.evaluation):
            cells = (f"{each}: {count}" for each, count in zip(self.evaluation.classes, counts, strict=True))
            rows.append((f"true {name}, predicted", "; ".join(cells)))
        calibrated = self.evaluation.calibrated
        rows += [(f"{calibrated} {name}", share) for name, (share,) in _calibration(self.evaluation.bins)]
        for caption, (_, *heads), lines in detail_tables(self.evaluation)[
            self.evaluation.edges is not None :
        ]:
            for name, values in lines:
                cells = (f"{head}: {value}" for head, value in zip(heads, values, strict=True))
                rows.append((f"{caption}, {name}", "; ".join(cells)))
        return rows + [("about the counts", sentence) for sentence in _remarks(self.evaluation)]

    def _counts_html(self) -> str:
        """Return the same as HTML tables."""
        if self.evaluation is None:
            return ""
        tables = ""
        if matrix := _matrix(self.evaluation):
            head = ["true class", *(f"predicted {name}" for name in self.evaluation.classes)]
            tables = _grid(f"Number of {self._many}", head, matrix)
        tables += _grid("Calibration", _axes(self.evaluation), _calibration(self.evaluation.wide_bins))
        folded = "".join(
            f"<details><summary>{escape(caption)}</summary>{_grid('', heads, lines)}</details>"
            for caption, heads, lines in detail_tables(self.evaluation)
        )
        drawn = " drawn" if _calibration_html(self.evaluation) else ""  # then the table is not printed
        return f'<div class="counts{drawn}">{tables}</div>{folded}{_paragraphs(_remarks(self.evaluation))}'

    def _leakage_rows(self) -> list[tuple[str, str]]:
        """Return what attacks observed."""
        if self.public:
            return []
        if not self.leakage:
            return [("observed leakage", "not measured; run 'quietmax attack'")]
        rows = []
        for report in self.leakage:
            seen, area = report["leakage"], report["auc"]
            value = f"{seen['value']:.4f} [{seen['low']:.4f}, {seen['high']:.4f}], AUC {area['value']:.4f}"
            answers = f"answers by {report['released_by']}"
            rows.append((f"observed leakage, {report['attack']}", f"{value}; {answers}"))
        return [*rows, ("observed leakage", OBSERVED)]


def _matrix(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """Return the noisy counts of each true class; nothing if the matrix is too large for the card."""
    if len(evaluation.classes) ** 2 > _MOST_CELLS:
        return []
    margin = math.ceil(evaluation.margin)
    return [
        (name, [f"{round(count) + 0:,} \u00b1{margin:,}" for count in counts])  # + 0: no negative zero
        for name, counts in zip(evaluation.classes, evaluation.confusion, strict=True)
    ]


def _calibration(bins: Sequence[Bin]) -> list[tuple[str, list[str]]]:
    """Return the share in each range of probabilities."""
    return [(f"{each.low:.2f} to {each.high:.2f}", [str(each.share)]) for each in bins]


def _axes(evaluation: Evaluation) -> tuple[str, str]:
    """Return what the bins of the calibration are of, and what is counted in them."""
    if evaluation.edges is None:
        return "probability of the answer", "share of right answers"
    return f"probability of {evaluation.classes[1]}", f"share of {evaluation.classes[1]}"


def _calibration_html(evaluation: Evaluation) -> str:
    """Return a figure of the share in each bin of probabilities, with its interval; nothing if all are unknown."""
    known = [each for each in evaluation.bins if each.share.value is not None]
    if not known:
        return ""

    def _line(left: float, low: float, right: float, high: float, style: str) -> str:
        (x1, y1), (x2, y2) = ((40 + 260 * x, 170 - 160 * y) for x, y in ((left, low), (right, high)))
        return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke={style}/>'

    parts = [_line(0, 0, 1, 1, '"currentColor" stroke-dasharray="4 4" opacity=".6"')]
    for number in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(_line(0, number, 1, number, '"currentColor" opacity=".25"'))
        parts.append(f'<text x="34" y="{174 - 160 * number:g}" text-anchor="end">{number:g}</text>')
        parts.append(f'<text x="{40 + 260 * number:g}" y="186" text-anchor="middle">{number:g}</text>')
    for each in known:
        value, middle = cast(float, each.share.value), (each.low + each.high) / 2
        interval = middle, each.share.low, middle, each.share.high
        parts.append(_line(*interval, '"#0969da" stroke-width="4" opacity=".4"'))
        parts.append(_line(each.low, value, each.high, value, '"#0969da" stroke-width="2.5"'))
    across, up = _axes(evaluation)
    described = escape(f"{up} by {across}, with intervals; the dashed line is what is exactly right")
    return (
        "<section>\n<h2>How its probabilities fit</h2>\n<p>Dashed: an exact fit.</p>\n"
        f'<svg class="calibration" viewBox="0 0 320 210" role="img" aria-label="{described}" fill="currentColor" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}'
        f'<text x="170" y="204" text-anchor="middle">{escape(across)}</text></svg>\n</section>'
    )


def detail_tables(evaluation: Evaluation) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """Return the tables that fold away: narrow bins, the thresholds that the owner named, and the groups."""
    found = []
    if evaluation.edges is not None:
        found.append(("Calibration in all bins", [*_axes(evaluation)], _calibration(evaluation.bins)))
    if evaluation.named_points:
        lines = [
            (f"{each.threshold:g}", [str(each.recall), str(each.false_alarms), str(each.precision)])
            for each in evaluation.named_points
        ]
        heads = ["threshold", "recall", "false alarms", "precision"]
        found.append((f"{evaluation.classes[1]} if its probability is above the threshold", heads, lines))
    if evaluation.by_group is not None:
        recalls = [f"recall of {name}" for name in evaluation.classes]
        heads = [evaluation.by_group.column, "number", "accuracy", *recalls, evaluation.excess]
        lines = [
            (
                each.name,
                [each.size.in_people(), *map(str, (each.accuracy, *each.recall.values(), each.excess))],
            )
            for each in evaluation.groups
        ]
        found.append((f"By {evaluation.by_group.column}", heads, lines))
    return found


def _remarks(evaluation: Evaluation) -> list[str]:
    """Return what a reader of the counts must know."""
    large = "The confusion matrix is large: `quietmax card --json` shows it, with an interval for each cell."
    return ([] if _matrix(evaluation) else [large]) + evaluation.remarks()


def _paragraphs(sentences: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows as an HTML table; equal names that follow each other are written once."""
    lines, previous = [], ""
    for name, value in rows:
        lines.append(f"<tr><th>{'' if name == previous else escape(name)}</th><td>{escape(value)}</td></tr>")
        previous = name
    return '<table class="rows">\n' + "\n".join(lines) + "\n</table>"


def _grid(caption: str, head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return an HTML table with a caption, a row of headings and a heading in each row."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for name, values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<table class="grid"><caption>{escape(caption)}</caption>\n' + "\n".join(lines) + "\n</table>"


def _accuracy_svg(series: Sequence[Version]) -> str:
    """Return the published accuracies of the versions over time, with their intervals, as an SVG figure."""
    shown = [(each, each.accuracy) for each in series if each.accuracy is not None]
    if not shown:
        return ""
    low, high = min(each.low for _, each in shown), max(each.high for _, each in shown)
    scale, width = 90.0 / max(high - low, 1e-3), 250.0 / max(len(series) - 1, 1)

    def _place(value: float) -> float:
        return 105.0 - scale * (value - low)

    parts = [
        f'<text x="48" y="{_place(value) + 4:.0f}" text-anchor="end">{value:.2f}</text>'
        for value in (low, high)
    ]
    for version, accuracy in shown:
        x = 60.0 + width * (version.version - 1)
        line = f"M{x:.1f} {_place(accuracy.low):.1f}V{_place(accuracy.high):.1f}"
        parts.append(f'<path d="{line}" stroke="#0969da" stroke-width="2" opacity=".5"/>')
        if accuracy.value is not None:
            parts.append(f'<circle cx="{x:.1f}" cy="{_place(accuracy.value):.1f}" r="3" fill="#0969da"/>')
    for version, anchor in ((series[0], "start"), (series[-1], "end")):
        x = 60.0 + width * (version.version - 1)
        parts.append(f'<text x="{x:.1f}" y="124" text-anchor="{anchor}">{escape(version.cohort)}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 320 130" width="320" height="130" role="img" '
        'aria-label="Published accuracy of each version, with its interval" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="currentColor">{"".join(parts[: None if len(series) > 1 else -1])}</svg>'
    )


def leakage_file(folder: str | Path) -> Path:
    """Return the file with the attack results of a model: beside its folder, so that they are not published with it.

    The name contains a digest of the weights, so that another model in the same folder has other results.
    """
    try:
        digest = hashlib.sha256((Path(folder) / "weights.safetensors").read_bytes()).hexdigest()
    except OSError as problem:
        raise DataUnavailable(f"The weights in {folder} cannot be read ({problem.strerror}).") from problem
    return Path(folder).resolve().parent / f"leakage-{digest[:16]}.json"


def record_leakage(folder: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Store attack results beside the model's folder, for its card."""
    path = leakage_file(folder)
    kept = {(entry["attack"], entry["released_by"]): entry for entry in _recorded(path)}
    for report in reports:
        entry = {name: report[name] for name in ("attack", "released_by", "leakage", "auc")}
        kept[entry["attack"], entry["released_by"]] = entry
    text = json.dumps({"caveat": OBSERVED, "attacks": list(kept.values())}, indent=2) + "\n"
    write_text(text, path, "The attack results", private=True)


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Return the stored attack results; none if there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["attacks"] if path.exists() else []
        if not isinstance(found, list) or not all(_is_report(entry) for entry in found):
            raise ValueError("not attack results")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as problem:
        raise DataUnavailable(
            f"The attack results in {path} cannot be read. Delete the file and run the attack again."
        ) from problem
    return found


def _is_report(entry: Any) -> bool:
    """Return whether an entry is one that `record_leakage` writes."""
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("attack", "released_by"))
        and all(
            isinstance(entry.get(name), dict)
            and all(type(entry[name].get(part)) in (int, float) for part in ("value", "low", "high"))
            for name in ("leakage", "auc")
        )
    )


def read_card(folder: str | Path) -> PrivacyCard:
    """Read the privacy card of a model."""
    place = Path(folder)
    description = read_description(place)
    account = place / ACCOUNT_FILE
    answered = FileAccount(account).answered if account.exists() else None
    leakage = tuple(_recorded(leakage_file(place)))
    try:
        delta, size, queries = (_number(description, name) for name in ("delta", "declared_size", "queries"))
        model = open_private(place) if "guarantee" in description else None
        guarantee = None if model is None else model.guarantee
        evaluations = [] if model is None else read_evaluations(place, model)
        released = (
            None
            if guarantee is None or all(each.reserved for each in evaluations)
            else composed_guarantee(guarantee, evaluations)
        )
        total = released or guarantee
        if total is not None and total.definition == "pure" and delta is None:
            delta = 0.0
        card = PrivacyCard(
            model=str(place),
            kind=str(description.get("kind")),
            dataset=str(description.get("dataset", "unknown")),
            declared_size=None if size is None else int(size),
            guarantee=guarantee,
            delta=delta,
            epsilon_at_delta=None if total is None or delta is None else total.at_delta(delta),
            queries=None if queries is None else int(queries),
            answered=answered,
            leakage=leakage,
            holdout=None if model is None else model.holdout,
            evaluations=_best_first([each.result for each in evaluations if each.result is not None]),
            released=released,
            person_column=None if model is None or model.encoding is None else model.encoding.person,
            decision=None if model is None else decision_in_words(model.costs, model.classes),
            effects=_effects(model),
            series=_series(place, model),
            moved=model is not None and model.remaining == 0 and (place / MOVED_FILE).is_file(),
        )
        card.rows()  # a value of a wrong type is noticed here, and not when the card is shown
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise DataUnavailable(
            f"The model in {place} is damaged ({short_message(problem)}). Train it again or restore a copy."
        ) from problem
    return card


def _effects(model: PrivateModel | None) -> Effects | None:
    """Return the effects of a model whose scores are sums over the columns of a table."""
    if model is None or model.encoding is None or not isinstance(model.classifier, TableWeights):
        return None
    return model.effects()


def _series(folder: Path, model: PrivateModel | None) -> tuple[Version, ...]:
    """Return the versions of a series up to this one, with what was published of each."""
    if model is None or "cohort" not in model.guarantee.parameters:
        return ()
    published = [each.result.accuracy for each in read_evaluations(folder, model) if each.result is not None]
    *earlier, own = prior_of(model).versions
    return (*earlier, replace(own, accuracy=published[-1] if published else None))


def _best_first(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """Return evaluations of held-out people first, and of these the one with the least noise; later ones on a tie."""
    ordered = list(reversed(evaluations))
    ordered.sort(key=lambda each: (each.composition != "parallel", each.noise))
    return tuple(ordered)


def _number(description: Mapping[str, Any], name: str) -> float | None:
    """Return a number that is not negative, or None if there is none."""
    value = description.get(name)
    if value is None or (type(value) in (int, float) and 0 <= value < math.inf):
        return value
    raise ValueError(f"{name} must be a number, at least 0")


# --- A form for reviewers --------------------------------------------------------------------------------------------


class LedgerRecord(NamedTuple):
    """What the ledger of the service states about the training set of a model, in sentences."""

    budget: str  # What was promised, spent and is left
    releases: str  # What else the account has paid for
    access: str  # Who can query, and what proves later that the audit log was not changed


class Item(NamedTuple):
    """One line of the checklist."""

    topic: str  # The factor that the line belongs to
    question: str  # What a reviewer asks
    answer: str  # What the model folder and the ledger say, or `BLANK`


def nist_checklist(card: PrivacyCard, ledger: LedgerRecord | None = None) -> list[Item]:
    """Return a checklist after NIST SP 800-226, from the guarantee down to the collection of the data."""
    claim = card._total
    if card.guarantee is None or claim is None:
        raise InvalidInput("This form is for private models; an ordinary network has no guarantee.")
    facts = card.guarantee.parameters
    parameters = f"{claim.definition}: "
    if card.epsilon_at_delta is not None:
        parameters += f"epsilon {card.epsilon_at_delta:.4g} at delta {card.delta:g}"
    charged = f"{card._answers[0].upper()}{card._answers[1:]}."
    person = "Yes: all rows of a person count together." if claim.unit == "person" else BLANK
    releases = f"{ledger.releases} Outside the ledger: {BLANK}" if ledger else BLANK
    access = f"{ledger.access} The data and the database: {BLANK}" if ledger else BLANK
    accuracy = f"accuracy {card.evaluation.accuracy}" if card.evaluation else BLANK
    questions = {
        "Privacy parameters": {
            "Which definition, and how large is epsilon?": parameters,
            "Is the claim proven?": f"{claim.status}: {claim.reason}",
            "What does it mean for one person?": " ".join(card.in_words()),
            "Why is this epsilon adequate for the purpose?": BLANK,
        },
        "Unit of privacy": {
            "What is protected?": card._protects,
            "Does one person have one such unit?": person,
        },
        "Bounds": {"Are bounds, categories and classes public?": " ".join(claim.assumptions) or "none"},
        "Sensitivity": {"How is the influence of one unit limited?": _sensitivity(facts)},
        "Noise": {
            "Which noise, from which source?": _noise(facts),
            "Are floating-point attacks excluded?": _floating_point(facts),
        },
        "Budget": {
            "What is charged, and what is left?": f"{charged} {ledger.budget}" if ledger else charged,
            "Which other releases use data of the same people?": releases,
        },
        "Utility": {
            "How good is the model?": accuracy,
            "Is the error acceptable for small groups?": _groups(card.evaluation),
        },
        "Trust model": {"Who sees the data before noise is added?": f"The curator (central model). {BLANK}"},
        "Side channels": {"Do running time, errors or logs depend on the data?": BLANK},
        "Security": {"Who has access to the training data and to the ledger?": access},
        "Data collection": {
            "On which legal basis and with which consent was the data collected?": BLANK,
            "Is the data minimised, and when is it deleted?": BLANK,
        },
    }
    return _items(questions)


def edpb_checklist(card: PrivacyCard, ledger: LedgerRecord | None = None) -> list[Item]:
    """Return a checklist after EDPB Opinion 28/2024: extraction, queries, attacks, documentation, legal basis."""
    known = {item.question: item.answer for item in nist_checklist(card, ledger)}
    words, charged = known["What does it mean for one person?"], known["What is charged, and what is left?"]
    method = known["Which definition, and how large is epsilon?"]
    limit, noise = (
        known["How is the influence of one unit limited?"],
        known["Which noise, from which source?"],
    )
    proven = f"{known['Is the claim proven?']} Assumes: {known['Are bounds, categories and classes public?']}"
    attacks = "; ".join(f"{name}: {value}" for name, value in card._leakage_rows()) if card.leakage else BLANK
    access = f"{ledger.access} Other means: {BLANK}" if ledger else BLANK
    questions = {
        "Direct extraction": {"What does what may be published tell?": f"{card._may_be_published}. {words}"},
        "Queries": {"What can be learnt about a person, on purpose or not, by asking?": f"{charged} {words}"},
        "Means": {
            "Who can query the model, and what else can they know and use?": access,
            "Is what remains insignificant, with all means that are reasonably likely to be used?": BLANK,
        },
        "Design": {
            "How were sources chosen, and data minimised?": BLANK,
            "Which method limits what training reveals?": f"{method}; {limit}; {noise}",
            "Is its claim proven, and what does it assume?": proven,
        },
        "Testing": {"Which attacks were tried, and what did they show?": attacks},
        "Documentation": {
            "What documents the method?": "The model folder, its card, the checklist after NIST SP 800-226.",
            "Where are the impact assessment and the advice of the data protection officer?": BLANK,
        },
        "Legal basis": {
            "Which interest is pursued, is it necessary, and how was it balanced?": BLANK,
            "Was the training data obtained and used lawfully?": BLANK,
        },
    }
    return _items(questions)


def _items(questions: Mapping[str, Mapping[str, str]]) -> list[Item]:
    return [Item(topic, *line) for topic, answers in questions.items() for line in answers.items()]


def _groups(evaluation: Evaluation | None) -> str:
    """Return the accuracy of each group, for people to judge."""
    if evaluation is None or evaluation.by_group is None:
        return BLANK
    accuracies = (f"{each.name} {each.accuracy}" for each in evaluation.groups)
    return f"Accuracy by {evaluation.by_group.column}: {'; '.join(accuracies)}. {BLANK}"


def _noise(facts: Mapping[str, Any]) -> str:
    """Return where the noise comes from."""
    source = facts.get("noise_source", {})
    if source.get("exact"):
        return "Exact samplers, with randomness from the operating system."
    return "Seeded noise, for experiments only." if source else BLANK


def _floating_point(facts: Mapping[str, Any]) -> str:
    """Return what is known about rounding; only released weights of a head are added on a grid, without rounding."""
    released = facts.get("estimator") == "head" and facts.get("release") != "query"
    if released and facts.get("noise_source", {}).get("exact"):
        return "Yes: sums and noise are multiples of a public grid and are added without rounding."
    return BLANK


def _sensitivity(facts: Mapping[str, Any]) -> str:
    """Return the bound on the influence of one unit."""
    names = ("sensitivity", "max_grad_norm", "radius")
    return "; ".join(f"{name} {facts[name]:.6g}" for name in names if facts.get(name) is not None) or BLANK
