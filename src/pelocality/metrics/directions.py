"""Companions of symmetry: how one-sided, and to which side."""

from __future__ import annotations

import torch
from torch import Tensor

from pelocality.metrics._inputs import Attention, checked, each_matrix
from pelocality.metrics._masks import Mask
from pelocality.metrics.published import checked_statistics, relative_asymmetry_of


def relative_asymmetry(attention: Attention, *, mask: Mask | None = None, rows: bool = False) -> Tensor:
    """Say which share of the weight around each position is not balanced by its mirror image.

        sum_ik |A[i,i-k] - A[i,i+k]| / sum_ik (A[i,i-k] + A[i,i+k]),  k = 1..min(i, n-1-i)

    Our companion to the published symmetry: continuous, so noise stays noise, and it says 1 where attention is
    causal. It answers "how large is the asymmetry", which the published scaling hides.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        mask: As for `locality`.
        rows: One value per query instead of one of all pairs together.

    Returns:
        (...), or (..., n) for rows: 0 symmetric, 1 one-sided; 0 where the pairs hold no weight.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Note:
        Only positions with a mirror image count, as in the published symmetry. What the first token sees far to its
        right has none.

    Examples:
        >>> import torch
        >>> position = torch.arange(16.0)
        >>> distance = position - position[:, None]
        >>> relative_asymmetry(torch.softmax(-0.1 * distance**2 + 0.2 * distance, -1))
        tensor(0.3541)
    """

    def kernel(flat: Tensor) -> Tensor:
        return relative_asymmetry_of(checked_statistics(flat), rows)

    return each_matrix(attention, kernel, mask=mask, layout="rows" if rows else "matrix")


def direction_balance(attention: Attention, *, mask: Mask | None = None, rows: bool = False) -> Tensor:
    """Say to which side the attention leans.

        (mass right of the diagonal - mass left of it) / mass off the diagonal

    Our companion: the sign that `symmetry` and `relative_asymmetry` do not have.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        mask: As for `locality`.
        rows: One value per query instead of one of the whole matrix.

    Returns:
        (...), or (..., n) for rows: -1 looks only back (causal), 0 balanced, 1 looks only ahead; 0 where nothing
        lies off the diagonal.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Note:
        All positions count, also those without a mirror image, so the first rows lean right and the last ones left
        even under uniform attention; over the whole matrix that cancels.

    Examples:
        >>> import torch
        >>> direction_balance(torch.ones(8, 8).tril() / torch.arange(1.0, 9.0)[:, None])
        tensor(-1.)
    """

    def kernel(flat: Tensor) -> Tensor:
        weights = checked(flat)
        left, right = weights.tril(-1).sum(-1), weights.triu(1).sum(-1)
        if not rows:
            left, right = left.sum(-1), right.sum(-1)
        off_diagonal = left + right
        return (right - left) / torch.where(off_diagonal > 0, off_diagonal, 1)

    return each_matrix(attention, kernel, mask=mask, layout="rows" if rows else "matrix")
