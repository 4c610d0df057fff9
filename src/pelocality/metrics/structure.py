"""Metrics of the kind of matrix: Toeplitz, monotone in distance, concentrated, with a sink; `crop` leaves one out."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pelocality._checks import count
from pelocality.metrics._by_position import (
    of_each_key,
    offsets,
    seen_keys,
    sum_by,
    visible_counts,
    weights_by_position,
)
from pelocality.metrics._inputs import (
    Attention,
    Matrices,
    PositionsLike,
    map_matrices,
    map_with_visible,
    validated_weights,
)
from pelocality.metrics._masks import Mask, Visible
from pelocality.metrics._ratio import masked_mean, ratio
from pelocality.metrics._row_pass import row_blocks
from pelocality.positions import Positions


def toeplitz_share(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    causal: bool | None = None,
    visible: Visible | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
) -> Tensor:
    """Return how much of the matrix is a function of the signed distance i - j alone.

        1 - sum_ij (A_ij - p(j-i))^2 / sum_ij (A_ij - mean A)^2,  p the mean of each diagonal

    This metric is ours: the share of variance that the diagonals explain. Only visible keys count, because hidden zeros
    would be explained trivially. In a matrix without weight above the diagonal, these are the lower half.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`. Weights are then compared by the vector from query to key, and on a line with
            rings by the rounded distance.
        causal: Whether a query sees only its past. None: each matrix without weight above its diagonal is causal.
        visible: As for `adjusted_locality`.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        (...), between 0 and 1: 1 where every diagonal is constant, such as for uniform attention.

    Raises:
        TypeError: As for `adjusted_locality`.
        ValueError: As for `adjusted_locality`.

    Warns:
        UserWarning: Only some of the matrices count as causal.

    Note:
        A relative bias does not score exactly 1, because the softmax normalises over fewer keys near the ends.

    Examples:
        >>> import torch
        >>> toeplitz_share(torch.eye(5))
        tensor(1.)
        >>> toeplitz_share(torch.eye(5)[[0] * 5])
        tensor(0.1850)
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights, seen = weights_by_position(matrices), seen_keys(matrices)
        positions, n, group, groups = matrices.positions, weights.shape[-1], None, 0
        if positions is not None:
            rounded = positions.ring is not None and positions.has_directions
            group = partial(positions.steps if rounded else positions.displacements_of, device=weights.device)
            groups = len(positions.profile_distances) if rounded else positions.displacement_count

        def values(rows: slice) -> Tensor:
            inside = seen(rows)
            return torch.cat([weights[:, rows] * inside, inside.to(weights.dtype)])

        sums = sum_by(matrices, group, values, groups)
        sums, counts = sums[: len(weights)], sums[len(weights) :]
        mean, profile = sums.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True), ratio(sums, counts)
        between = (counts * (profile - mean).square()).sum(-1)
        within = torch.zeros_like(between)
        for rows in row_blocks(weights):
            expected = of_each_key(matrices, group, profile.to(weights.dtype), rows)
            within = within + ((weights[:, rows] - expected) * seen(rows)).square().sum((-1, -2))
        total = within + between
        rounding = (16 * n * torch.finfo(weights.dtype).eps * mean[:, 0]) ** 2  # a few eps in each weight
        share = torch.where(total <= rounding, 1, between / torch.where(total <= rounding, 1, total))
        return share.to(weights.dtype)

    return map_with_visible(attention, kernel, positions, mask, without_first, causal=causal, visible=visible)


def monotonicity(
    attention: Attention, *, positions: PositionsLike | None = None, mask: Mask | None = None, without_first: int = 0
) -> Tensor:
    """Return how often attention does not grow from one token to its neighbour further away, on either side.

        past:   share of (i, k) with A[i, i-k] >= A[i, i-k-1]
        future: share of (i, k) with A[i, i+k] >= A[i, i+k+1],  k >= 0

    In the spirit of Wang et al. (ICLR 2021), who study it for position embeddings; this definition is ours.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`. The mean weight of keys at the next distance that occurs is then compared.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        (..., 2), past and future, between 0 and 1; about 0.5 for noise. NaN for a side without weight (the
        future of a causal matrix) or without such a pair. With positions that have no past, (..., 1). Not
        differentiable.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Note:
        Keys hidden by a sliding window have weight 0, which does not grow: such pairs count as monotone.

    Examples:
        >>> import torch
        >>> position = torch.arange(8.0)
        >>> monotonicity(torch.softmax(-(position - position[:, None]).abs(), -1))
        tensor([1., 1.])
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = weights_by_position(matrices._replace(weights=matrices.weights.detach()))
        if (positions := matrices.positions) is not None:
            signs = (-1, 1) if positions.has_directions else (1,)
            by_side = [_side_by_ring(matrices, positions, weights, sign) for sign in signs]
            return torch.stack(by_side, -1).to(weights.dtype)
        n = weights.shape[-1]
        growing, held = [], []
        for rows in row_blocks(weights):
            part, offset = weights[:, rows], offsets(matrices, rows)
            left, right, to_left = part[..., :-1], part[..., 1:], offset[:, :-1]
            sides = ((right < left) & (to_left < 0), (right > left) & (to_left >= 0))
            growing.append(torch.stack([side.sum((-1, -2)) for side in sides], -1))
            held.append(torch.stack([((part > 0) & side).flatten(1).any(1) for side in (offset < 0, offset > 0)], -1))
        shares = 1 - torch.stack(growing).sum(0).double() / (n * (n - 1) / 2 or 1)
        return torch.where(torch.stack(held).any(0), shares, torch.nan).to(weights.dtype)

    return map_matrices(attention, kernel, positions, mask, without_first)


