"""The row pass of ``rows`` in operations that autograd differentiates any number of times, at the price of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pelocality.metrics._tolerance import ABSOLUTE_FLOOR, Tolerance


def plain_statistics(flat: Tensor, pairs: bool, tolerance: Tolerance) -> tuple[Tensor, ...]:
    """Measure every row of (batch, n, n).

    Args:
        flat: (batch, n, n), float.
        pairs: Also compare left with right.
        tolerance: Relative range up to which a row counts as constant.

    Returns:
        Total and locality, and with pairs irregularity, difference and paired mass, as in `rows.RowStatistics`, each
        (batch, n).
    """
    weights = flat.to(torch.promote_types(flat.dtype, torch.float32))
    n = flat.shape[-1]
    i = torch.arange(n, device=flat.device)[:, None]
    total, locality = weights.sum(-1), (weights * torch.exp2(-(i - i.T).abs().to(weights.dtype))).sum(-1)
    if not pairs:
        return total, locality
    k = torch.arange(1, max(2, (n + 1) // 2), device=flat.device)
    own = (k <= torch.minimum(i, n - 1 - i)).to(weights.dtype)  # (n, k), 1 where row i has a pair at distance k
    lift = 4 * (1 - own)  # elsewhere: more than any weight
    left, right = (
        weights.gather(-1, column.clamp(0, n - 1).expand(len(flat), -1, -1)) * own for column in (i - k, i + k)
    )
    d = (left - right).abs()
    low, high = (d + lift).amin(-1), d.amax(-1)
    largest = torch.maximum(left, right).amax(-1)
    least = (torch.minimum(left, right) + lift).amin(-1)
    spread = high - low  # negative in rows without pairs
    constant = spread <= tolerance.times(largest, least).clamp(min=ABSOLUTE_FLOOR)
    excess = ((d - low[..., None]) * own).sum(-1)
    irregularity = torch.where(constant, 0, excess / torch.where(constant, 1, spread))
    return total, locality, irregularity, d.sum(-1), (left + right).sum(-1)
