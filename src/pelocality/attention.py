"""Scaled dot product attention with an encoding, on a CPU without a matrix of biases where distance decides."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pelocality.encodings import Encoding
from pelocality.encodings.protocol import cast
from pelocality.scores import blocks, fold, laid_out, masked_softmax, mirrored, toeplitz

# Scores a head from which, on a CPU, ...
_TURNED = 2**20  # ... a matrix of biases leaves the cache, and reading it costs more than turning the queries round
_BY_BLOCKS = 2**18  # ... attention by whole matrices, which PyTorch turns to for a learned bias, is the slower way
_AT_A_TIME = 2**17  # scores that backward holds, few enough for a core's own cache


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoding: Encoding,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's ``scaled_dot_product_attention`` with an encoding as its bias.

        softmax(scale Q K^T + bias) V

    Give it in place of that function, with an encoding for the ``attn_mask`` of biases. On a CPU the bias of an
    encoding that depends on distance alone is read from its line of 2n - 1 numbers where a matrix would not fit the
    cache, and the gradients of a learned one are summed up block by block, so that neither needs an n x n tensor;
    elsewhere, and for every other encoding, this is that function with ``attn_mask=encoding(q, k)``.

    Args:
        query: Q, (batch, heads, q, d).
        key: K, (batch, heads, k, d), k >= q; the last query stands at the last key.
        value: V, (batch, heads, k, d_v).
        encoding: Of as many heads, or of one that all share.
        mask: (batch or 1, heads or 1, q or 1, k) of booleans, True where a query sees a key; None: it sees all, but
            for what a causal encoding hides.
        dropout_p: Share of attention weights left out, always: the function does not know of evaluation.
        scale: What the scores are multiplied by; None: 1 / sqrt(d).

    Returns:
        (batch, heads, q, d_v); zeros for a query that sees nothing.

    Raises:
        TypeError: An encoding that is none, or a mask of anything but booleans.
        ValueError: Shapes that do not fit, or an encoding of another number of heads.
        NotImplementedError: Gradients asked for with ``create_graph=True`` from 2^18 scores a head on a CPU.

    Note:
        On CUDA it is ``encoding.score_modification`` with FlexAttention that does without the matrix.

    Examples:
        >>> from pelocality.encodings import ALiBi
        >>> query, key, value = torch.randn(3, 1, 8, 4096, 16)
        >>> biased_attention(query, key, value, ALiBi(heads=8)).shape
        torch.Size([1, 8, 4096, 16])
    """
    _check(query, key, value, encoding, mask)
    queries, keys = query.shape[-2], key.shape[-2]
    turned = mask is None and queries * keys >= _TURNED
    by_blocks = queries * keys >= _BY_BLOCKS and any(number.requires_grad for number in encoding.parameters())
    factors = None
    if (turned or by_blocks) and query.device.type == "cpu" and dropout_p == 0 and not torch.compiler.is_compiling():
        factors = encoding.factors(queries, keys, mask)
    learned = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in factors or ())
    if factors is None or not (learned or (turned and len(_alike(factors[1], queries)) >= queries / 2)):
        bias = encoding.distinct(queries, keys, mask=mask, dtype=query.dtype)
        return _attend(query, key, value, bias, mask, dropout_p, scale)

    line, rows = factors[0].detach(), None if factors[1] is None else factors[1].detach()
    if turned:
        output = _turned(query, key, value, line, rows, scale)
    else:
        output = _attend(query, key, value, cast(toeplitz(line, queries, rows), query.dtype), mask, 0.0, scale)
    if not learned:
        return output
    heads, dtype = query.shape[1], torch.promote_types(line.dtype, query.dtype)
    learning: Tensor = _GradientOfBias.apply(  # type: ignore[no-untyped-call]
        output,
        query.detach(),
        key.detach(),
        value.detach(),
        *(None if each is None else each.to(dtype).expand(heads, -1) for each in factors),
        mask,
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
    )
    return learning


