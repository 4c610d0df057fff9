"""Metrics complementary to locality: attention as a function of distance in tokens."""

import math
from typing import Literal

import torch
from torch import Tensor

from pelocality._checks import check_choice, number
from pelocality.metrics._by_position import (
    distances,
    offsets,
    profile,
    radii,
    row_sums,
    seen_keys,
    sum_over_keys,
    sums_by_ring,
    visible_counts,
    weights_by_position,
)
from pelocality.metrics._inputs import Attention, Matrices, PositionsLike, map_matrices, map_with_visible
from pelocality.metrics._masks import Mask, Visible
from pelocality.metrics._ratio import masked_mean, ratio
from pelocality.metrics._row_pass import row_blocks

Side = Literal["both", "past", "future"]


def adjusted_locality(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    causal: bool | None = None,
    visible: Visible | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
) -> Tensor:
    """Return how much more local the attention is than uniform attention over the same keys.

        (Loc(A) - Loc(U)) / (1 - Loc(U)),  U uniform over the visible keys

    This metric is ours. It is corrected for chance like Cohen's kappa, so values can be compared between lengths, and
    between causal and bidirectional models.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`.
        causal: Whether U sees only the past. None: each matrix without weight above its diagonal counts as causal.
        visible: Which keys each query sees, if these are neither all keys nor the past (a sliding window). Boolean
            (n, n), or one for every matrix, with as many axes as the attention (size 1 repeats). None: the ``.visible``
            of a result (if that is None, every key is visible), otherwise see causal.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        (...), at most 1: 1 for the identity, 0 for uniform attention at every n, below 0 if tokens avoid their
        neighbours. Queries that see a single key do not count. NaN if all queries see a single key.

    Raises:
        TypeError: As for `locality`, or visible is not boolean.
        ValueError: As for `locality`, visible does not fit or comes with causal, or it or ``causal=True`` hides keys
            with weight.

    Warns:
        UserWarning: Only some of the matrices count as causal.

    Note:
        Causality is inferred from exact zeros. A weight that is too small for its dtype is zero as well, so pass
        ``causal`` or ``visible`` if you know it. Visible keys are not inferred from single zeros. Pass ``visible`` to
        distinguish a head that attends to one key among many from a head that sees only one key.

    Examples:
        >>> import torch
        >>> adjusted_locality(torch.full((512, 512), 1 / 512)).abs() < 1e-6
        tensor(True)
        >>> adjusted_locality(torch.eye(512))
        tensor(1.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        support, uniform = _uniform_locality(matrices)
        return excess_locality(row_sums(matrices, pairs=False).numbers[1], uniform, support)

    return map_with_visible(attention, kernel, positions, mask, without_first, causal=causal, visible=visible)


def excess_locality(value: Tensor, uniform: Tensor, support: Tensor) -> Tensor:
    """Return `adjusted_locality`, (batch,), from the rows' locality, that of uniform attention, and numbers of keys."""
    choice = support > 1
    most = torch.where(choice, 1 - uniform, 0).sum(-1)
    gained = torch.where(choice, value - uniform.to(value.dtype), 0).sum(-1)
    return ratio(gained, most, torch.nan)


