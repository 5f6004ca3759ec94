"""The MLflow flavour: released models in MLflow's format, for its registry, its servers and `mlflow.pyfunc`.

An MLflow model is a folder: `MLmodel` with the guarantee and the provenance as metadata, `quietmax.json` with the same,
the model folder in `model`, and the requirements. Only models whose weights were released have one.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax import __version__
from quietmax._lazy import required
from quietmax.errors import InvalidInput
from quietmax.export.released import METADATA, ReleasedClassifier, write_files
from quietmax.models.serialization import staged_folder

if TYPE_CHECKING:
    import pandas as pd

FLAVOR_NAME = "quietmax"
_MLFLOW = ("mlflow", "The MLflow flavour", "artifacts", "models", "pyfunc")
_DATA, _REQUIREMENTS, _PYTHON_ENV = "model", "requirements.txt", "python_env.yaml"


def save_model(
    model: str | Path | ReleasedClassifier,
    path: str | Path,
    mlflow_model: Any = None,
    *,
    metadata: dict[str, Any] | None = None,
    signature: Any = None,
) -> None:
    """Write a released model as an MLflow model.

    Parameters
    ----------
    model : str, Path or ReleasedClassifier
        The model folder, or what was read from one.
    path : str or Path
        A folder that does not exist yet.
    mlflow_model : mlflow.models.Model, optional
        The MLflow model that this flavour is added to.
    metadata : dict, optional
        Further metadata; the guarantee and the provenance are always added.
    signature : mlflow.models.ModelSignature, optional
        By default the names of the columns, of any type, or the shape of the records.

    Raises
    ------
    InvalidInput
        If the model must not be exported, or the folder exists.
    DataUnavailable
        If the package mlflow is not installed, or the model folder is damaged.
    QuietmaxError
        If the folder cannot be written.

    Examples
    --------
    >>> save_model("income", "income-mlflow")  # doctest: +SKIP
    """
    required(*_MLFLOW)
    from mlflow import pyfunc
    from mlflow.models import Model

    classifier, target = _classifier(model), Path(path)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InvalidInput(f"'{target}' already exists; an MLflow model needs a new folder.")
    described = Model() if mlflow_model is None else mlflow_model
    described.signature = _signature(classifier) if signature is None else signature
    described.metadata = {**(described.metadata or {}), **(metadata or {}), **classifier.metadata_}
    described.add_flavor(FLAVOR_NAME, quietmax_version=__version__, data=_DATA)
    pyfunc.add_to_model(described, loader_module="quietmax.mlflow", data=_DATA, python_env=_PYTHON_ENV)
    with staged_folder(target) as staging:
        _fill(staging, classifier)
        described.save(str(staging / "MLmodel"))
        staging.chmod(0o755)
        staging.rename(target)


def log_model(model: str | Path | ReleasedClassifier, name: str = "model", **options: Any) -> Any:
    """Log a released model as an artifact of the current MLflow run.

    Parameters
    ----------
    model : str, Path or ReleasedClassifier
        The model folder, or what was read from one.
    name : str
        Name of the logged model.
    options : object
        Further arguments of `mlflow.models.Model.log`, such as `registered_model_name`, and those of `save_model`.

    Returns
    -------
    mlflow.models.model.ModelInfo

    Examples
    --------
    >>> log_model("income", name="income").model_uri  # doctest: +SKIP
    'models:/m-2f1d...'
    """
    required(*_MLFLOW)
    from mlflow.models import Model

    return Model.log(
        artifact_path=None,
        name=name,
        flavor=sys.modules[__name__],
        model=_classifier(model),
        **options,
    )


def load_model(model_uri: str | Path) -> ReleasedClassifier:
    """Read a released model from MLflow.

    Parameters
    ----------
    model_uri : str or Path
        A folder, or an address such as ``models:/income/1``.

    Returns
    -------
    ReleasedClassifier
        A scikit-learn classifier, with its guarantee.

    Raises
    ------
    DataUnavailable
        If the package mlflow is not installed, or the model is damaged.

    Examples
    --------
    >>> load_model("income-mlflow").predict(frame)  # doctest: +SKIP
    """
    mlflow = required(*_MLFLOW)
    folder = mlflow.artifacts.download_artifacts(artifact_uri=str(model_uri))
    return ReleasedClassifier.open(Path(folder) / _DATA)


def _classifier(model: str | Path | ReleasedClassifier) -> ReleasedClassifier:
    return model if isinstance(model, ReleasedClassifier) else ReleasedClassifier.open(model)


class _PyfuncModel:
    """What `mlflow.pyfunc` calls: rows in, labels and probabilities out."""

    def __init__(self, classifier: ReleasedClassifier) -> None:
        self._classifier = classifier

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return one row per record: ``label``, ``probability of`` each class, and if `params` ask for it the reasons.

        With ``{"reasons": True}`` there is also the ``contribution of`` each column to the score of each class.
        """
        import pandas as pd

        shares = self._classifier.predict_proba(model_input)
        classes = enumerate(self._classifier.classes_)
        columns = {f"probability of {name}": shares[:, place] for place, name in classes}
        if params and params.get("reasons"):
            reasons = self._classifier.reasons(model_input)
            for name in self._classifier.classes_:
                parts = reasons.pivot(index="row", columns="column", values=f"contribution to {name}")
                columns |= {
                    f"contribution of {column} to {name}": parts[column].to_numpy()
                    for column in reasons["column"].unique()
                }
        return pd.DataFrame({"label": self._classifier.decided(shares), **columns})


def _load_pyfunc(path: str) -> _PyfuncModel:
    """Open the model folder of an MLflow model; `mlflow.pyfunc.load_model` calls it by this name."""
    return _PyfuncModel(ReleasedClassifier.open(path))


def _fill(folder: Path, classifier: ReleasedClassifier) -> None:
    """Write everything but `MLmodel`."""
    (folder / _DATA).mkdir()
    write_files(classifier.files, folder / _DATA)
    texts = {
        METADATA: json.dumps(classifier.metadata_, indent=2, ensure_ascii=False) + "\n",
        _REQUIREMENTS: f"quietmax=={__version__}\n",
        _PYTHON_ENV: f"python: {platform.python_version()}\nbuild_dependencies:\n- pip\n"
        f"dependencies:\n- -r {_REQUIREMENTS}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _signature(classifier: ReleasedClassifier) -> Any:
    """Return the names of the columns and of the answers; a cell may have any type that Quietmax reads."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec
    from mlflow.types.schema import AnyType

    anything: Any = AnyType
    if hasattr(classifier, "feature_names_in_"):
        inputs = Schema([ColSpec(anything(), str(name)) for name in classifier.feature_names_in_])
    else:
        inputs = Schema([TensorSpec(np.dtype(np.float32), (-1, classifier.n_features_in_))])
    label = "string" if classifier.classes_.dtype.kind == "U" else "long"
    answers = [ColSpec("double", f"probability of {name}") for name in classifier.classes_]
    params = ParamSchema([ParamSpec("reasons", "boolean", False)])
    return ModelSignature(inputs, Schema([ColSpec(label, "label"), *answers]), params)
