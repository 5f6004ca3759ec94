"""A uniform random real number, known to as many bits as a decision has needed so far."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from quietmax.noise.enclosure import Bounds

ReadBytes = Callable[[int], bytes]
"""Returns that many fresh random bytes."""


class LazyUniform:
    """A uniform number in (numerator, numerator + 1) / 2^bits, extended by further random bits on demand.

    The bits once drawn are kept, so all decisions taken with it are decisions about one real number: their
    joint law is exact. (Equality with a given number has probability 0 and leads to further bits.)
    """

    def __init__(self, numerator: int, bits: int, read: ReadBytes) -> None:
        self.numerator, self.bits, self._read = numerator, bits, read

    @property
    def lower(self) -> Fraction:
        """The largest number known to be below it."""
        return Fraction(self.numerator, 1 << self.bits)

    @property
    def upper(self) -> Fraction:
        """The smallest number known to be above it."""
        return Fraction(self.numerator + 1, 1 << self.bits)

    def extend(self) -> None:
        """Draw 64 more bits."""
        self.numerator = self.numerator << 64 | int.from_bytes(self._read(8), "little")
        self.bits += 64

    def is_below(self, enclose: Callable[[int], Bounds]) -> bool:
        """Decide whether it is below the number that `enclose(bits)` bounds ever more closely."""
        while True:
            low, high = enclose(self.bits + 8)
            if self.upper <= low:
                return True
            if self.lower >= high:
                return False
            self.extend()
