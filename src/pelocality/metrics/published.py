"""The two metrics of the paper, exactly as published."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from pelocality.metrics._inputs import Attention, each_matrix, refuse_hidden_weight, refuse_unless_distributions
from pelocality.metrics._masks import Mask
from pelocality.metrics._row_pass import RowStatistics, row_blocks, row_statistics


@dataclass(frozen=True)
class Measurement:
    """Locality, symmetry and relative asymmetry of the same matrices.

    Args:
        locality: (...), 0 to 1, 1 where every token attends to itself.
        symmetry: (...), 0 to 1, as published; NaN for fewer than three positions.
        relative_asymmetry: (...), 0 (symmetric) to 1 (one-sided); read it beside the published symmetry.
    """

    locality: Tensor
    symmetry: Tensor
    relative_asymmetry: Tensor


def locality(attention: Attention, *, mask: Mask | None = None, rows: bool = False) -> Tensor:
    """Say how much of the attention lies near its own position.

        Loc(A) = mean_i sum_j A_ij / 2^|i-j|

    as published (Chen, Varoquaux and Suchanek, Findings of EMNLP 2023): the diagonal counts in full, each step away
    halves the weight.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1; or the tuple of attentions a model returns,
            or a result with an ``.attention``.
        mask: (*first axes, n), True or 1 where a token counts, as a tokenizer's ``attention_mask``, or additive (0
            counts, -inf or at most -10,000 does not); the others are left out and the rows renormalised. For
            (batch, head, n, n), or a tuple of them, give (batch, n); for a stacked (layer, batch, head, n, n) give
            (1, batch, n).
        rows: One value per query instead of their mean.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; differentiable, on the same device, half precision as float32.

    Raises:
        TypeError: Integers, or nothing like attention.
        ValueError: Not square, no positions, NaN or infinity, negative weights, rows that do not sum to 1 (logits).

    Note:
        Values are comparable only at equal n: uniform attention scores about 3/n, whatever one thinks of it.
        `adjusted_locality` takes that out.

    Examples:
        >>> import torch
        >>> locality(torch.eye(8))
        tensor(1.)
        >>> locality(torch.full((8, 8), 1 / 8))
        tensor(0.3127)
    """

    def kernel(flat: Tensor) -> Tensor:
        statistics = checked_statistics(flat, pairs=False)
        return statistics.locality if rows else statistics.locality.mean(-1)

    return each_matrix(attention, kernel, mask=mask, layout="rows" if rows else "matrix")


def symmetry(
    attention: Attention,
    rtol: float | None = None,
    *,
    mask: Mask | None = None,
    rows: bool = False,
) -> Tensor:
    """Say how evenly the attention is balanced around its own position, by the published definition.

        d_ik = |A[i,i-k] - A[i,i+k]|,  k = 1..m_i,  m_i = min(i, n-1-i)
        v_ik = (d_ik - min_k d_ik) / (max_k d_ik - min_k d_ik), 0 where the row is constant
        Sym(A) = 1 - mean of all v_ik

    as published (Chen et al. 2023) and in the released code. A row counts as constant where its range of d is at most
    max(10 eps64, rtol * s), s the largest weight among its pairs: rounding, not asymmetry.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        rtol: Relative range up to which a row counts as constant. None: 8 eps + 1024 eps min(1, ln(s / l)), l the
            smallest weight among its pairs and eps that of the dtype (in the second term at most float32's): what
            the rounding of a softmax and of its logits can make of a symmetric row. 0: the released code in float64.
        mask: As for `locality`.
        rows: One value per query, 1 - mean_k v_ik, NaN for the first and the last, instead of the pooled mean.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; NaN for fewer than three positions, which have no pairs.

    Raises:
        TypeError: Integers, or nothing like attention.
        ValueError: As for `locality`, or a negative rtol.

    Warns:
        UserWarning: The attention is one-sided (a causal mask, say). The number then means nothing: causal uniform
            attention scores 1.

    Note:
        The scaling within each row hides how large an asymmetry is: a perfect previous-token head scores 0.94 at
        n = 64, and the faintest tilt of a perfectly symmetric matrix drops it from 1 to about 0.8. Read
        `relative_asymmetry` beside it. The symmetry of a mean is not the mean of symmetries.

    Examples:
        >>> import torch
        >>> position = torch.arange(16.0)
        >>> distance = position - position[:, None]
        >>> symmetry(torch.softmax(-0.1 * distance**2, -1))
        tensor(1.)
        >>> symmetry(torch.softmax(-0.1 * distance**2 + 0.2 * distance, -1))
        tensor(0.4814)
    """
    one_sided = []

    def kernel(flat: Tensor) -> Tensor:
        statistics = checked_statistics(flat, rtol=rtol)
        one_sided.append(_is_one_sided(flat.detach()))
        return _symmetry_of_rows(statistics) if rows else _symmetry(statistics)

    values = each_matrix(attention, kernel, mask=mask, layout="rows" if rows else "matrix")
    if any(one_sided):
        _warn_caller(
            "the attention is one-sided (causal), on which the published symmetry means nothing (causal uniform "
            "attention scores 1); read relative_asymmetry, direction_balance or past_locality instead, or measure "
            "the scores before the mask"
        )
    return values


def measure(attention: Attention, rtol: float | None = None, *, mask: Mask | None = None) -> Measurement:
    """Measure locality, symmetry and relative asymmetry in a single pass.

    The same numbers as `locality`, `symmetry` and `relative_asymmetry`, at about half the cost of asking for each.
    It does not warn about one-sided attention: a relative asymmetry of 1 says so.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        rtol: As for `symmetry`.
        mask: As for `locality`.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each (...).

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `symmetry`.

    Examples:
        >>> import torch
        >>> causal = torch.ones(8, 8).tril() / torch.arange(1.0, 9.0)[:, None]
        >>> measure(causal)
        Measurement(locality=tensor(0.5063), symmetry=tensor(1.), relative_asymmetry=tensor(1.))
    """

    def kernel(flat: Tensor) -> Tensor:
        statistics = checked_statistics(flat, rtol=rtol)
        values = [statistics.locality.mean(-1), _symmetry(statistics), relative_asymmetry_of(statistics)]
        return torch.stack(values, -1)

    return Measurement(*each_matrix(attention, kernel, mask=mask).unbind(-1))


def relative_asymmetry_of(statistics: RowStatistics, rows: bool = False) -> Tensor:
    """Divide what is unbalanced among the pairs by all they hold, see `relative_asymmetry`.

    Args:
        statistics: With pairs.
        rows: One value per row instead of one per matrix.

    Returns:
        (batch,), or (batch, n) for rows; 0 where the pairs hold no weight.
    """
    difference, paired = statistics.difference, statistics.paired
    assert difference is not None
    assert paired is not None
    if not rows:
        difference, paired = difference.sum(-1), paired.sum(-1)
    return difference / torch.where(paired > 0, paired, 1)


def is_causal(flat: Tensor) -> Tensor:
    """Tell which matrices hold no weight above their diagonal.

    Args:
        flat: (batch, n, n).

    Returns:
        (batch,) flags; a single position is not causal.
    """
    n = flat.shape[-1]
    causal = (flat[:, 0, 1:] == 0).all(-1) & (n > 1)
    if bool(causal.any()):  # the first row decides nearly always; only then look at the whole
        for matrices, first, stop in row_blocks(len(flat), flat.shape[-1], flat.device):
            future = flat[matrices, first:stop].triu(first + 1)
            causal[matrices] &= (future == 0).flatten(1).all(-1)
    return causal


def visible_counts(flat: Tensor, causal: bool | None, seen: Tensor | None) -> Tensor:
    """Count the keys that each query sees.

    Args:
        flat: (batch, n, n), rows known to be distributions.
        causal: Whether they are its past and itself or all. None: see `is_causal`.
        seen: Which they are, (batch, n, n), where neither is so.

    Returns:
        (batch, n), float64.

    Raises:
        ValueError: Some query has weight on a key that it does not see.
    """
    if seen is not None:
        refuse_hidden_weight(flat, seen, flat.dtype)
        return seen.sum(-1, dtype=torch.float64)
    n = flat.shape[-1]
    past_only = is_causal(flat.detach()) if causal is None else flat.new_full(flat.shape[:1], causal).bool()
    position = torch.arange(1, n + 1, device=flat.device, dtype=torch.float64)
    return torch.where(past_only[:, None], position, float(n))


def checked_statistics(flat: Tensor, *, pairs: bool = True, rtol: float | None = None) -> RowStatistics:
    """Measure every row, and refuse what is not attention, in one pass.

    Args:
        flat: (batch, n, n).
        pairs: As for `row_statistics`.
        rtol: As for `row_statistics`.

    Returns:
        The statistics of `row_statistics`.

    Raises:
        ValueError: As for `locality`.
    """
    statistics = row_statistics(flat, pairs=pairs, rtol=rtol)
    refuse_unless_distributions(statistics.total.detach(), statistics.least, flat.dtype)
    return statistics


def _symmetry(statistics: RowStatistics) -> Tensor:
    irregularity = statistics.irregularity
    assert irregularity is not None
    n = irregularity.shape[-1]
    pairs = (n - 1) ** 2 // 4
    if pairs == 0:
        return irregularity.sum(-1) * float("nan")
    return 1 - irregularity.sum(-1) / pairs


def _symmetry_of_rows(statistics: RowStatistics) -> Tensor:
    irregularity = statistics.irregularity
    assert irregularity is not None
    position = torch.arange(irregularity.shape[-1], device=irregularity.device)
    return 1 - irregularity / torch.minimum(position, position.flip(0))  # 0/0 is NaN for the two ends


def _is_one_sided(flat: Tensor) -> bool:
    """Whether some matrix holds no weight on one side of its diagonal."""
    return flat.shape[-1] > 2 and bool((is_causal(flat) | is_causal(flat.transpose(-1, -2))).any())


def _warn_caller(message: str) -> None:
    """Warn at the line of the user's that led here, whatever of ours and torch's lies between."""
    libraries = ("pelocality", "torch", "torchmetrics")
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in libraries:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
