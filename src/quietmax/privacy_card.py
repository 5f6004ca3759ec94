"""The privacy card of a model: one page in plain words, for people who decide whether a model may be used.

It says what an adversary can learn at most, for whom, under which assumptions, how good the model is, and what attacks
saw. It is made from the model folder and from the attack results that `quietmax attack` writes beside the folder.
Attack results are computed from private records and have no guarantee, so they are not kept in a folder that may be
published, and a card that shows them says on top that it is not for publication.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from quietmax._io import atomic_write
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Holdout
from quietmax.errors import DataUnavailable, QuietmaxError, counted, short_message
from quietmax.estimators.evaluate import read_evaluations
from quietmax.estimators.evaluation import Evaluation, composed_guarantee
from quietmax.estimators.serialization import open_private
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
    "proven": "#1a7f37",
    "weak": "#bc4c00",
    "conditional": "#9a6700",
    "refuted": "#cf222e",
    "none": "#cf222e",
}
"""The colour of each grade of a guarantee."""
_MOST_CLASSES = 10
"""Recalls that the card shows; of more classes it shows the lowest."""
_MOST_CELLS = 16
"""Cells of the confusion matrix that the card shows; a larger one is left to the JSON."""
_PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PrivacyCard:
    """What a reviewer needs to know about one model.

    Parameters
    ----------
    model : str
        The model folder.
    kind : str
        The kind of model.
    dataset : str
        What it was trained on.
    declared_size : int or None
        The number of training records or persons that the folder states.
    guarantee : Guarantee or None
        What is guaranteed of the model; None for an ordinary model.
    delta : float or None
        delta of the budget.
    epsilon_at_delta : float or None
        epsilon of the guarantee of the model and its evaluations together, at this delta.
    queries : int or None
        Number of answers that the budget pays for; None if answers are not charged.
    answered : int or None
        Answers charged so far; None if answers are not charged.
    leakage : tuple of dict
        Results of attacks.
    holdout : Holdout or None
        How people were held out of training; None if nobody was.
    evaluations : tuple of Evaluation
        The evaluations: those of held-out people first, and of these the one with the least noise.
    released : Guarantee or None
        What is guaranteed of the model and its evaluations together; None without evaluations.
    person_column : str or None
        The column of the table whose value tells whose row a row is.
    public : bool
        Whether the card leaves out what is not for publication.
    moved : bool
        Whether the budget moved into a ledger, because the model was served. Then the folder does not know how many
        answers may be given, and the guarantee is for `queries` of them.
    """

    model: str
    kind: str
    dataset: str
    declared_size: int | None
    guarantee: Guarantee | None
    delta: float | None
    epsilon_at_delta: float | None
    queries: int | None
    answered: int | None
    leakage: tuple[dict[str, Any], ...]
    holdout: Holdout | None = None
    evaluations: tuple[Evaluation, ...] = ()
    released: Guarantee | None = None
    person_column: str | None = None
    public: bool = False
    moved: bool = False

    @property
    def status(self) -> str:
        """``proven``, ``conditional``, ``refuted``, or ``none`` for an ordinary model."""
        total = self._total
        return "none" if total is None else total.status

    @property
    def _grade_in_words(self) -> str:
        """The status, and how often an adversary may be right if the guarantee is weak."""
        return "none" if self._total is None else self._total.grade_in_words

    @property
    def title(self) -> str:
        """The heading of the card."""
        return f"Privacy card: {self._grade_in_words}"

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

    @property
    def _total(self) -> Guarantee | None:
        """What is guaranteed of the model and its evaluations together."""
        return self.guarantee if self.released is None else self.released

    @property
    def _many(self) -> str:
        """What the guarantee protects, as a plural."""
        return "people" if self.guarantee is not None and self.guarantee.unit == "person" else "records"

    def rows(self) -> list[tuple[str, str]]:
        """Return the card as a list of (name, value), the most important first."""
        rows = [] if self.publishable else [("not for publication", _BANNER)]
        rows += self._model_rows()
        rows += [("in plain words", sentence) for sentence in self.in_words()]
        rows += self._guarantee_rows()
        rows += self._evaluation_rows()
        rows += self._count_rows()
        rows += self._leakage_rows()
        return rows + [(f"parameter {name}", value) for name, value in self._parameters()]

    def _parameters(self) -> list[tuple[str, str]]:
        """Return the parameters of the training."""
        parameters = {} if self.guarantee is None else self.guarantee.parameters
        return [(name, f"{value}") for name, value in parameters.items()]

    def in_words(self) -> list[str]:
        """Return what the guarantee of the model and its evaluations means, as plain sentences."""
        if self._total is None:
            return [_PLAIN]
        if self.moved:
            return [*self._total.in_words(f"{counted(self.queries or 0, 'answer')} of this model"), _MOVED]
        return [*self._total.in_words("everything released by this model and its evaluations"), _ADDS_UP]

    def _model_rows(self) -> list[tuple[str, str]]:
        """Return what the model is and whom it was trained on."""
        rows = [("model", self.model), ("kind", self.kind), ("trained on", self.dataset)]
        if self.declared_size is not None:
            rows.append((self._size_name, f"{self.declared_size:,}"))
        return [*rows, ("status", self._grade_in_words)]

    @property
    def _model_line(self) -> str:
        """What the model is and whom it was trained on, in one line."""
        size = "" if self.declared_size is None else f"; {self._size_name}: {self.declared_size:,}"
        return f"{self.kind}, trained on {self.dataset}{size}"

    def _guarantee_rows(self) -> list[tuple[str, str]]:
        """Return what is guaranteed, for whom, for how many answers, and what it assumes."""
        rows = [("answers", self._answers)]
        guarantee = self._total
        if guarantee is None:
            return rows
        rows.append(("guarantee", str(guarantee)))
        if self.delta is not None and self.epsilon_at_delta is not None and self.epsilon_at_delta < math.inf:
            rows.append(("in (epsilon, delta)", f"({self.epsilon_at_delta:.4g}, {self.delta:g})"))
        rows.append(("protects", self._protects))
        assumptions = guarantee.assumptions or ("nothing further",)
        rows += [("assumes", assumption) for assumption in assumptions]
        return [*rows, ("may be published", self._may_be_published), ("not for publication", _NOT_PUBLIC)]

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

    def _evaluation_rows(self) -> list[tuple[str, str]]:
        """Return how good the model is."""
        if self.evaluation is None:
            if self.guarantee is None:
                return [("accuracy", "not evaluated")]
            known = (
                "run 'quietmax evaluate'"
                if self.queries is None
                else "a model that is paid per answer cannot be"
            )
            return [("accuracy", f"not evaluated; {known}")]
        recalls = list(self.evaluation.recall.items())
        which = "recall by class"
        if len(recalls) > _MOST_CLASSES:
            recalls.sort(key=lambda recall: math.inf if recall[1].value is None else recall[1].value)
            which = f"lowest recalls of {len(recalls)} classes"
        rows = [
            ("accuracy", str(self.evaluation.accuracy)),
            (which, "; ".join(f"{name}: {estimate}" for name, estimate in recalls[:_MOST_CLASSES])),
            (
                "evaluated on",
                f"{self._evaluated(self.evaluation)}. The figures have noise and may be published. In brackets: 95% "
                "intervals for sampling and noise.",
            ),
        ]
        for each in self.evaluations[1:]:
            rows.append(("further evaluation", f"accuracy {each.accuracy} on {self._evaluated(each)}"))
        return rows

    def _evaluated(self, evaluation: Evaluation) -> str:
        """Return on whom an evaluation was made."""
        people = f"held-out {self._many}" if evaluation.composition == "parallel" else self._many
        where = "" if evaluation.composition == "parallel" else ", who may be in the training set"
        return f"about {evaluation.size.value:,.0f} {people}{where}"

    def _matrix(self) -> list[tuple[str, list[str]]]:
        """Return the noisy counts of each true class; nothing if the matrix is too large for the card."""
        if self.evaluation is None or len(self.evaluation.classes) ** 2 > _MOST_CELLS:
            return []
        margin = math.ceil(self.evaluation.margin)
        return [
            (name, [f"{round(count) + 0:,} \u00b1{margin:,}" for count in counts])  # + 0: no negative zero
            for name, counts in zip(self.evaluation.classes, self.evaluation.confusion, strict=True)
        ]

    def _calibration(self) -> list[tuple[str, str]]:
        """Return the share of right answers for each range of probabilities of the answer."""
        bins = [] if self.evaluation is None else self.evaluation.bins
        return [(f"{each.low:.2f} to {each.high:.2f}", str(each.right)) for each in bins]

    def _remarks(self) -> list[str]:
        """Return what a reader of the counts must know."""
        if self.evaluation is None:
            return []
        large = (
            "The confusion matrix is large: `quietmax card --json` shows it, with an interval for each cell."
        )
        return ([] if self._matrix() else [large]) + self.evaluation.remarks()

    def _count_rows(self) -> list[tuple[str, str]]:
        """Return the confusion matrix, the calibration and what must be known of them, as text."""
        classes = () if self.evaluation is None else self.evaluation.classes
        rows = [
            (
                f"true {name}, predicted",
                "; ".join(f"{each}: {count}" for each, count in zip(classes, counts, strict=True)),
            )
            for name, counts in self._matrix()
        ]
        rows += [(f"right with confidence {name}", right) for name, right in self._calibration()]
        return rows + [("about the counts", sentence) for sentence in self._remarks()]

    def _counts_html(self) -> str:
        """Return the same as HTML tables."""
        if self.evaluation is None:
            return ""
        calibration = [(name, [right]) for name, right in self._calibration()]
        tables = _grid("Calibration", ["probability of the answer", "share of right answers"], calibration)
        if matrix := self._matrix():
            head = ["true class", *(f"predicted {name}" for name in self.evaluation.classes)]
            tables = _grid(f"Number of {self._many}", head, matrix) + tables
        remarks = "".join(f"<p>{escape(sentence)}</p>" for sentence in self._remarks())
        return f'<div class="counts">{tables}</div>{remarks}'

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
            rows.append(
                (f"observed leakage, {report['attack']}", f"{value}; answers by {report['released_by']}")
            )
        return [*rows, ("observed leakage", OBSERVED)]

    @property
    def _size_name(self) -> str:
        """Where the number of records or people comes from: declared, released with noise, or counted."""
        claimed = self.guarantee
        if claimed is None or size_condition(claimed.unit).assumptions[0] in claimed.assumptions:
            return f"true number of {self._many}, assumed to be public"
        noisy = claimed.parameters.get("size_from") == "noisy count"
        return f"{'noisy' if noisy else 'declared'} number of {self._many}"

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        return {
            **{name: getattr(self, name) for name in ("model", "kind", "dataset", "declared_size", "status")},
            "in_words": self.in_words(),
            "guarantee": None if self.guarantee is None else self.guarantee.to_json(),
            "delta": self.delta,
            "epsilon_at_delta": self.epsilon_at_delta,
            "queries": self.queries,
            "answered": self.answered,
            "moved": self.moved,
            "holdout": None if self.holdout is None else self.holdout.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "further_evaluations": [each.to_json() for each in self.evaluations[1:]],
            "protects": None if self.guarantee is None else self._protects,
            "publishable": self.publishable,
            "released": None if self.released is None else self.released.to_json(),
            "leakage": list(self.leakage),
            "leakage_caveat": OBSERVED if self.leakage else None,
        }

    def to_html(self) -> str:
        """Return the card as one self-contained HTML page, which prints on one sheet of A4."""
        return _PAGE.substitute(
            model=escape(self.model),
            colour=_COLOURS["none" if self._total is None else self._total.grade],
            banner="" if self.publishable else f'<p class="banner">{escape(_BANNER)}</p>',
            grade=escape(self._grade_in_words),
            described=escape(self._model_line),
            words="\n".join(f"<p>{escape(sentence)}</p>" for sentence in self.in_words()),
            guarantee=_table(self._guarantee_rows()),
            evaluation=_table(self._evaluation_rows()),
            counts=self._counts_html(),
            attacks="" if self.public else f"<h2>What attacks saw</h2>\n{_table(self._leakage_rows())}",
            parameters=_table(self._parameters()),
        )


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


def leakage_file(folder: str | Path) -> Path:
    """Return the file with the attack results of a model: beside its folder, so that they are not published with it.

    The name contains a digest of the weights, so that another model in the same folder has other results.
    """
    return Path(folder).resolve().parent / f"leakage-{_weights_digest(folder)[:16]}.json"


def record_leakage(folder: str | Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Store attack results beside the model's folder, for its card."""
    path = leakage_file(folder)
    kept = {(entry["attack"], entry["released_by"]): entry for entry in _recorded(path)}
    for report in reports:
        entry = {name: report[name] for name in ("attack", "released_by", "leakage", "auc")}
        kept[entry["attack"], entry["released_by"]] = entry
    try:
        text = json.dumps({"caveat": OBSERVED, "attacks": list(kept.values())}, indent=2) + "\n"
        atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"), private=True)
    except OSError as problem:
        raise QuietmaxError(f"Cannot write the attack results to {path} ({problem.strerror}).") from problem


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
        charges = [each.charge for each in evaluations]
        released = (
            None
            if guarantee is None or all(each.reserved for each in charges)
            else composed_guarantee(guarantee, charges)
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
            moved=model is not None and model.remaining == 0 and (place / MOVED_FILE).is_file(),
        )
        card.rows()  # a value of a wrong type is noticed here, and not when the card is shown
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise DataUnavailable(
            f"The model in {place} is damaged ({short_message(problem)}). Train it again or restore a copy."
        ) from problem
    return card


def _weights_digest(folder: str | Path) -> str:
    """Return the SHA-256 of the weights of a model folder."""
    try:
        return hashlib.sha256((Path(folder) / "weights.safetensors").read_bytes()).hexdigest()
    except OSError as problem:
        raise DataUnavailable(f"The weights in {folder} cannot be read ({problem.strerror}).") from problem


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