def _turned(
    query: Tensor, key: Tensor, value: Tensor, line: Tensor, rows: Tensor | None, scale: float | None
) -> Tensor:
    """Attention with the last query first: then a bias of distance alone is a view of the line, and takes no room.

    Where rows differ, which is near the ends of the sequence, they have a matrix of their own.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    query, rows = query.flip(-2), None if rows is None else rows.flip(-1)
    alike = _alike(rows, queries)
    outputs = []
    for part in (range(alike.start), alike, range(alike.stop, queries)):
        if not part:
            continue
        window = line[:, part.start : part.stop + keys - 1]
        if rows is None:
            bias = mirrored(cast(window, query.dtype), len(part))
        elif part == alike:
            bias = mirrored(cast(window * rows[:, part.start, None], query.dtype), len(part))
        else:
            of_each = rows[:, part.start : part.stop, None]
            # into memory of its own: the product would take over the view's order, and SDPA make a copy in another
            room = line.new_empty(max(len(line), len(rows)), len(part), keys)
            bias = cast(torch.mul(mirrored(window, len(part)), of_each, out=room), query.dtype)
        outputs.append(_attend(query[..., part.start : part.stop, :], key, value, bias, None, 0.0, scale))
    return torch.cat(outputs, -2).flip(-2)


def _alike(rows: Tensor | None, queries: int) -> range:
    """The queries around the middle one that are multiplied by the same number as that."""
    if rows is None:
        return range(queries)
    middle = queries // 2
    others = (rows != rows[:, middle, None]).any(0).nonzero()[:, 0].tolist()
    return range(
        max((other + 1 for other in others if other < middle), default=0),
        min((other for other in others if other > middle), default=queries),
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    added = bias if mask is None else torch.where(mask, bias, -torch.inf)
    while added.ndim < 4:
        added = added[None]
    return scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout_p, scale=scale)


class _GradientOfBias(torch.autograd.Function):
    """Attention's output as it is; going back, what the bias was made of gets its gradient, block by block.

    With A the attention, g the gradient of the output and D_i = g_i . output_i, the gradient of the logits, and so of
    the bias, is A_ij (g_i . v_j - D_i) (Dao et al., FlashAttention, 2022, appendix B). PyTorch's kernels on a CPU keep
    it to themselves, and where a bias needs it turn to products of whole matrices.
    """

    @staticmethod
    def forward(
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        line: Tensor,
        rows: Tensor | None,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable says so to backward(), and nothing to autograd.grad
            raise NotImplementedError(
                "gradients of gradients of a long learned bias; call scaled_dot_product_attention with "
                "attn_mask=encoding(queries, keys) under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        output, query, key, value, line, rows, mask = ctx.saved_tensors
        batch, heads, queries, _ = query.shape
        keys = key.shape[2]
        q, k, v, g = (each.to(line.dtype) for each in (query, key, value, gradient))
        q = q * ctx.scale
        expected = (g * output).sum(-1, keepdim=True)  # D
        seen = None if mask is None else mask.expand(batch, heads, queries, keys)
        blind = mask is not None or not bool(line.isfinite().all())  # whether a query may see nothing

        def of_logits(bias: Tensor, some: slice, head: int, part: slice) -> Tensor:
            """The gradient of the logits, (1, rows of the block, keys), summed over some of the batch."""
            logits = torch.bmm(q[some, head, part], k[some, head].mT).add_(bias)
            visible = None if seen is None else seen[some, head, part]
            attention = masked_softmax(logits, visible) if blind else logits.softmax(-1)
            change = torch.bmm(g[some, head, part], v[some, head].mT).sub_(expected[some, head, part])
            change.mul_(attention)
            return change if len(change) == 1 else change.sum(0, keepdim=True)

        for_line, for_rows = torch.zeros_like(line), None if rows is None else torch.zeros_like(rows)
        for head in range(heads):
            for part, window in blocks(queries, keys, q.device):
                of_line, of_rows = line[head, None, window], None if rows is None else rows[head, None, part]
                bias = laid_out(of_line, part.stop - part.start, of_rows)
                step = max(1, _AT_A_TIME // bias.numel())
                parts = (of_logits(bias, slice(first, first + step), head, part) for first in range(0, batch, step))
                line_sums, row_sums = fold(functools.reduce(Tensor.add_, parts), of_line, of_rows)
                for_line[head, window] += line_sums[0]
                if for_rows is not None and row_sums is not None:
                    for_rows[head, part] = row_sums[0]
        return gradient, None, None, None, for_line, for_rows, None, None


def _check(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding, mask: Tensor | None) -> None:
    if not isinstance(encoding, Encoding):
        raise TypeError(f"encoding must be a pelocality.encodings.Encoding, got {type(encoding).__name__}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4 or tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} must be (batch, heads, length, d) with the query's batch and heads, got shape "
                f"{tuple(tensor.shape)} beside {tuple(query.shape)}"
            )
    if key.shape[-2] < query.shape[-2]:
        raise ValueError(f"key must be as long as query or longer, got {key.shape[-2]} keys, {query.shape[-2]} queries")
    if value.shape[-2] != key.shape[-2] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"query (..., q, d), key (..., k, d) and value (..., k, d_v) must fit, got shapes {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if encoding.heads not in (1, query.shape[1]):
        raise ValueError(f"encoding must have 1 or {query.shape[1]} heads, as the query has, got {encoding.heads}")
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a tensor of booleans, True where a query sees a key, got {kind}")
    wanted = (*query.shape[:3], key.shape[2])
    if mask.ndim != 4 or mask.shape[3] != wanted[3] or any(mask.shape[i] not in (1, wanted[i]) for i in range(3)):
        raise ValueError(f"mask must be {wanted}, the first three or 1, got shape {tuple(mask.shape)}")