def _side_by_ring(matrices: Matrices, positions: Positions, weights: Tensor, sign: int) -> Tensor:
    """Return `monotonicity` of the past (-1), or of the future or all keys (1), (batch,), from ring to ring of keys."""
    rising = mass_beyond = weights.new_zeros(len(weights), dtype=torch.float64)
    followed = torch.zeros((), dtype=torch.int64, device=weights.device)
    for rows in row_blocks(weights):
        step, last = positions.steps(rows, weights.device), len(positions.profile_distances)
        other_side = offsets(matrices, rows) * sign < 0 if positions.has_directions else False
        hidden = (step == last) | other_side
        ordered, order = (step - positions.here).abs().masked_fill(hidden, last).sort(-1)
        rank = (ordered.diff(dim=-1, prepend=ordered[:, :1]) > 0).cumsum(-1)
        ring = torch.empty_like(order).scatter_(-1, order, rank)  # among the rings that occur around a query
        part = weights[:, rows].masked_fill(hidden, 0).double()
        mass = part.new_zeros(*part.shape[:-1], int(ring.max()) + 1).scatter_add(-1, ring.expand(part.shape), part)
        numbers = torch.zeros_like(mass[0]).scatter_add(-1, ring, (~hidden).double())
        mean, follows = ratio(mass, numbers), numbers[:, 1:] > 0
        rounding = 1 - 8 * torch.finfo(torch.float64).eps  # means of equal weights may differ by rounding
        rising = rising + ((mean[..., :-1] < mean[..., 1:] * rounding) & follows).sum((-1, -2))
        mass_beyond = mass_beyond + (mass[..., 1:] * follows).sum((-1, -2))
        followed = followed + follows.sum()
    return torch.where(mass_beyond > 0, 1 - rising / followed.clamp(min=1), torch.nan)


