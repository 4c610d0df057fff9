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
        guess: Whether a row whose weights are all of half precision, converted to another dtype, has its tolerance.
    """

    base: float | Tensor
    per_nat: float | Tensor = 0.0
    guess: bool = False

    @classmethod
    def for_dtype(cls, dtype: torch.dtype, rtol: float | None = None, *, guess: bool = False) -> Self:
        """Return the tolerance for attention of a dtype, or ``rtol`` for every row.

        The default is 8 eps (2 eps in half precision, whose weights are rounded once), and 1024 eps per nat with at
        most the eps of float32, in which the softmax of half precision is computed.
        """
        if rtol is None:
            working = torch.promote_types(dtype, torch.float32)
            base = (8 if dtype == working else 2) * torch.finfo(dtype).eps
            return cls(base, 1024 * torch.finfo(working).eps, guess and dtype == working)
        base = number("rtol", rtol)
        if not base >= 0:
            raise ValueError(f"rtol must be at least 0, got {rtol}; use None for the default of the dtype")
        return cls(base)

    def of_rows(self, rows: Tensor) -> Self:
        """Return the tolerance of each of the rows (..., n), with terms (...) where it is guessed."""
        if not self.guess:
            return self
        bits = rows.detach().view(torch.int64 if rows.dtype == torch.float64 else torch.int32)
        base, per_nat = rows.new_tensor(self.base), rows.new_tensor(self.per_nat)
        for lacked, half in LACKED_DIGITS.items():
            lacked += 29 if rows.dtype == torch.float64 else 0
            of_half = (bits & ((1 << lacked) - 1) == 0).all(-1)
            base, per_nat = torch.where(of_half, half.base, base), torch.where(of_half, half.per_nat, per_nat)
        return type(self)(base, per_nat)

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


OF_FLOAT16, OF_BFLOAT16 = Tolerance.for_dtype(torch.float16), Tolerance.for_dtype(torch.bfloat16)
# How many of the digits of float32 half precision lacks; whoever lacks more comes last.
LACKED_DIGITS = {13: OF_FLOAT16, 16: OF_BFLOAT16}


def row_faults(rows: Tensor) -> Tensor:
    """Return by how much each row (..., n) misses a sum of 1, (...), without gradient.

    0 where that may be rounding in the dtype of the rows; infinity where a weight is negative.
    """
    weights, dtype = rows.detach(), torch.promote_types(rows.dtype, torch.float32)
    off = (weights.sum(-1, dtype=dtype) - 1).abs()
    off = torch.where(off <= ROW_SUM_TOLERANCE[rows.dtype], 0, off)
    return torch.where(weights.amin(-1) < 0, torch.inf, off)


def check_rows(faults: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless every row is a probability distribution.

    Args:
        faults: Of all rows, see `row_faults`.
        weights: (batch, m, n), whose precision determines how exactly a row must sum to 1.
    """
    off = faults.amax().item() if faults.numel() else 0
    if off == 0 or off <= (tolerance := ROW_SUM_TOLERANCE[precision_of(weights)]):
        return
    if not bool(weights.isfinite().all()):
        raise ValueError("attention contains NaN or infinity; if all keys of a row are masked, leave it out with mask=")
    if (least := weights.amin().item()) < 0:
        advice = "take .softmax(-1) of logits, and measure_absolute for a table of position embeddings"
        raise ValueError(f"attention must not be negative, the smallest weight is {least:.3g}; {advice}")
    advice = "take .softmax(-1) of logits, call model.eval() against dropout, leave empty rows out with mask="
    if bool((row_faults(weights.mT) <= tolerance).all()):
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
