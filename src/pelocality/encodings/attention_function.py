"""Scaled dot product attention with an encoding, on a CPU without an n x n matrix if the bias is Toeplitz."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pelocality._checks import flag
from pelocality._transforms import transformed
from pelocality.encodings._checks import check_tensor
from pelocality.encodings._scores import attend
from pelocality.encodings.base import Encoding, check_encoding
from pelocality.encodings.base_relative import RelativeEncoding

_LONG = 2**18  # scores per head from which attention without the matrix is faster on a CPU
_OF_TOKENS = "of a tokenizer's mask pass attention_mask[:, None, None].bool()"


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoding: Encoding,
    *,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute PyTorch's ``scaled_dot_product_attention`` with the bias of an encoding.

        softmax(scale Q K^T + bias) V

    Use this function in the place of PyTorch's, with an encoding instead of a float ``attn_mask``. For long sequences
    without a mask on a CPU, a Toeplitz bias that is not trained is a view of its 2n - 1 numbers, and no n x n tensor is
    built. In all other cases, PyTorch's function gets the bias as its mask.

    Args:
        query: Q, (batch, heads, q, d).
        key: K, (batch, heads, k, d), k >= q; the last query is at the position of the last key.
        value: V, (batch, heads, k, d_v).
        encoding: An encoding with the same number of heads, or with one head that all heads share.
        mask: (batch or 1, heads or 1, q or 1, k) of booleans, True where a query sees a key. None: a query sees all
            keys that the encoding does not mask.
        dropout_p: Probability of dropping an attention weight. Dropout is always applied, so pass 0 in evaluation.
        scale: Factor of the scores; None: 1 / sqrt(d).
        enable_gqa: Whether keys and values may have fewer heads, each of which serves a group of query heads.

    Returns:
        (batch, heads, q, d_v); zeros for a query that is fully masked.

    Raises:
        TypeError: The encoding is not an `Encoding`, or the mask is not a tensor of booleans.
        ValueError: Shapes that do not fit, or an encoding with another number of heads.

    Note:
        On CUDA, FlexAttention with ``encoding.score_modification`` needs no n x n matrix.

    Examples:
        >>> from pelocality.encodings import ALiBi
        >>> query, key, value = torch.randn(3, 1, 8, 4096, 16)
        >>> biased_attention(query, key, value, ALiBi(heads=8)).shape
        torch.Size([1, 8, 4096, 16])
    """
    encoding = getattr(encoding, "_orig_mod", encoding)  # the module inside torch.compile's wrapper
    if flag("enable_gqa", enable_gqa):
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    _check(query, key, value, encoding, mask)
    bias = _bias_by_distance(query, key, value, encoding) if mask is None and dropout_p == 0 else None
    if bias is not None:  # with queries in reversed order, the Toeplitz matrix is a view of the bias by distance
        matrix = bias.unfold(-1, key.shape[-2], 1)[None]
        return scaled_dot_product_attention(query.flip(-2), key, value, attn_mask=matrix, scale=scale).flip(-2)
    query, key, added = encoding.attention_inputs(query, key, mask=mask, scale=scale)
    return attend(query, key, value, added, dropout_p, scale)


def _bias_by_distance(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding) -> Tensor | None:
    """Return the bias by distance, (heads or 1, q + k - 1), or None if attention needs the matrix."""
    queries, keys = query.shape[-2], key.shape[-2]
    if torch.compiler.is_compiling() or queries * keys < _LONG or query.numel() == 0 or query.device.type != "cpu":
        return None
    if not isinstance(encoding, RelativeEncoding) or not encoding.is_toeplitz or torch.is_autocast_enabled("cpu"):
        return None
    bias = encoding.by_distance(queries, keys)
    tensors = query, key, value, bias
    plain = all(type(each) in (Tensor, nn.Parameter) for each in tensors) and not transformed(*tensors)
    exact = torch.promote_types(bias.dtype, query.dtype) == query.dtype  # half precision rounds the finished bias
    learned = torch.is_grad_enabled() and bias.requires_grad  # the fast kernel has no gradient of the bias
    # a query that sees itself is not fully masked
    fits = plain and exact and not learned and bool(bias[:, keys - 1].isfinite().all())
    return bias.to(query.dtype) if fits else None


def _check(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding, mask: Tensor | None) -> None:
    """Raise an error if types or shapes do not fit."""
    check_tensor("query", query)
    same_batch = {query.ndim, key.ndim, value.ndim} == {4} and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not same_batch or not query.shape[2] <= key.shape[2] == value.shape[2] or key.shape[3] != query.shape[3]:
        wanted = "query (batch, heads, q, d), key (batch, heads, k >= q, d) and value (batch, heads, k, d_v) must fit"
        raise ValueError(f"{wanted} (fewer heads need enable_gqa=True), got {query.shape}, {key.shape}, {value.shape}")
    check_encoding(encoding, query.shape[1])
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must hold booleans, True where a query sees a key; {_OF_TOKENS}")
    full = (*query.shape[:3], key.shape[2])
    if mask.ndim != 4 or mask.shape[3] != full[3] or any(mask.shape[i] not in (1, full[i]) for i in range(3)):
        raise ValueError(f"mask must be {full}, the first three or 1, got shape {tuple(mask.shape)}; {_OF_TOKENS}")
