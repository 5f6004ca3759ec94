"""Building an ONNX graph, operation by operation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import DataUnavailable

OPSET, IR_VERSION = 20, 9
"""Version of the standard operators, the first with regular expressions, and of the file format that belongs to it."""

_TYPES = {np.float32: "FLOAT", np.float64: "DOUBLE", np.int64: "INT64", np.bool_: "BOOL", np.str_: "STRING"}


def _require_onnx() -> Any:
    """Import the package onnx."""
    try:
        import onnx
    except ImportError:
        raise DataUnavailable(
            "An export to ONNX requires the package onnx. Install: pip install 'quietmax[onnx]'."
        ) from None
    return onnx


class Graph:
    """An ONNX graph under construction. Values are known by their names."""

    def __init__(self, reserved: Collection[str]) -> None:
        self._onnx = _require_onnx()
        self._reserved = set(reserved)
        self._count = 0
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(
        self, operator: str, *inputs: str | NDArray[Any] | np.generic, outputs: int = 1, **attributes: Any
    ) -> str:
        """Add an operation and return the name of its first output."""
        results = [self._name() for _ in range(outputs)]
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        self.nodes.append(self._onnx.helper.make_node(operator, names, results, **attributes))
        return results[0]

    def output(self, value: str, name: str) -> None:
        """Give a value the name of an output."""
        self.nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))

    def cast(self, value: str, kind: type) -> str:
        """Return a value as another type."""
        return self("Cast", value, to=self.type_of(kind))

    def type_of(self, kind: type) -> int:
        """Return the number by which ONNX knows a type."""
        return int(getattr(self._onnx.TensorProto, _TYPES[kind]))

    def trunc(self, value: str) -> str:
        """Round towards zero; ONNX has no operator for it."""
        return self("Mul", self("Sign", value), self("Floor", self("Abs", value)))

    def columns(self, value: str) -> str:
        """Return a vector as a matrix of one column."""
        return self("Unsqueeze", value, np.array([1]))

    def side_by_side(self, values: list[str]) -> str:
        """Join matrices of the same number of rows."""
        return values[0] if len(values) == 1 else self("Concat", *values, axis=1)

    def any_of(self, values: list[str]) -> str:
        """Return where at least one of several booleans holds."""
        result = values[0]
        for value in values[1:]:
            result = self("Or", result, value)
        return result

    def unit(self, rows: str, floor: float) -> str:
        """Return rows divided by their length, or by the floor where that is larger."""
        squares = self("ReduceSumSquare", rows, np.array([1]), keepdims=1)
        return self("Div", rows, self("Max", self("Sqrt", squares), np.array([floor], np.float32)))

    def _name(self) -> str:
        """Return a name that nothing has yet."""
        while (name := f"value {self._count + 1}") in self._reserved:
            self._count += 1
        self._count += 1
        return name

    def _constant(self, value: ArrayLike) -> str:
        """Add a constant and return its name."""
        array, name = np.asarray(value), self._name()
        if array.dtype.kind == "U":
            strings = [each.encode() for each in array.ravel().tolist()]
            kind = self.type_of(np.str_)
            self.constants.append(self._onnx.helper.make_tensor(name, kind, array.shape, strings))
        else:
            self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name
