"""Private training with a scikit-learn face, and the models it leaves behind."""

from __future__ import annotations

from pathlib import Path

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd import DPSGD
from quietmax.estimators.dpsgd_file import open_dpsgd, save_dpsgd
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.head_file import open_head, save_head
from quietmax.estimators.private_model import PrivateModel
from quietmax.estimators.teachers import Teachers
from quietmax.estimators.teachers_file import open_teachers, save_teachers
from quietmax.models.files import read_description

__all__ = [
    "DPSGD",
    "PrivateHead",
    "PrivateModel",
    "Teachers",
    "open_private",
    "save_dpsgd",
    "save_head",
    "save_teachers",
]

_OPENERS = {"head": open_head, "teachers": open_teachers, "dpsgd": open_dpsgd}


def open_private(folder: str | Path) -> PrivateModel:
    """Open a private model of any kind."""
    kind = str(read_description(folder).get("kind"))
    if kind not in _OPENERS:
        raise InvalidInput(
            f"The model in {folder} is of kind {kind!r}, not a private one ({', '.join(_OPENERS)}); name "
            "another folder."
        )
    return _OPENERS[kind](folder)
