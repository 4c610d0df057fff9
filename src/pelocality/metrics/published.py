"""The two metrics of the paper, exactly as published."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pelocality.metrics._by_position import row_sums
from pelocality.metrics._inputs import Attention, Matrices, PositionsLike, map_matrices, warn_caller
from pelocality.metrics._masks import Mask

if TYPE_CHECKING:
    import pandas as pd

_TABLE: dict[str, Any] = {"index": False, "float_format": "{:.3f}".format, "max_rows": 24}  # options of pandas


@dataclass(frozen=True)
class Measurement:
    """Locality, symmetry and relative asymmetry of the same matrices.

    Attributes:
        locality: (...), 0 to 1, 1 where every token attends to itself.
        symmetry: (...), 0 to 1, as published; NaN for fewer than three positions.
        relative_asymmetry: (...), 0 (symmetric) to 1 (one-sided); complements the published symmetry.
    """

    locality: Tensor
    symmetry: Tensor
    relative_asymmetry: Tensor

    def to_frame(self, axes: Sequence[str] | None = None) -> "pd.DataFrame":
        """Return the numbers as a table, which notebooks show too: one row per matrix.

        Args:
            axes: Names of the axes; None: "layer" and "head" if there are two, otherwise "axis 0" and so on.

        Raises:
            ValueError: The number of names is not the number of axes.
        """
        from pelocality.metrics.tables import axes_frame  # loads pandas

        shape = self.locality.shape  # monotonicity and profiles are no number per matrix
        columns = {name: values for name, values in vars(self).items() if values.shape == shape}
        numbers = {name: values.detach().cpu().double().flatten().numpy() for name, values in columns.items()}
        return axes_frame(tuple(shape), axes).assign(**numbers)

    def __repr__(self) -> str:
        if not self.locality.ndim:
            numbers = (f"{name}={value:.4f}" for name, value in vars(self).items() if not value.ndim)
            return f"{type(self).__name__}({', '.join(numbers)})"
        table: str = self.to_frame().to_string(**_TABLE)
        return table

    def _repr_html_(self) -> str | None:
        return self.to_frame().to_html(border=0, **_TABLE) if self.locality.ndim else None


def locality(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return how much of the attention is near the position of its query.

        Loc(A) = mean_i sum_j A_ij / 2^|i-j|

    as published (Chen, Varoquaux and Suchanek, Findings of EMNLP 2023): the diagonal counts in full, each step away
    halves the weight.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1; or the tuple of attentions a model returns,
            or a result with an ``.attention``.
        positions: Where queries and keys lie, if not one after the other on a line: `Positions`, or coordinates (n,) or
            (n, d). Distance and opposite keys are measured with them. None: the positions of a result, or else a line.
        mask: (*first axes, n), such as a tokenizer's ``attention_mask``: True or 1 where a token counts. A mask may
            also be additive: a token counts at 0, and does not count at -inf or at most -1000. Other tokens are left
            out, and rows are renormalised. For (batch, head, n, n), or a tuple of such tensors, give (batch, n) or
            (batch, 1, 1, n). For (batch, layer, head, n, n) give (batch, 1, n). For (layer, batch, head, n, n) give
            (1, batch, n).
        without_first: Leave out this many first tokens of each sequence, as queries and as keys, and renormalise the
            other weights. Give 1 to leave out an attention sink at the first token.
        rows: Return one value per query instead of the mean.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; differentiable, on the same device, half precision as float32.

    Raises:
        TypeError: Integers, or not attention.
        ValueError: Not square, no positions, NaN or infinity, negative weights, rows that do not sum to 1 (logits).

    Note:
        Values are comparable only at equal n: uniform attention scores about 3/n. `adjusted_locality` corrects for
        that.

    Examples:
        >>> import torch
        >>> locality(torch.eye(8))
        tensor(1.)
        >>> locality(torch.full((8, 8), 1 / 8))
        tensor(0.3127)
    """

    def kernel(matrices: Matrices) -> Tensor:
        sums = row_sums(matrices, pairs=False)
        return sums.numbers[1] if rows else sums.totals[1] / sums.numbers.shape[-1]

    return map_matrices(attention, kernel, positions, mask, without_first, rows=rows)


