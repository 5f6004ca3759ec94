"""Private models in folders: what every kind stores alike is written and read here, its own part by the kind's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from quietmax.account import ACCOUNT_FILE, FileAccount
from quietmax.accounting import Guarantee
from quietmax.data import Encoding
from quietmax.errors import DataUnavailable, InvalidInput, words_of
from quietmax.estimators import conditions, dpsgd_file, head_file, teachers_file
from quietmax.estimators.conditions import runs_own_code
from quietmax.estimators.dpsgd import DPSGD
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.private_model import (
    UNFIT,
    Answers,
    OwnPart,
    PrivateModel,
    check_claim,
    check_parts,
)
from quietmax.estimators.teachers import Teachers
from quietmax.models.features import feature_map_from_json
from quietmax.models.files import read_description, read_folder, write_folder
from quietmax.predictor import Predictor


@dataclass(frozen=True)
class _Kind:
    """A kind of private model: whose it is, what it stores of its own, how that answers again and what it claims."""

    estimator: type
    own_part: Callable[[Any], OwnPart]
    answerer: Callable[[Path, Mapping[str, Any], Mapping[str, Tensor]], Answers]
    claim: Callable[[PrivateModel, Mapping[str, Any]], Guarantee]


_KINDS = {
    "head": _Kind(PrivateHead, head_file.own_part, head_file.answerer, head_file.claim),
    "teachers": _Kind(Teachers, teachers_file.own_part, teachers_file.answerer, teachers_file.claim),
    "dpsgd": _Kind(DPSGD, dpsgd_file.own_part, dpsgd_file.answerer, dpsgd_file.claim),
}

_FIRST_SCATTERING = conditions.Condition(
    "Version 0.1 computed it with scattering features whose rounding could depend on other records (THEORY 3.8).",
    ("In the training, no record's features depended on its place among the other records.",),
)


def save_private(
    estimator: PrivateHead | Teachers | DPSGD,
    folder: str | Path,
    *,
    dataset: str,
    encoding: Encoding | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a fitted private estimator.

    Released weights (DP-SGD, a head with ``release="weights"``) may be published, as the guarantee says. The folder of
    teachers or of a head with ``release="query"`` lets its holder ask without paying: like the records, it stays with
    the owner. Its budget moves into the folder with what was spent of it; the estimator goes on paying there and cannot
    be saved again.
    """
    check_is_fitted(estimator)
    kind = next(name for name, each in _KINDS.items() if isinstance(estimator, each.estimator))
    own = _KINDS[kind].own_part(estimator)
    if runs_own_code(own.features):
        raise InvalidInput(
            "A feature map that is not one of quietmax.models.features cannot be saved; use one of those, or apply "
            "yours to the records before."
        )
    description = {
        "kind": kind,
        "dataset": dataset,
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": None if own.features is None else own.features.to_json(),
        "inputs": estimator.n_features_in_,
        "classes": [_plain(label) for label in estimator.classes_],
        **own.description,
        "guarantee": with_encoding(estimator.guarantee_, encoding).to_json(),
    }
    predictor: Predictor | None = getattr(estimator, "predictor_", None)
    if predictor is None:
        return write_folder(folder, description, own.tensors, overwrite=overwrite)

    def moved(answered: int) -> FileAccount:
        written = write_folder(folder, description, own.tensors, overwrite=overwrite, answered=answered)
        return FileAccount(written.resolve() / ACCOUNT_FILE)

    predictor.move_account(moved)
    return Path(folder)


def with_encoding(guarantee: Guarantee, encoding: Encoding | None) -> Guarantee:
    """The guarantee of a model whose records were encoded so: one read off the records makes it conditional."""
    if encoding is None or not encoding.measured:
        return guarantee
    measured = ", ".join(encoding.measurements)
    return guarantee.weakened(
        "conditional" if guarantee.status == "proven" else guarantee.status,
        f"{guarantee.because} The encoding was measured on the private records (THEORY 3).",
        (f"What was read off the records is public: {measured}.",),
    )


def open_private(folder: str | Path) -> PrivateModel:
    """Open a private model of any kind; what its answers spent is read from and written to the folder's account.

    The guarantee is computed again from the facts that the folder states. A folder that states another one, or whose
    parts contradict each other, is refused, and so is a model that is paid per answer and has no account.
    """
    kind = str(read_description(folder).get("kind"))
    if kind not in _KINDS:
        raise InvalidInput(
            f"The model in {folder} is of kind {kind!r}, not a private one ({', '.join(_KINDS)}); name another folder."
        )
    description, tensors = read_folder(folder, kind)
    try:
        features, stated = description["features"], description["encoding"]
        encoding = None if stated is None else Encoding.from_json(json.dumps(stated))
        guarantee = Guarantee.from_json(description["guarantee"])
        model = PrivateModel(
            kind=kind,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=guarantee,
            encoding=encoding,
            features=None if features is None else feature_map_from_json(features),
            answerer=_KINDS[kind].answerer(Path(folder), description, tensors),
        )
        check_parts(model)
        _check_account(Path(folder), model.answerer)
        computed = with_encoding(_KINDS[kind].claim(model, description), encoding)
        check_claim(guarantee, computed)
        if description["format_version"] == 1 and _scatters(features):
            computed = conditions.weakened(computed, _FIRST_SCATTERING)
        return replace(model, guarantee=computed)
    except UNFIT as problem:
        raise DataUnavailable(
            f"The model in {folder} is damaged ({words_of(problem)}); train it again or restore a copy."
        ) from problem


def _check_account(folder: Path, answerer: Answers) -> None:
    """Raise unless a model that is paid per answer has its account, and only such a model has one."""
    account = FileAccount(folder / ACCOUNT_FILE)
    if not isinstance(answerer, Predictor):
        if account.path.exists():
            raise ValueError("it has an account of answers paid for, but its weights are marked as released")
    elif (answered := account.answered) > (limit := answerer.budget.queries or 0):
        raise ValueError(f"its account counts {answered} answers, but its budget is for {limit}")


def _scatters(features: Mapping[str, Any] | None) -> bool:
    """Whether a described feature map is wavelet scattering, or a pipeline with it."""
    if features is None:
        return False
    return features["kind"] == "scattering" or any(_scatters(each) for each in features.get("maps", ()))


def _plain(label: Any) -> Any:
    """A class label as a JSON value."""
    return label.item() if isinstance(label, np.generic) else label
