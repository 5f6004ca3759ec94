"""One number of the paper beside ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """``agrees`` states whether ours meets the stated tolerance; ``note`` explains a known difference."""

    dataset: str
    quantity: str
    paper: float
    ours: float
    agrees: bool
    note: str = ""
    spread: float | None = None

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return self.ours - self.paper

    def to_json(self) -> dict[str, Any]:
        """All fields and the difference."""
        return asdict(self) | {"difference": self.difference}
