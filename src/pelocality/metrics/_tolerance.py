"""How far rounding may move the sum of a row from 1, and which rows of d count as constant.

For R = max d - min d and s the largest weight among the row's pairs:

    a row counts as constant  <=>  R <= max(10 eps64, rtol * s)

A constant row is perfectly symmetric.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from pelocality._checks import number

# The largest |sum of a row - 1| that counts as rounding: a distribution need not come from a softmax in its own dtype.
ROW_SUM_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
HALF = (torch.float16, torch.bfloat16)
ABSOLUTE_FLOOR = 10 * torch.finfo(torch.float64).eps


class Tolerance(NamedTuple):
    """The relative range of d up to which a row counts as constant: the rounding of a softmax and of its logits.

        rtol = base + per_nat * min(1, ln(s / l)),  s and l the largest and the smallest weight among the row's pairs

    Exponential, sum and division leave an error of a few eps in every weight; rounded logits leave an error
    proportional to the logits, whose range within the row is ln(s / l).

    Attributes:
        base: The term of every row.
        per_nat: The term of a row whose weights span a factor of e or more.
    """

    base: float
    per_nat: float = 0.0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype, rtol: float | None = None) -> Self:
        """Return the tolerance for attention of a dtype, or ``rtol`` for every row.

        The default is 8 eps (2 eps in half precision, whose weights are rounded once), and 1024 eps per nat with at
        most the eps of float32, in which the softmax of half precision is computed.
        """
        if rtol is None:
            working = torch.promote_types(dtype, torch.float32)
            return cls((8 if dtype == working else 2) * torch.finfo(dtype).eps, 1024 * torch.finfo(working).eps)
        base = number("rtol", rtol)
        if not base >= 0:
            raise ValueError(f"rtol must be at least 0, got {rtol}; use None for the default of the dtype")
        return cls(base)

    def irregularity(
        self, excess: Tensor, spread: Tensor, largest: Tensor, smallest: Tensor, floor: float | Tensor = ABSOLUTE_FLOOR
    ) -> Tensor:
        """Return excess / spread, sum_k (d_k - min d) / R, for every row; 0 where the row counts as constant.

        Args:
            excess: sum_k (d_k - min d), any shape, as all others.
            spread: R.
            largest: The largest weight s among the row's pairs.
            smallest: The smallest weight l among them.
            floor: Absolute range up to which a row counts as constant.
        """
        tiny = torch.finfo(largest.dtype).tiny
        nats = (largest.clamp(min=tiny) / smallest.clamp(min=tiny)).log().clamp(max=1)
        threshold = (self.base + self.per_nat * nats) * largest
        constant = spread <= torch.clamp(threshold, min=floor)
        # 1 + ...: the gradient of two pairs, whose quotient is always 1, is then exactly 0
        return torch.where(constant, 0, 1 + (excess - spread) / torch.where(constant, 1, spread))


def check_rows(totals: Tensor, smallest: float, weights: Tensor) -> None:
    """Raise ValueError unless every row is a probability distribution.

    Args:
        totals: The sum of every row, any shape.
        smallest: The smallest weight of all, or 0 if none is negative.
        weights: (..., m, n), whose precision determines how exactly a row must sum to 1.
    """
    if not bool(torch.isfinite(totals).all()):
        raise ValueError("attention contains NaN or infinity; if all keys of a row are masked, leave it out with mask=")
    if smallest < 0:
        raise ValueError(f"attention must not be negative, the smallest weight is {smallest:.3g}; apply .softmax(-1)?")
    off = (totals - 1).abs().max().item() if totals.numel() else 0.0
    if off <= ROW_SUM_TOLERANCE[weights.dtype] or off <= (tolerance := ROW_SUM_TOLERANCE[precision_of(weights)]):
        return
    advice = "take .softmax(-1) of logits, call model.eval() against dropout, leave empty rows out with mask="
    columns = weights.detach().sum(-2, dtype=totals.dtype)
    if bool(((columns - 1).abs() <= tolerance).all()):
        advice = "its columns do: transpose it, rows are queries"
    raise ValueError(f"attention rows must sum to 1, one is off by {off:.3g}; {advice}")


def precision_of(weights: Tensor) -> torch.dtype:
    """Return half precision for weights that were converted from it, as for numpy, otherwise their own dtype.

    Args:
        weights: (batch, n, n).
    """
    rows = weights.detach()
    for half in (torch.bfloat16, torch.float16) if rows.numel() and rows.dtype not in HALF else ():
        # the last rows decide nearly always; the first one of a causal matrix is 1 and zeros in every precision
        if all(bool((part.to(half) == part).all()) for part in (rows[:, -1], *torch.split(rows, 64))):
            return half
    return weights.dtype
