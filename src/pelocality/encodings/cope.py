"""CoPE: positions that count the keys for which a query opens a gate."""

import math

import torch
from torch import Tensor, nn

from pelocality._checks import count
from pelocality.encodings.base import cast, check_lengths
from pelocality.encodings.base_content import ContentEncoding


class CoPE(ContentEncoding):
    r"""Contextual positions: the distance to a key is the number of keys between that the query counts.

        g_ij = sigmoid(s q_i k_j),  p_ij = sum_{t=j..i} g_it,  logits = s q_i k_j + q_i e[p_ij]

    with s the scale of attention, and e learned vectors of whole positions (Golovneva et al., 2024, arXiv 2405.18719).
    Between whole positions, q e is interpolated. The gates are those of the paper's code, from scaled logits, while
    equation 3 of the paper leaves the scale out. Positions beyond the last vector count as the last. The encoding is
    always causal.

    Args:
        dim: d_head, the size of queries and keys.
        positions: Number of vectors; the largest position is one less.
        heads: H, which share the vectors, as in the paper's code.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A size below 1.

    Note:
        The vectors start at zero. Attention then has no positions except its causal mask. Gates are
        (batch, heads, q, k), so memory grows with the square of the length.

    Examples:
        >>> from pelocality.encodings import biased_attention
        >>> query, key, value = torch.randn(3, 1, 2, 10, 8)
        >>> biased_attention(query, key, value, CoPE(dim=8, positions=4, heads=2)).shape
        torch.Size([1, 2, 10, 8])
    """

    def __init__(self, dim: int, positions: int = 64, heads: int = 1) -> None:
        super().__init__(heads, causal=True)
        self.dim, self.positions = count("dim", dim), count("positions", positions)
        self.vectors = nn.Parameter(self._constant(torch.zeros(positions, dim)))

    def attention_inputs(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        added: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        visible = self.visible_keys(*check_lengths(query.shape[-2], key.shape[-2]), mask)
        exact = torch.promote_types(query.dtype, self.working_dtype)  # positions are counted in no half precision
        with torch.autocast(query.device.type, enabled=False):
            q = query.to(exact)
            logits = q * (1 / math.sqrt(self.dim) if scale is None else scale) @ key.to(exact).mT
            position = self.position(logits, visible)
            whole = position.nan_to_num()  # NaN is no index, but stays in the weight of the interpolation
            by_position = q @ self.vectors.to(q).mT  # (batch, heads, q, positions)
            lower, upper = (by_position.gather(-1, each.long()) for each in (whole.floor(), whole.ceil()))
            bias = torch.lerp(lower, upper, position - whole.floor())
            bias = bias if added is None else bias + added
        return query, key, cast(bias, query.dtype, visible)

    def position(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the position p of each key as each query counts it.

        Args:
            logits: s q k, (batch, heads, q, k).
            visible: Booleans that broadcast to the logits; hidden keys do not count.

        Returns:
            Numbers from 0 to ``positions - 1``, of the shape of the logits.
        """
        gates = logits.sigmoid() if visible is None else logits.sigmoid().masked_fill(~visible, 0)
        return gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.positions - 1)