def entropy(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    causal: bool | None = None,
    visible: Visible | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return how evenly each token spreads its attention over the keys it can see.

        mean_i [ -sum_j A_ij ln A_ij / ln s_i ],  s_i visible keys

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`; queries need not be the keys.
        positions: As for `locality`. They only decide which keys are visible, in packed sequences or if the queries are
            not the keys.
        causal: Whether query i sees only its i + 1 first keys (s_i = i + 1) or all (s_i = n). None: each matrix
            without weight above its diagonal counts as causal.
        visible: As for `adjusted_locality`.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: One value per query; NaN for a query with one visible key, which the mean leaves out.

    Returns:
        (...), or (..., n) for rows: 0 if all attention is on one key, 1 if it is uniform over the visible keys. If a
        row sums to more than 1, the value may exceed 1 (bfloat16: up to 1.01). NaN for a single position.

    Raises:
        TypeError: As for `adjusted_locality`.
        ValueError: As for `adjusted_locality`.

    Warns:
        UserWarning: Only some of the matrices count as causal.

    Note:
        The true slope at a weight of 0 is infinite. The gradient is set to 0 there, so that it stays finite for masked
        keys.

    Examples:
        >>> import torch
        >>> entropy(torch.full((8, 8), 1 / 8))
        tensor(1.0000)
        >>> entropy(torch.eye(8))
        tensor(0.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = weights_by_position(matrices)
        support = visible_counts(matrices)
        parts = (weights[:, rows] for rows in row_blocks(weights))
        # The gradient at a weight of 0 is that of 1, 0.
        nats = torch.cat([torch.special.entr(torch.where(part > 0, part, 1)).sum(-1) for part in parts], -1)
        values, choice = normalised_entropy(nats, support)
        return torch.where(choice, values, torch.nan) if rows else masked_mean(values, choice)

    sees: dict[str, Any] = {"causal": causal, "visible": visible}
    return map_with_visible(attention, kernel, positions, mask, without_first, **sees, rows=rows, any_shape=True)


def normalised_entropy(nats: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's entropy relative to that of its visible keys' number, and which rows see more than one key."""
    choice = support > 1
    return nats / torch.where(choice, support, 2).log().to(nats.dtype), choice


def sink_rate(
    attention: Attention, sinks: int = 1, *, mask: Mask | None = None, without_first: int = 0, rows: bool = False
) -> Tensor:
    """Return which share of the attention falls on the first keys.

        mean_{i >= s} sum_{j < s} A_ij,  s = sinks

    A head with a large rate has an attention sink (Xiao et al. 2023, Gu et al. 2024). `crop(A, sinks)` is its other
    attention, renormalised. The rows of the sinks do not count, because the first token of a causal model sees only
    itself.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`. If the queries are not the
            keys, (..., m, n), all rows count.
        sinks: How many first keys count as sinks, 1 to n.
        mask: As for `locality`; the first counting token is the first sink.
        without_first: As for `locality`.
        rows: One value per query, NaN for the sinks.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; NaN if every token is a sink.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or sinks below 1.

    Examples:
        >>> import torch
        >>> sink_rate(torch.full((8, 8), 1 / 8), sinks=2)
        tensor(0.2500)
    """
    count("sinks", sinks)

    def kernel(matrices: Matrices) -> Tensor:
        mass = validated_weights(matrices.weights)[..., :sinks].sum(-1)
        *_, m, n = matrices.weights.shape
        own = sinks if m == n else 0  # rows of the sinks
        if not rows:
            return mass[:, own:].mean(-1)
        return torch.where(torch.arange(m, device=mass.device) < own, torch.nan, mass)

    return map_matrices(attention, kernel, None, mask, without_first, rows=rows, any_shape=True)


def crop(attention: Attention, start: int = 0, stop: int | None = None) -> Tensor:
    """Keep the attention among the tokens start..stop-1 and renormalise its rows.

        A'_ij = A_ij / sum_{start <= j' < stop} A_ij'     for start <= i, j < stop

    This leaves special tokens or attention sinks out. For example, ``locality(crop(A, 1))`` is the locality among all
    tokens except the first, however much attention the first token received.

    Args:
        attention: (..., n, n), rows sum to 1, as for `locality`.
        start: First token kept; may be negative, as in a slice.
        stop: End of the tokens kept, exclusive; may be negative, as in a slice.

    Returns:
        (..., stop - start, stop - start), rows sum to 1; half precision is returned as float32. `symmetry` of the
        result then has the tolerance of float32. Give `symmetry` its arguments ``mask=`` or ``without_first=`` instead,
        and it keeps the tolerance of the input.

    Raises:
        TypeError: As for `locality`, or an end that is not an integer.
        ValueError: As for `locality`, or no token is kept, or a kept row has all of its weight on other tokens.

    Examples:
        >>> import torch
        >>> A = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.8, 0.1, 0.1]])
        >>> crop(A, 1)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if getattr(attention, "positions", None) is not None:
        raise ValueError("crop would lose the positions of the result; give a metric without_first= or mask= instead")

    def kernel(matrices: Matrices) -> Tensor:
        n = matrices.weights.shape[-1]
        first, last, _ = slice(start, stop).indices(n)
        if first >= last:
            raise ValueError(f"crop keeps no token of {n}: start={start}, stop={stop}; widen the range")
        return matrices.crop(first, last).weights

    return map_matrices(attention, kernel, may_be_padded=True)
