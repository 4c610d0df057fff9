"""Metrics of the kind of matrix: Toeplitz, monotone in distance, concentrated, with a sink; `crop` leaves one out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pelocality._checks import count
from pelocality._transforms import transformed
from pelocality.metrics._by_position import (
    at_steps,
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
        positions, group = matrices.positions, None
        if positions is not None:
            rounded = positions.ring is not None and positions.has_directions
            group = positions.step_profile if rounded else positions.step_displacement
        n = weights.shape[-1]

        def values(rows: slice) -> Tensor:
            inside = seen(rows)
            return torch.cat([weights[:, rows] * inside, inside.to(weights.dtype)])

        sums = sum_by(matrices, group, values)
        sums, counts = sums[: len(weights)], sums[len(weights) :]
        mean = (sums.sum(-1) / counts.sum(-1)).to(weights.dtype)[:, None, None]
        profile = ratio(sums, counts).to(weights.dtype)
        within = total = weights.new_zeros(len(weights), dtype=torch.float64)
        for rows in row_blocks(weights):
            part, inside = weights[:, rows], seen(rows)
            expected = of_each_key(matrices, group, profile, rows)
            within = within + ((part - expected) * inside).square().sum((-1, -2))
            total = total + ((part - mean) * inside).square().sum((-1, -2))
        within, total = within.to(weights.dtype), total.to(weights.dtype)
        rounding = (16 * n * torch.finfo(weights.dtype).eps * mean[:, 0, 0]) ** 2  # a few eps in each weight
        return torch.where(total <= rounding, 1, 1 - within / torch.where(total <= rounding, 1, total))

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
        if matrices.positions is not None:
            return _monotonicity_by_ring(matrices, weights)
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


def _monotonicity_by_ring(matrices: Matrices, weights: Tensor) -> Tensor:
    """Return `monotonicity` from one ring of keys around a query to the next one, (batch, 2) or (batch, 1)."""
    assert matrices.positions is not None
    signs = (-1, 1) if matrices.positions.has_directions else (None,)
    return torch.stack([_side_by_ring(matrices, weights, sign) for sign in signs], -1).to(weights.dtype)


def _side_by_ring(matrices: Matrices, weights: Tensor, sign: int | None) -> Tensor:
    """Return `monotonicity` of the past (-1), the future (1) or all keys (None), (batch,)."""
    positions = matrices.positions
    assert positions is not None
    ring_of_step = positions.rings[1]
    if sign is not None:
        ring_of_step = np.where(positions.step_offset * sign >= 0, ring_of_step, -1)
    rising = mass_beyond = weights.new_zeros(len(weights), dtype=torch.float64)
    followed = torch.zeros((), dtype=torch.int64, device=weights.device)
    for rows in row_blocks(weights):
        ring = at_steps(matrices, ring_of_step, rows)
        inside, ring = (ring >= 0).double(), _compressed(ring, weights.shape[-1]).clamp(min=0)
        numbers = inside.new_zeros(len(ring), int(ring.max()) + 1).scatter_add(-1, ring, inside)
        part = weights[:, rows] * inside
        mass = part.new_zeros(len(part), *numbers.shape).scatter_add(-1, ring.expand(part.shape), part)
        mean, occurs = ratio(mass, numbers), numbers > 0
        # the ring before each that occurs around this query
        number = torch.arange(numbers.shape[1], device=weights.device)
        before = torch.where(occurs, number, -1).cummax(-1).values.roll(1, -1)
        follows = occurs & (before >= 0) & (number > 0)
        nearer = mean.gather(-1, before.clamp(min=0).expand(mean.shape))
        rounding = 1 - 8 * torch.finfo(torch.float64).eps  # means of equal weights may differ by rounding
        rising = rising + ((nearer < mean * rounding) & follows).sum((-1, -2))
        mass_beyond = mass_beyond + (mass * follows).sum((-1, -2))
        followed = followed + follows.sum()
    return torch.where(mass_beyond > 0, 1 - rising / followed.clamp(min=1), torch.nan)


def _compressed(ring: Tensor, most: int) -> Tensor:
    """Return rings (rows, n), -1 for none, as they are; those of each query from 0 on where there are more than n."""
    if int(ring.max()) < most:
        return ring
    ordered, order = ring.sort(-1)
    rank = (ordered.diff(dim=-1, prepend=ordered[:, :1]) > 0).cumsum(-1) - (ordered[:, :1] < 0).long()
    return torch.empty_like(ring).scatter_(-1, order, rank)


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
        differentiated = weights.requires_grad or transformed(weights)
        nats = torch.cat([_nats(weights[:, rows], differentiated) for rows in row_blocks(weights)], -1)
        values, choice = normalised_entropy(nats, support)
        return torch.where(choice, values, torch.nan) if rows else masked_mean(values, choice)

    sees: dict[str, Any] = {"causal": causal, "visible": visible}
    return map_with_visible(attention, kernel, positions, mask, without_first, **sees, rows=rows, any_shape=True)


def _nats(weights: Tensor, differentiated: bool) -> Tensor:
    """Return the entropy of every row, whose gradient at a weight of 0 is 0."""
    nats: Tensor = torch.special.entr(torch.where(weights > 0, weights, 1) if differentiated else weights)
    return nats.sum(-1)


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
