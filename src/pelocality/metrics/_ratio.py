"""Quotients and means of weights that may be 0."""

import torch
from torch import Tensor


def ratio(part: Tensor, whole: Tensor, otherwise: float = 0.0) -> Tensor:
    """Return part / whole for whole >= 0, and ``otherwise``, without a gradient, where the whole is 0."""
    quotient = part / torch.where(whole == 0, 1, whole)
    return torch.where(whole == 0, otherwise, quotient)


def masked_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen rows of each matrix, (batch, n) -> (batch,); NaN where no row is chosen."""
    return ratio(torch.where(chosen, values, 0).sum(-1), chosen.sum(-1), torch.nan)
