"""Scaled dot product attention with an encoding, on a CPU without a matrix of biases where distance decides."""

from __future__ import annotations

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

    Give it in place of that function, with an encoding for the ``attn_mask`` of biases. On a CPU, in long sequences,
    the bias of an encoding that depends on distance alone is read from its line of 2n - 1 numbers, and the gradients of
    a learned one are summed up block by block: no n x n tensor, but with a mask that is more than padding, and in the
    weights form of `AttenuatedEncoding` with padding, or where the decay is so slow that most queries reach an end of
    the sequence. Elsewhere, and for every other encoding, this is that function with ``attn_mask=encoding(q, k)``.

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
        NotImplementedError: Gradients of a long learned bias with ``create_graph=True``. As PyTorch's fast kernel, this
            has no gradients of gradients; under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` all are there.

    Note:
        On CUDA it is ``encoding.score_modification`` with FlexAttention that does without the matrix.

    Examples:
        >>> from pelocality.encodings import ALiBi
        >>> query, key, value = torch.randn(3, 1, 8, 4096, 16)
        >>> biased_attention(query, key, value, ALiBi(heads=8)).shape
        torch.Size([1, 8, 4096, 16])
    """
    encoding = getattr(encoding, "_orig_mod", encoding)  # what torch.compile wraps
    _check(query, key, value, encoding, mask)
    queries, keys = query.shape[-2], key.shape[-2]
    factors = _factors(query, keys, encoding, mask) if dropout_p == 0 else None
    learned = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in factors or ())
    alike = None if factors is None or queries * keys < _TURNED else _alike(factors[1], queries)
    stretches = None if alike is None or len(alike) < queries / 2 else _stretches(mask, keys)
    if factors is None or not (learned or stretches):
        bias = encoding.distinct(queries, keys, mask=mask, dtype=query.dtype)
        return _attend(query, key, value, bias, mask, dropout_p, scale)

    line, rows = factors[0].detach(), None if factors[1] is None else factors[1].detach()
    if alike is not None and stretches is not None:
        output = _turned(query, key, value, _turned_biases(line, rows, alike, keys, query.dtype), stretches, scale)
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


def _factors(query: Tensor, keys: int, encoding: Encoding, mask: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """What the bias is made of, where attention may be faster by that than by the matrix."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():  # which have ways of their own
        return None
    # no tensor but a plain one may be asked what its numbers are
    if type(query) not in (Tensor, torch.nn.Parameter) or torch._C._are_functorch_transforms_active():
        return None
    # of every device, whatever it is called; off under sdpa_kernel(SDPBackend.MATH), which asks for matrices
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return None
    queries = query.shape[-2]
    scores = queries * keys if query.numel() else 0
    may_learn = scores >= _BY_BLOCKS and any(number.requires_grad for number in encoding.parameters())
    if not (may_learn or scores >= _TURNED) or not _says_its_factors(encoding):
        return None
    return encoding.factors(queries, keys, mask)


def _says_its_factors(encoding: Encoding) -> bool:
    """Whether factors were written for the bias that the encoding has, and not for one that a subclass replaced."""
    kinds = type(encoding).__mro__

    def place(name: str) -> int:
        return -1 if name in vars(encoding) else next(i for i, kind in enumerate(kinds) if name in vars(kind))

    return all(place("factors") <= place(name) for name in ("bias", "distinct", "_kernel"))


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


def _stretches(mask: Tensor | None, keys: int) -> list[range] | None:
    """Where the visible keys of each sequence stand, if in one stretch, the same for all its queries: padding.

    One stretch for all where nothing tells the sequences apart; None where the mask is more than padding.
    """
    if mask is None:
        return [range(keys)]
    if mask.shape[1:3] != (1, 1):
        return None
    found = []
    for visible in mask[:, 0, 0]:
        places = visible.nonzero()[:, 0].tolist()
        stretch = range(places[0], places[-1] + 1) if places else range(0)
        if len(stretch) != len(places):
            return None
        found.append(stretch)
    return found


def _turned_biases(
    line: Tensor, rows: Tensor | None, alike: range, keys: int, dtype: torch.dtype
) -> list[tuple[range, Tensor]]:
    """The bias with the last query first: then one of distance alone is a view of the line, and takes no room.

    Where rows differ, which is near the ends of the sequence, they have a matrix of their own; hence the parts.
    """
    queries = line.shape[-1] - keys + 1
    if rows is None:
        return [(range(queries), mirrored(cast(line, dtype), queries))]
    rows, alike = rows.flip(-1), range(queries - alike.stop, queries - alike.start)
    biases = []
    for part in filter(len, (range(alike.start), alike, range(alike.stop, queries))):
        window = line[:, part.start : part.stop + keys - 1]
        if part == alike:
            bias = mirrored(cast(window * rows[:, part.start, None], dtype), len(part))
        else:
            # into memory of its own: the product would take over the view's order, and SDPA make a copy in another
            room = line.new_empty(max(len(line), len(rows)), len(part), keys)
            of_each = rows[:, part.start : part.stop, None]
            bias = cast(torch.mul(mirrored(window, len(part)), of_each, out=room), dtype)
        biases.append((part, bias))
    return biases


def _turned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: list[tuple[range, Tensor]],
    stretches: list[range],
    scale: float | None,
) -> Tensor:
    """Attention with the last query first, sequence by sequence where they are padded, over visible keys alone."""
    sequences = (each.chunk(len(stretches)) for each in (query.flip(-2), key, value))
    outputs = []
    for q, k, v, visible in zip(*sequences, stretches, strict=True):
        if not visible:
            outputs.append(q.new_zeros(*q.shape[:3], v.shape[-1]))
            continue
        seen = slice(visible.start, visible.stop)
        parts = [
            _attend(q[:, :, part.start : part.stop], k[:, :, seen], v[:, :, seen], bias[..., seen], None, 0.0, scale)
            for part, bias in biases
        ]
        outputs.append(torch.cat(parts, -2))
    return torch.cat(outputs).flip(-2)


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

    With A the attention, g the gradient of the output and P_ij = g_i . v_j that of the attention, the gradient of the
    logits, and so of the bias, is A_ij (P_ij - sum_k A_ik P_ik) (Dao et al., FlashAttention, 2022, appendix B).
    PyTorch's kernels on a CPU keep it to themselves, and where a bias needs it turn to products of whole matrices.
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
        return output.clone()  # as itself it could not be written into

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.ran_in = output.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, line, rows, mask = ctx.saved_tensors
        if torch.is_grad_enabled():  # once_differentiable says so to backward(), and nothing to autograd.grad
            raise NotImplementedError(
                "gradients of gradients through a long learned bias; call it under "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has them"
            )
        # rounded as the forward pass had them: under a large bias what the rounding does to attention is no trifle
        q, k, v, g = (each.to(ctx.ran_in).to(line.dtype) for each in (query, key, value, gradient))
        for_line, for_rows = _by_blocks(q * ctx.scale, k, v, g, line, rows, mask, ctx.ran_in)
        return gradient, None, None, None, for_line, for_rows, None, None


def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    line: Tensor,
    rows: Tensor | None,
    mask: Tensor | None,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of line and rows, from all (batch, heads, length, d), with never more than a block of scores."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    seen = None if mask is None else mask.expand(batch, heads, queries, keys)
    blind = not bool(line.isfinite().all())  # whether a query may see nothing although no mask says so
    for_line, for_rows = torch.zeros_like(line), None if rows is None else torch.zeros_like(rows)
    for head in range(heads):
        for part, window in blocks(queries, keys, q.device):
            of_line, of_rows = line[head, None, window], None if rows is None else rows[head, None, part]
            bias = cast(laid_out(of_line, part.stop - part.start, of_rows), rounded).to(line.dtype)
            step = max(1, _AT_A_TIME // bias.numel())
            total = None
            for some in (slice(first, first + step) for first in range(0, batch, step)):
                visible = None if seen is None else seen[some, head, part]
                found = _of_logits(
                    q[some, head, part], k[some, head], v[some, head], g[some, head, part], bias, visible, blind
                )
                found = found if len(found) == 1 else found.sum(0, keepdim=True)
                total = found if total is None else total.add_(found)
            assert total is not None
            line_sums, row_sums = fold(total, of_line, of_rows)
            for_line[head, window] += line_sums[0]
            if for_rows is not None and row_sums is not None:
                for_rows[head, part] = row_sums[0]
    return for_line, for_rows


def _of_logits(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor, visible: Tensor | None, blind: bool) -> Tensor:
    """The gradient of the logits, (..., query, key), in as few passes over memory as may be."""
    logits = (q @ k.mT).add_(bias)
    attention = logits.softmax(-1) if visible is None and not blind else masked_softmax(logits, visible)
    change = (g @ v.mT).mul_(attention)  # A P
    return change.addcmul_(attention, change.sum(-1, keepdim=True), value=-1)


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
