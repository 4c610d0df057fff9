"""Metrics complementary to symmetry: how one-sided the attention is, and to which side."""

from torch import Tensor

from pelocality.metrics._by_position import offsets, row_sums, sum_over_keys, weights_by_position
from pelocality.metrics._inputs import Attention, Matrices, PositionsLike, map_matrices
from pelocality.metrics._masks import Mask
from pelocality.metrics._ratio import ratio


def relative_asymmetry(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return which share of the weight around each position is not balanced by its mirror image.

        sum_ik |A[i,i-k] - A[i,i+k]| / sum_ik (A[i,i-k] + A[i,i+k]),  k = 1..min(i, n-1-i)

    This metric is ours. It complements the published symmetry: it is continuous, so small noise has a small effect, and
    it is 1 for causal attention. It measures how large the asymmetry is, which the published scaling hides.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `symmetry`.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: Return one value per query instead of one value for all pairs.

    Returns:
        (...), or (..., n) for rows: 0 symmetric, 1 one-sided; 0 where the pairs hold no weight, also where there are
        none (fewer than three positions, the first and the last row), of which `symmetry` is NaN.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Note:
        Only pairs of keys at equal distance count, as in the published symmetry; the keys far to the right of the
        first token have no counterpart.

    Examples:
        >>> import torch
        >>> position = torch.arange(16.0)
        >>> distance = position - position[:, None]
        >>> relative_asymmetry(torch.softmax(-0.1 * distance**2 + 0.2 * distance, -1))
        tensor(0.3541)
    """

    def kernel(matrices: Matrices) -> Tensor:
        sums = row_sums(matrices)
        return ratio(*sums.numbers[3:5]) if rows else sums.pooled()[2]

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)


def direction_balance(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return which side of the diagonal has more attention.

        (mass right of the diagonal - mass left of it) / mass off the diagonal

    Ours: the sign that `symmetry` and `relative_asymmetry` do not have.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`, with one coordinate, which says what lies left and right.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: Return one value per query instead of one value for the whole matrix.

    Returns:
        (...), or (..., n) for rows: -1 all weight in the past (causal), 0 balanced, 1 all in the future; 0 where
        the diagonal holds all weight.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or positions without directions.

    Note:
        All keys count, also keys without a counterpart on the other side. So even under uniform attention, the first
        rows have more weight on the right and the last rows on the left. Over the whole matrix this cancels.

    Examples:
        >>> import torch
        >>> direction_balance(torch.ones(8, 8).tril() / torch.arange(1.0, 9.0)[:, None])
        tensor(-1.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = weights_by_position(matrices)
        left = sum_over_keys(weights, lambda block: offsets(matrices, block) < 0)
        right = sum_over_keys(weights, lambda block: offsets(matrices, block) > 0)
        if not rows:
            left, right = left.sum(-1), right.sum(-1)
        return ratio(right - left, left + right)

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)
