"""How monotone the alignment of queries and keys is: of cross-attention in speech and translation, or of decoding."""

import torch
from torch import Tensor

from pelocality.metrics._inputs import Attention, Matrices, PositionsLike, map_matrices, validated_weights
from pelocality.metrics._masks import Mask
from pelocality.metrics._ratio import ratio
from pelocality.positions import Positions


def diagonality(
    attention: Attention, *, positions: PositionsLike | None = None, mask: Mask | None = None, without_first: int = 0
) -> Tensor:
    """Return how often a later query attends to a later key.

        (C - D) / (C + D),  C = sum over i < i', j < j' of A_ij A_i'j',  D = sum over i < i', j > j' of A_ij A_i'j'

    This is Goodman and Kruskal's gamma of the attention of two queries. C is the chance that a later query attends to a
    later key (concordant), and D the chance that it attends to an earlier key. Speech recognition and translation
    expect monotonic alignments. Only the order counts, so an alignment whose speed changes is still monotone.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`; queries need not be the keys.
        positions: Coordinates with one axis, if queries and keys are not in order. None: the positions of a result, or
            else queries and keys are in order.
        mask: As for `locality`, if queries are the keys.
        without_first: As for `locality`, if queries are the keys.

    Returns:
        (...): 1 for a monotone alignment, -1 for a reversed alignment, 0 if order does not matter (uniform attention).
        NaN if all queries attend to the same key.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or positions without directions or of packed sequences.

    Note:
        A causal mask alone raises the value: causal uniform attention scores 0.52 at n = 64.

    Examples:
        >>> frames, tokens = torch.arange(6), torch.tensor([0, 0, 1, 3, 3, 3])
        >>> steps = torch.zeros(6, 4)
        >>> steps[frames, tokens] = 1.0
        >>> diagonality(steps), diagonality(steps.flip(0))
        (tensor(1.), tensor(-1.))
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = validated_weights(matrices.weights)
        exact = _in_order(weights.double(), matrices.positions)
        later, before = exact[:, 1:], exact.cumsum(-2)[:, :-1]  # a query, and the attention of all earlier ones, by key
        concordant = (later[..., 1:] * before.cumsum(-1)[..., :-1]).sum((-1, -2))
        discordant = (before[..., 1:] * later.cumsum(-1)[..., :-1]).sum((-1, -2))
        return ratio(concordant - discordant, concordant + discordant, torch.nan).to(weights.dtype)

    return map_matrices(attention, kernel, positions, mask, without_first, any_shape=True)


def _in_order(weights: Tensor, positions: Positions | None) -> Tensor:
    """Return weights (batch, m, n) with queries and keys in their order, those at one place added."""
    if positions is None:
        return weights
    if positions.sequence is not None:
        raise ValueError("positions of packed sequences have no common order; measure one sequence at a time")
    for axis, which in ((1, "queries"), (2, "keys")):
        number = positions.order_of(which).to(weights.device)
        weights = torch.zeros_like(weights).index_add(axis, number, weights)  # zeros behind the last place
    return weights
