"""What every training of networks checks alike: its records, each network's share of them, the weights it gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.errors import InvalidInput, QuietmaxError

Rows = NDArray[np.int64]


def check_records(inputs: Tensor, targets: Tensor, classes: int) -> None:
    """Refuse records that do not fit together."""
    if inputs.ndim != 2 or targets.shape != inputs.shape[:1]:
        raise InvalidInput(
            f"Features of shape {tuple(inputs.shape)} and labels of shape {tuple(targets.shape)} do not fit; "
            "reshape them to (records, features) and (records,)."
        )
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= classes):
        raise InvalidInput(f"A label lies outside 0 to {classes - 1}; encode labels as consecutive integers.")
    if not torch.isfinite(inputs).all():
        raise InvalidInput("A feature is NaN or infinite; remove or impute such records before training.")


def check_networks(rows: Sequence[Rows], records: int, **given: Sequence[Any] | None) -> None:
    """Refuse row indices outside of the records, and options that are not ``given`` once per network."""
    if not rows:
        raise InvalidInput("There is no network to train; give the row indices of at least one.")
    for what, each in given.items():
        if each is not None and len(each) != len(rows):
            raise InvalidInput(
                f"{what} has {len(each)} entries for {len(rows)} networks; give one per network."
            )
    if any(len(each) and (each.min() < 0 or each.max() >= records) for each in rows):
        raise InvalidInput(
            f"A row index lies outside the {records} records; give indices from 0 to {records - 1}."
        )


def check_weights(weights: Sequence[Tensor]) -> None:
    """Refuse weights that training made infinite or NaN."""
    if not all(torch.isfinite(tensor).all() for tensor in weights):
        raise QuietmaxError(
            "Training diverged: a weight is no longer a finite number; lower the learning rate or check the features."
        )
