"""The row pass of ``_row_pass`` in operations that autograd differentiates any number of times; needs more memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pelocality.metrics._tolerance import Tolerance


def plain_statistics(flat: Tensor, pairs: bool, tolerance: Tolerance) -> tuple[Tensor, ...]:
    """Measure every row of (batch, n, n).

    Args:
        flat: (batch, n, n), float.
        pairs: Also compare left with right.
        tolerance: Relative range up to which a row counts as constant.

    Returns:
        Total and locality, with pairs also irregularity, difference and paired mass, as in `RowStatistics`, each
        (batch, n).
    """
    weights = flat.to(torch.promote_types(flat.dtype, torch.float32))
    n = flat.shape[-1]
    i = torch.arange(n, device=flat.device)[:, None]
    total, locality = weights.sum(-1), (weights * torch.exp2(-(i - i.T).abs().to(weights.dtype))).sum(-1)
    if not pairs:
        return total, locality
    k = torch.arange(1, max(2, (n + 1) // 2), device=flat.device)
    valid = (k <= torch.minimum(i, n - 1 - i)).to(weights.dtype)  # (n, k), 1 where row i has a pair at distance k
    penalty = 4 * (1 - valid)  # above any weight
    left, right = (
        weights.gather(-1, column.clamp(0, n - 1).expand(len(flat), -1, -1)) * valid for column in (i - k, i + k)
    )
    d = (left - right).abs()
    low, high = (d + penalty).amin(-1), d.amax(-1)
    largest = torch.maximum(left, right).amax(-1)
    smallest = (torch.minimum(left, right) + penalty).amin(-1)
    excess = ((d - low[..., None]) * valid).sum(-1)
    # in rows without pairs high - low is negative
    irregularity = tolerance.irregularity(excess, high - low, largest, smallest)
    return total, locality, irregularity, d.sum(-1), (left + right).sum(-1)