def symmetry(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    rtol: float | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
    rows: bool = False,
) -> Tensor:
    """Return how evenly the attention is balanced around the position of its query, by the published definition.

        d_ik = |A[i,i-k] - A[i,i+k]|,  k = 1..m_i,  m_i = min(i, n-1-i)
        v_ik = (d_ik - min_k d_ik) / (max_k d_ik - min_k d_ik), 0 where the row is constant
        Sym(A) = 1 - mean of all v_ik

    as published (Chen et al. 2023) and in the released code. A row counts as constant if its range of d is at most
    max(10 eps64, rtol * s), where s is the largest weight among its pairs. Such differences are rounding, not
    asymmetry.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `locality`. Pairs are then of keys that are point reflections of each other through the query.
        rtol: Relative range up to which a row counts as constant. None: 8 eps + 1024 eps min(1, ln(s / l)), where l is
            the smallest weight among its pairs, and eps is that of the dtype (in the second term at most that of
            float32). This covers the rounding of a softmax and of its logits. For half precision, also if it was
            converted to another dtype, the first term is 2 eps. 0: the released code in float64.
        mask: As for `locality`.
        without_first: As for `locality`.
        rows: Return one value per query, 1 - mean_k v_ik, instead of the pooled mean. The first and the last query have
            NaN.

    Returns:
        (...), or (..., n) for rows, between 0 and 1; NaN for fewer than three positions, which have no pairs.

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `locality`, or a negative rtol.

    Warns:
        UserWarning: The attention is one-sided (because of a causal mask, for example). The value is then meaningless:
            causal uniform attention scores 1.

    Note:
        The scaling within each row hides how large an asymmetry is. A perfect previous-token head scores 0.94 at n =
        64. The slightest tilt of a symmetric matrix lowers the value from 1 to a number that depends on n and the
        decay: if logits -0.05 k^2 are tilted by one millionth of k, to 0.72 at n = 64 and 0.92 at n = 256. Report
        `relative_asymmetry` with the symmetry. The symmetry of a mean is not the mean of symmetries.

    Examples:
        >>> import torch
        >>> position = torch.arange(16.0)
        >>> distance = position - position[:, None]
        >>> symmetry(torch.softmax(-0.1 * distance**2, -1))
        tensor(1.)
        >>> symmetry(torch.softmax(-0.1 * distance**2 + 0.2 * distance, -1))
        tensor(0.4814)
    """
    values = _map_sums(attention, rtol, rows=rows, positions=positions, mask=mask, without_first=without_first)
    return values if rows else values[..., 1]


def measure(
    attention: Attention,
    *,
    positions: PositionsLike | None = None,
    rtol: float | None = None,
    mask: Mask | None = None,
    without_first: int = 0,
) -> Measurement:
    """Measure locality, symmetry and relative asymmetry in a single pass.

    The numbers are those of `locality`, `symmetry` and `relative_asymmetry`, in less than half the time of three calls.

    Args:
        attention: Positional weights (..., query, key), rows sum to 1, as for `locality`.
        positions: As for `symmetry`.
        rtol: As for `symmetry`.
        mask: As for `locality`.
        without_first: As for `locality`.

    Returns:
        A frozen result with ``.locality``, ``.symmetry`` and ``.relative_asymmetry``, each (...).

    Raises:
        TypeError: As for `locality`.
        ValueError: As for `symmetry`.

    Warns:
        UserWarning: As for `symmetry`.

    Examples:
        >>> import torch
        >>> measure(torch.full((8, 8), 1 / 8))
        Measurement(locality=0.3127, symmetry=1.0000, relative_asymmetry=0.0000)
    """
    options: dict[str, Any] = {"positions": positions, "mask": mask, "without_first": without_first}
    return Measurement(*_map_sums(attention, rtol, **options).unbind(-1))


def measurement(attention: Attention, **options: Any) -> Measurement:
    """Return what `measure` returns, without its warning, for callers that know which attention is causal."""
    return Measurement(*_map_sums(attention, warn=False, **options).unbind(-1))


def _map_sums(
    attention: Attention, rtol: float | None = None, warn: bool = True, rows: bool = False, **options: Any
) -> Tensor:
    """Return locality, symmetry and relative asymmetry of every matrix, (..., 3), or the symmetry of rows, (..., n).

    Args:
        attention: As for `measure`.
        rtol: As for `measure`.
        warn: Whether to warn of one-sided attention.
        rows: Whether to return the symmetry of rows.
        options: Positions, mask and without_first of `measure`.
    """
    one_sided: list[bool] = []

    def kernel(matrices: Matrices) -> Tensor:
        sums = row_sums(matrices, matrices.tolerance(rtol))
        numbers = sums.pooled()
        one_sided.append(warn and sums.one_sided(numbers[2]))
        return sums.symmetry_of_rows() if rows else torch.stack(numbers, -1)

    values = map_matrices(attention, kernel, rows=rows, **options)
    if any(one_sided):
        warn_of_one_sided()
    return values


def warn_of_one_sided() -> None:
    """Warn that symmetry says nothing."""
    warn_caller(
        "the attention is one-sided (causal), for which the published symmetry is meaningless; read "
        "relative_asymmetry, direction_balance or past_locality instead"
    )
