"""The steps of attention from key to key: what one layer can tell of the order of two neighbours."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from pelocality.metrics._by_position import offsets, sum_by, weights_by_position
from pelocality.metrics._inputs import Attention, Matrices, map_matrices
from pelocality.metrics._masks import Mask
from pelocality.metrics._ratio import ratio
from pelocality.metrics._row_pass import row_blocks


def step_balance(
    attention: Attention, *, mask: Mask | None = None, without_first: int = 0, rows: bool = False
) -> Tensor:
    """Return on which side of the diagonal attention steps more from key to key.

        (R - L) / (R + L),  R = sum_i sum_{j > i} (A[i,j] - A[i,j+1])^2,  L = sum_i sum_{j < i} (A[i,j] - A[i,j-1])^2

    This metric is ours. If two neighbours exchange places, the output of an attention layer moves by the step between
    them times the difference of their values. So the order of tokens is read on the steep side, which need not be the
    side with more weight, `direction_balance`. ``order_use`` measures the same by intervention, through whole models.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: Return one value per query instead of one value for the whole matrix.

    Returns:
        (...), or (..., n) for rows: -1 all steps in the past (causal), 0 balanced, 1 all in the future; 0 where
        neither side has a step.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or a result whose tokens have positions of their own.

    Note:
        Steps to and from the query itself do not count. The edge of a sliding window, and a sink, is a step.

    Examples:
        >>> import torch
        >>> weights = torch.ones(8, 8).triu()  # as much to every later token
        >>> weights += 2 * torch.eye(8).roll(-1, -1).tril()  # and to the token just before
        >>> attention = weights / weights.sum(-1, keepdim=True)
        >>> step_balance(attention)
        tensor(-1.)
        >>> from pelocality import direction_balance
        >>> direction_balance(attention)
        tensor(0.1879)
    """

    def kernel(matrices: Matrices) -> Tensor:
        squared_steps, sums = _squared_steps(matrices), []
        for block in row_blocks(matrices.weights):
            steps, offset = squared_steps(block), offsets(matrices, block)
            sums.append(torch.stack([(steps * side).sum(-1) for side in (offset < 0, offset > 0)]))
        by_query = torch.cat(sums, -1)  # (2, batch, n)
        left, right = by_query if rows else by_query.sum(-1)
        return ratio(right - left, left + right)

    return map_matrices(attention, kernel, None, mask, without_first, rows=rows)


def step_profile(attention: Attention, *, mask: Mask | None = None, without_first: int = 0) -> Tensor:
    """Return the mean squared step of attention from key to key at every signed distance of the nearer one.

        p(k) = mean_i (A[i,i+k] - A[i,i+k+1])^2,  p(-k) = mean_i (A[i,i-k] - A[i,i-k-1])^2,  k = 1..n-2

    This metric is ours; see `step_balance`. Heads with large steps count most in a layer: ``step_profile(A).sum(1)`` of
    (layer, head, n, n) is that of the layer, up to the size of the values.

    Args:
        attention: As for `step_balance`.
        mask: As for `locality`; distances beyond the counting tokens are NaN.
        without_first: As for `locality`.

    Returns:
        (..., 2n-1), p(k) at index k + n - 1 as in `distance_profile`, each between 0 and 1; NaN at distance 0, where
        the query itself is, and at n - 1, behind which there is no key.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `step_balance`.

    Examples:
        >>> import torch
        >>> step_profile(torch.eye(4).roll(-1, -1)[[1, 1, 2, 3]])  # each on the token before it
        tensor([nan, 0., 1., nan, 0., 0., nan])
    """

    def kernel(matrices: Matrices) -> Tensor:
        sums = sum_by(matrices, None, _squared_steps(matrices))
        distance = offsets(matrices, slice(0, 1)).abs()[0].to(sums.dtype)  # 0 .. n-1
        pairs = torch.where(distance > 0, distance.flip(0), 0)
        return ratio(sums, torch.cat([pairs[1:].flip(0), pairs]), torch.nan)

    return map_matrices(attention, kernel, None, mask, without_first, layout="offsets")


def _squared_steps(matrices: Matrices) -> Callable[[slice], Tensor]:
    """Return a function from some queries to their squared steps from each key to the next one out, (batch, rows, n).

    The weights are validated once, for all of its calls.
    """
    if matrices.positions is not None:
        raise ValueError("steps are between neighbours on a line of tokens, and these have positions of their own")
    weights = weights_by_position(matrices)

    def steps_of(rows: slice) -> Tensor:
        steps, offset = weights[:, rows].diff(dim=-1).square(), offsets(matrices, rows)
        return torch.where(offset < 0, pad(steps, (1, 0)), pad(steps, (0, 1))) * (offset != 0)

    return steps_of
