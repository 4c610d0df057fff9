"""When a row counts as constant, and so as perfectly symmetric, in floating point.

For R = max d - min d and s the largest weight among the row's pairs:

    a row counts as constant  <=>  R <= max(10 eps64, rtol * s)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ABSOLUTE_FLOOR = 10 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Tolerance:
    """The relative range of d up to which a row counts as constant: what a softmax's own rounding can make of it.

        rtol = flat + per_nat * min(1, ln(s / l)),  s and l the largest and the smallest weight among the row's pairs

    Exponential, sum and division leave a few eps in every weight; rounded logits leave an error in proportion to the
    logits, whose range within the row is ln(s / l).

    Args:
        flat: The part every row has.
        per_nat: The part of a row whose weights span a factor of e or more.
    """

    flat: float
    per_nat: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, rtol: float | None = None) -> Tolerance:
        """Give the tolerance for attention of some precision.

        Args:
            dtype: Of the attention.
            rtol: One number for every row, or None for 8 eps and 1024 eps per nat, where the softmax of half
                precision has the eps of float32 inside.

        Returns:
            The tolerance.

        Raises:
            ValueError: A negative rtol, or NaN.
        """
        if rtol is None:
            working = torch.promote_types(dtype, torch.float32)
            return cls(8 * torch.finfo(dtype).eps, 1024 * torch.finfo(working).eps)
        if not rtol >= 0:
            raise ValueError(f"rtol must be at least 0, got {rtol}; leave it None for the dtype's own")
        return cls(rtol)

    @property
    def most(self) -> float:
        """The largest it can be for any row."""
        return self.flat + self.per_nat

    def times(self, largest: Tensor, least: Tensor) -> Tensor:
        """Return the largest R of a constant row, rtol * s.

        Args:
            largest: s, any shape.
            least: l, of the same shape.

        Returns:
            Of the same shape.
        """
        tiny = torch.finfo(largest.dtype).tiny
        nats = (largest.clamp(min=tiny) / least.clamp(min=tiny)).log().clamp(max=1)
        return (self.flat + self.per_nat * nats) * largest
