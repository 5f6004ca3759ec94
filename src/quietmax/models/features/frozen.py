"""Any frozen torch module as a public feature map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from quietmax.errors import InvalidInput
from quietmax.models.features.base import BatchedMap, Floats


@dataclass(frozen=True, eq=False)
class FrozenModule(BatchedMap):
    """The outputs of a torch module whose weights owe nothing to the private records, flattened per record.

    The module gets batches of `rows_at_once` records shaped `(rows, *input_shape)` (`(rows, m)` without
    one), in evaluation mode and without gradients. A module that mixes the rows of a batch gets one record at a time.

    >>> FrozenModule(torch.nn.ReLU(), outputs=2).transform([[-1.0, 2.0]])
    array([[0., 2.]], dtype=float32)
    """

    module: torch.nn.Module
    outputs: int
    input_shape: tuple[int, ...] | None = None
    rows_at_once: int = field(default=64, kw_only=True)
    kind: ClassVar[str] = "frozen-module"

    def dimension(self, columns: int) -> int:
        """The declared number of outputs."""
        if self.input_shape is not None and int(np.prod(self.input_shape)) != columns:
            raise InvalidInput(
                f"The records have {columns} numbers, which do not make an input of shape {self.input_shape}; correct "
                "the shape or the records."
            )
        return self.outputs

    def _batch_rows(self) -> int:
        return self.rows_at_once

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        shape = (-1,) if self.input_shape is None else self.input_shape
        outputs: torch.Tensor = self.module(batch.reshape(len(batch), *shape))
        if outputs.shape[0] != len(batch) or outputs[0].numel() != self.outputs:
            raise InvalidInput(
                f"The module returned values of shape {tuple(outputs.shape)} for {len(batch)} records, but "
                f"{self.outputs} per record were declared; correct the number of outputs."
            )
        return outputs.reshape(len(batch), -1).to(torch.float32)

    def _features(self, records: Floats) -> Floats:
        training = self.module.training
        self.module.eval()
        try:
            return super()._features(records)
        finally:
            self.module.train(training)

    def to_json(self) -> NoReturn:
        """Refused: a module's code cannot be written to a file that is safe to load."""
        raise InvalidInput(
            "A head on a frozen torch module cannot be saved, because its code cannot be stored safely; save the "
            "module yourself and build the head's features from it again."
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> NoReturn:  # noqa: ARG003
        """Refused, as `to_json` is."""
        raise InvalidInput(
            "A frozen torch module cannot be read from a file; build the feature map in Python."
        )