def _uniform_locality(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """Return how many keys each query sees and the locality of uniform attention to them, each (batch, n), float64."""
    weights = matrices.weights
    n = weights.shape[-1]
    if matrices.visible is not None or matrices.positions is not None:
        seen, counts, near = seen_keys(matrices), [], []
        for rows in row_blocks(weights):
            inside = seen(rows)
            counts.append(inside.sum(-1, dtype=torch.float64))
            near.append((inside * torch.exp2(-distances(matrices, rows).double())).sum(-1))
        support = torch.cat(counts, -1)
        return support, torch.cat(near, -1) / support
    support = visible_counts(matrices)
    i = torch.arange(n, dtype=torch.float64, device=weights.device)
    past, future = 2 - 2**-i, 1 - 2 ** (i + 1 - n)  # sums of 2^-|i-j|
    return support, torch.where(support == n, past + future, past) / support


def past_locality(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return how near the earlier tokens are that a token attends to; for decoders.

        mean_i [ sum_{j<i} A_ij / 2^(i-j-1)  /  sum_{j<i} A_ij ]

    This metric is ours. The weight on the token itself and on the future is left out. A perfect previous-token head has
    a published locality of 0.5, and scores 1 here.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`, with one coordinate. Distances then count from the nearest key of the past.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: One value per query; NaN for queries that attend to no earlier token, which the mean leaves out.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; NaN if no token attends to an earlier token.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Note:
        Values are comparable only at equal n: causal uniform attention scores 0.128 at n = 64 and 0.024 at n = 512.
        `adjusted_locality` corrects for that.

    Examples:
        >>> import torch
        >>> previous_token = torch.eye(8).roll(-1, -1)
        >>> previous_token[0] = torch.eye(8)[0]
        >>> past_locality(previous_token)
        tensor(1.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = weights_by_position(matrices)
        sums = []
        for block in row_blocks(weights):
            offset = offsets(matrices, block).double()
            before = offset < 0
            offset = offset.masked_fill(~before, -torch.inf)
            nearness = torch.exp2(offset - offset.amax(-1, keepdim=True)).to(weights.dtype)  # NaN without a past
            past = weights[:, block] * before
            sums.append(torch.stack([(past * nearness.nan_to_num(0)).sum(-1), past.sum(-1)]))
        near, mass = torch.cat(sums, -1)
        values = ratio(near, mass, torch.nan)
        return values if rows else masked_mean(values, mass > 0)

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)


def distance_profile(
    attention: Attention, *, positions: PositionsLike | None = None, mask: Mask | None = None, without_first: int = 0
) -> Tensor:
    """Return the mean attention at every signed distance.

        p(k) = mean_i A[i, i+k],  k = -(n-1)..n-1

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`. The profile then has a number for each distance that occurs,
            ``Positions.profile_distances``.
        mask: As for `locality`; distances beyond the counting tokens are NaN.
        without_first: As for `locality`.

    Returns:
        (..., 2n-1), p(k) at index k + n - 1, the past first; each between 0 and 1. The mean is over the n - |k|
        pairs of tokens at a distance, so the numbers of far distances are means of few pairs.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Examples:
        >>> import torch
        >>> distance_profile(torch.eye(3).roll(-1, -1))
        tensor([0., 1., 0., 0., 1.])
    """
    return map_matrices(attention, profile, positions, mask, without_first, layout="offsets")


def profile_asymmetry(
    attention: Attention, *, positions: PositionsLike | None = None, mask: Mask | None = None, without_first: int = 0
) -> Tensor:
    """Return the asymmetry of the distance profile at every distance.

        (p(k) - p(-k)) / (p(k) + p(-k)),  k = 1..n-1

    This metric is ours. It shows at which distances the attention prefers one side; see `distance_profile` for p.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`, with one coordinate.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        (..., n-1), between -1 (all weight in the past) and 1; 0 where neither side has weight.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Examples:
        >>> import torch
        >>> profile_asymmetry(torch.ones(4, 4).tril() / torch.arange(1.0, 5.0)[:, None])
        tensor([-1., -1., -1.])
    """

    def kernel(matrices: Matrices) -> Tensor:
        offsets(matrices, slice(0))  # refuses positions without directions
        return profile(matrices)

    return asymmetry_of_profile(map_matrices(attention, kernel, positions, mask, without_first, layout="offsets"))


def asymmetry_of_profile(profile: Tensor) -> Tensor:
    """Return `profile_asymmetry`, (..., n-1), of a `distance_profile`."""
    past, future = sides_of(profile)
    return ratio(future - past, past + future)


def sides_of(by_distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers at distances 1..n-1 in the past and in the future, (..., 2n-1) -> twice (..., n-1)."""
    n = (by_distance.shape[-1] + 1) // 2
    return by_distance[..., : n - 1].flip(-1), by_distance[..., n:]


def mean_distance(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return the mean distance of the attention, in tokens.

        mean_i sum_j A_ij |i - j|

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`; the result is in their unit.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: One value per query instead of their mean.

    Returns:
        (...), or (..., n) for rows, in tokens, from 0 to n - 1; about n/3 for uniform attention.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`.

    Examples:
        >>> import torch
        >>> mean_distance(torch.eye(4).flip(-1))
        tensor(2.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        weights = weights_by_position(matrices)
        values = sum_over_keys(weights, lambda rows: distances(matrices, rows).nan_to_num(posinf=0.0))
        return values if rows else values.mean(-1)

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)


def window(
    attention: Attention,
    share: float = 0.9,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return the smallest half-width of a window around each token that holds a share of the attention.

        min { w : mean_i sum_{|i-j| <= w} A_ij >= share }

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        share: The mass q to hold, above 0 and at most 1.
        positions: As for `locality`; the result is in their unit.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: Return one window per query instead of one that holds the share on average.

    Returns:
        (...), or (..., n) for rows: whole tokens from 0 (the diagonal suffices) to n - 1, as floats. Not
        differentiable.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or a share outside (0, 1].

    Examples:
        >>> import torch
        >>> window(torch.full((101, 101), 1 / 101), 0.5, rows=True)[50]
        tensor(25.)
    """

    def kernel(matrices: Matrices) -> Tensor:
        matrices = matrices._replace(weights=matrices.weights.detach())
        if rows:
            return _window_of_rows(matrices, share)
        mass, _, radius = sums_by_ring(matrices)
        return radius[narrowest(mass, share)]

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)


def _window_of_rows(matrices: Matrices, share: float) -> Tensor:
    """Return `window` of every query, (batch, m)."""
    weights, positions, radius = weights_by_position(matrices), matrices.positions, radii(matrices)
    device, windows = weights.device, []
    for rows in row_blocks(weights):
        step = offsets(matrices, rows) if positions is None else positions.steps(rows, device).long() - positions.here
        ring, part = step.abs().clamp(max=len(radius) - 1), weights[:, rows].double()  # no weight is infinitely far
        by_ring = part.new_zeros(*part.shape[:-1], len(radius)).scatter_add(-1, ring.expand(part.shape), part)
        windows.append(radius[narrowest(by_ring, share)])
    return torch.cat(windows, -1)


def window_of_profile(profile: Tensor, share: float) -> Tensor:
    """Return `window`, (...), of a `distance_profile` in float64."""
    past, future = sides_of(profile)
    n = past.shape[-1] + 1
    pairs = torch.arange(n, 0, -1, device=profile.device)  # numbers of pairs at distance 0..n-1
    return narrowest(torch.cat([profile[..., n - 1 : n], past + future], -1) * pairs, share)


def narrowest(by_distance: Tensor, share: float) -> Tensor:
    """Return the smallest distance up to which a share of the mass lies, (..., n) -> (...)."""
    share = number("share", share)
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    held = by_distance.cumsum(-1)
    rounding = by_distance.shape[-1] * torch.finfo(torch.float64).eps
    return (held >= share * held[..., -1:] * (1 - rounding)).to(torch.uint8).argmax(-1)


def half_life(
    attention: Attention,
    *,
    side: Side = "both",
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
) -> Tensor:
    """Return the distance over which the attention halves.

        -ln 2 / slope of log p(k) against |k|,  k >= 1

    This metric is ours. The slope is a least-squares fit weighted by p(k), so the many far distances with hardly any
    weight have little influence. The half-life is exact for an exponential profile.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        side: The mean of both sides, or one of them.
        positions: As for `locality`; the result is in their unit. Sides need one coordinate.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        (...), in tokens, above 0; infinite if attention does not fall with distance, NaN if fewer than two distances
        have weight.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or an unknown side.

    Note:
        The softmax normalises rows near the ends over fewer keys, so a bias of slope m gives ln 2 / m only for n much
        larger than that.

    Examples:
        >>> import torch
        >>> position = torch.arange(256.0)
        >>> slope = 0.25
        >>> half_life(torch.softmax(-slope * (position - position[:, None]).abs(), -1))
        tensor(2.7673)
    """

    def kernel(matrices: Matrices) -> Tensor:
        # Numbers of few digits, such as powers of 2, need not have been rounded to them.
        bare_float64 = getattr(attention, "precision", None) is None and matrices.weights.dtype == torch.float64
        dtype = torch.float64 if bare_float64 else matrices.precision
        sums, counts, radius = sums_by_ring(matrices, side)
        return _half_life(ratio(sums, counts)[..., 1:], radius[1:], dtype)

    check_choice("side", side, ("both", "past", "future"))
    return map_matrices(attention, kernel, positions, mask, without_first)


def half_life_of_profile(profile: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """Return `half_life`, (...), of a `distance_profile` in float64 that was computed from weights of a dtype."""
    past, future = sides_of(profile)
    k = torch.arange(1, past.shape[-1] + 1, device=profile.device, dtype=torch.float64)
    return _half_life({"both": (past + future) / 2, "past": past, "future": future}[side], k, dtype)


def _half_life(p: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the half-life, (...), of mean attention p (..., r) at the distances k (r,) above 0."""
    held = p > 0
    weight = ratio(p, p.sum(-1, keepdim=True))
    log_p = torch.where(held, p, 1).log()
    away = k - (weight * k).sum(-1, keepdim=True)
    fall = -(weight * away * (log_p - (weight * log_p).sum(-1, keepdim=True))).sum(-1)  # times spread: -slope
    spread = (weight * away**2).sum(-1)
    # the error of log p is that of the input or of its sums, that of fall this times the mean distance from the mean
    error = max(torch.finfo(dtype).eps, k.numel() * torch.finfo(torch.float64).eps)
    falling = fall > error * (weight * away.abs()).sum(-1)
    values = torch.where(falling, math.log(2) * spread / torch.where(falling, fall, 1), torch.inf)
    return torch.where(held.sum(-1) < 2, torch.nan, values)
