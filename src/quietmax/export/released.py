"""A released model outside its folder: a scikit-learn classifier that holds the folder's files, and its skops file.

Only models whose weights were released may leave the house. A model that is paid per answer keeps weights without
noise, so a copy of it would give answers that nobody pays for: it is never exported.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax._lazy import required
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.estimators.figures import decision_in_words
from quietmax.estimators.serialization import DECISION_FILE, PrivateModel, has_exact_noise, open_private
from quietmax.models.features.generic import encoders
from quietmax.models.serialization import read_description
from quietmax.predictor import Predictor
from quietmax.spending import DESCRIPTION_FILE

if TYPE_CHECKING:
    import pandas as pd

METADATA = "quietmax.json"
"""Name of the metadata in files and folders."""
_WEIGHTS = "weights.safetensors"
TRUSTED = ("quietmax.export.released.ReleasedClassifier",)
"""The types that `skops.io.load` must be told to trust."""


class ReleasedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose weights were released: any number of answers is covered by its guarantee.

    It holds the files of the model folder as bytes. They are opened when they are first needed, with the same checks
    as a folder: what the files do not support is not claimed.

    Parameters
    ----------
    files : mapping of str to bytes
        The files of the model folder by name.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    @classmethod
    def open(cls, folder: str | Path) -> ReleasedClassifier:
        """Read the model in a folder.

        Parameters
        ----------
        folder : str or Path
            A model folder, written by `save_private` or by an export.

        Returns
        -------
        ReleasedClassifier

        Raises
        ------
        InvalidInput
            If the model is paid per answer, has no guarantee, or has one that does not hold.
        DataUnavailable
            If the folder is missing or damaged.
        """
        model, place = _open_released(folder), Path(folder)
        decision = [] if model.costs is None else [DECISION_FILE]
        names = (
            DESCRIPTION_FILE,
            _WEIGHTS,
            *decision,
            *(each.stored_name for each in encoders(model.features)),
        )
        return cls({name: (place / name).read_bytes() for name in names})

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict class labels.

        Parameters
        ----------
        X : data frame, or array of shape (records, inputs)
            The rows of a table by column name, or records of numbers if the model was trained on numbers.

        Returns
        -------
        array of shape (records,)
            Labels.
        """
        return np.asarray(self.classes_[self._model.predict(self._records(X))])

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Predict class probabilities.

        Parameters
        ----------
        X : data frame, or array of shape (records, inputs)
            As for `predict`.

        Returns
        -------
        array of shape (records, classes)
            Probabilities, in the order of ``classes_``.
        """
        return self._model.predict_proba(self._records(X))

    def decided(self, probabilities: NDArray[np.float64]) -> NDArray[Any]:
        """Return the class label for each row of probabilities.

        Parameters
        ----------
        probabilities : array of shape (records, classes)
            What `predict_proba` has returned.

        Returns
        -------
        array of shape (records,)
            Labels.
        """
        return np.asarray(self.classes_[self._model.decided(probabilities)])

    def reasons(self, X: Any) -> pd.DataFrame:
        """Return what each column contributed to the scores of rows; see `PrivateHead.reasons`.

        Parameters
        ----------
        X : data frame
            As for `predict`.

        Returns
        -------
        DataFrame
            One row for each row of the table and each column, cross and constant.
        """
        return self._model.reasons(self._records(X))

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels."""
        return np.array(json.loads(self.files[DESCRIPTION_FILE])["classes"])

    @property
    def n_features_in_(self) -> int:
        """Number of columns of a table, or of numbers of a record."""
        return self._model.inputs if self._model.encoding is None else len(self._model.encoding.columns)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        """Names of the columns."""
        if self._model.encoding is None:
            raise AttributeError("The model was trained on numbers, which have no column names.")
        return np.array([column.name for column in self._model.encoding.columns], dtype=object)

    @property
    def guarantee_(self) -> Guarantee:
        """What is guaranteed of the model."""
        return self._model.guarantee

    @property
    def metadata_(self) -> dict[str, Any]:
        """The guarantee and the provenance."""
        return _metadata(self._model, self.files[DESCRIPTION_FILE])

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"files": dict(self.files)}

    def _records(self, X: Any) -> NDArray[np.float32]:
        """Return rows as encoded records; an array is taken as it is."""
        return self._model.encode(X) if self._model.encoding is not None else np.asarray(X, dtype=np.float32)

    @cached_property
    def _model(self) -> PrivateModel:
        with tempfile.TemporaryDirectory() as folder:
            write_files(self.files, Path(folder))
            return _open_released(folder)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        if name != Path(name).name:
            raise InvalidInput(f"A model has files in one folder, but one is named {name!r}.")
        (folder / name).write_bytes(content)


def _open_released(folder: str | Path) -> PrivateModel:
    """Open a model whose weights were released; others are refused."""
    refused = f"The model in {folder} is not exported: "
    if read_description(folder).get("guarantee") is None:
        raise InvalidInput(f"{refused}it has no guarantee, so its weights may reveal the training data.")
    model = open_private(folder)
    reasons = {
        "it is paid per answer, and its weights have no noise.": isinstance(model.classifier, Predictor),
        "its claimed guarantee does not hold.": model.guarantee.status == "refuted",
        "its noise is seeded, and the file would hold the seed. Train it without `random_state`.": (
            not has_exact_noise(model.guarantee)
        ),
        "its columns were read off the training records, and the file would hold them. Declare a schema.": (
            model.encoding is not None and model.encoding.inferred
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InvalidInput(refused + reason)
    return model


def _metadata(model: PrivateModel, description: bytes) -> dict[str, Any]:
    """Return what every exported file says about a model, as JSON values."""
    stated = json.loads(description)
    return {
        "guarantee": model.guarantee.to_json(),
        "in_words": model.guarantee.in_words("everything computed from this model"),
        "epsilon": stated["epsilon"],
        "delta": stated["delta"],
        "classes": list(model.classes),
        "decision": decision_in_words(model.costs, model.classes),
        "provenance": {
            "kind": model.kind,
            "dataset": stated["dataset"],
            "trained_with": f"quietmax {stated['quietmax']}",
            "exported_with": f"quietmax {__version__}",
            "model_json_sha256": hashlib.sha256(description).hexdigest(),
            "weights_sha256": stated.get("weights_sha256"),
        },
    }


def export_skops(folder: str | Path, file: str | Path) -> None:
    """Write a released model as a skops file, which ``skops.io.load(file, trusted=TRUSTED)`` reads.

    What is loaded is a `ReleasedClassifier`. It needs Quietmax to run. The file is a zip archive with `quietmax.json`
    beside the objects, so that the guarantee can be read without Quietmax.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.
    """
    skops = required("skops", "An export to skops", "io")
    classifier = ReleasedClassifier.open(folder)
    about = json.dumps(classifier.metadata_, indent=2, ensure_ascii=False) + "\n"
    content = io.BytesIO(skops.io.dumps(classifier))
    with zipfile.ZipFile(content, "a") as archive:
        archive.writestr(METADATA, about)
    atomic_write(Path(file), lambda staging: staging.write_bytes(content.getvalue()))
