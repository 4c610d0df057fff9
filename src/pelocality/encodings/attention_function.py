"""Scaled dot product attention with an encoding, in long sequences without an n x n matrix if the bias is Toeplitz."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton

from pelocality._checks import described, flag
from pelocality._transforms import transformed
from pelocality.encodings._checks import check_tensor
from pelocality.encodings._scores import attend
from pelocality.encodings.base import Encoding, check_encoding
from pelocality.encodings.base_relative import RelativeEncoding

_LONG = 2**18  # scores per head from which attention without the matrix is faster on a CPU
_MANY = 2**26  # scores of all heads from which our kernels are faster on a GPU
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

    Use this function in the place of PyTorch's, with an encoding instead of a float ``attn_mask``. In long sequences, a
    Toeplitz bias needs no n x n tensor. On a CPU, if there is no mask and the bias is not trained, the matrix is a view
    of its 2n - 1 numbers. On a GPU in half precision, kernels read these numbers. In all other cases, PyTorch's
    function gets the bias as its mask.

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
        TypeError: The encoding is not an `Encoding`.
        ValueError: Shapes or a mask that do not fit, or an encoding with another number of heads.

    Note:
        The kernels are those of an A100, H100 or B200 with triton, for 16, 32, 64 or 128 dimensions, without dropout.
        They have no second derivatives. Inside ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` they are not used.

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
    output = without_matrix(query, key, value, encoding, mask, scale) if dropout_p == 0 else None
    if output is not None:
        return output
    query, key, added = encoding.attention_inputs(query, key, mask=mask, scale=scale)
    return attend(query, key, value, added, dropout_p, scale)


def without_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    encoding: Encoding,
    mask: Tensor | None,
    scale: float | None,
    causal: bool = False,
) -> Tensor | None:
    """Return attention with a Toeplitz bias that is read by distance, or None where it needs the matrix.

    Args:
        query: (batch, heads, q, d).
        key: (batch, heads or fewer, k, d).
        value: (batch, heads or fewer, k, d_v).
        encoding: The encoding.
        mask: As for `biased_attention`.
        scale: As for `biased_attention`.
        causal: Whether keys after the query are hidden, also of an encoding that is not causal.
    """
    queries, keys, on_gpu = query.shape[-2], key.shape[-2], query.device.type == "cuda"
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or query.numel() == 0:  # type: ignore[attr-defined, no-untyped-call]
        return None
    if not isinstance(encoding, RelativeEncoding) or not encoding.is_toeplitz:
        return None
    if not (_fit_kernels(query, key, value) if on_gpu else _fit_view(query, key, mask)):
        return None
    bias = encoding.by_distance(queries, keys)
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    tensors = query, key, value, bias, *(() if mask is None else (mask,))
    plain = all(type(each) in (Tensor, nn.Parameter) and each.device == query.device for each in tensors)
    if not plain or transformed(*tensors):
        return None
    learned = torch.is_grad_enabled() and bias.requires_grad
    if on_gpu:
        if learned and torch.are_deterministic_algorithms_enabled():  # gradients of one distance are added in any order
            return None
        from pelocality.encodings._toeplitz_kernels import ToeplitzAttention

        if causal:
            bias = torch.cat([bias[:, :keys], torch.full_like(bias[:, keys:], -torch.inf)], -1)
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        return ToeplitzAttention.apply(query, key, value, bias, mask, scale, causal or encoding.causal)  # type: ignore[no-untyped-call]
    exact = torch.promote_types(bias.dtype, query.dtype) == query.dtype  # half precision rounds the finished bias
    # the fast kernel has no gradient of the bias; a query that sees itself is not fully masked
    if causal or learned or not exact or not bool(bias[:, keys - 1].isfinite().all()):
        return None
    # with queries in reversed order, the Toeplitz matrix is a view of the bias by distance
    matrix = bias.to(query.dtype).unfold(-1, keys, 1)[None]
    return scaled_dot_product_attention(query.flip(-2), key, value, attn_mask=matrix, scale=scale).flip(-2)


def _fit_view(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether PyTorch's kernel takes a view of the numbers by distance: on a CPU, in long sequences."""
    usual = query.device.type == "cpu" and mask is None and not torch.is_autocast_enabled("cpu")
    return usual and query.shape[-2] * key.shape[-2] >= _LONG


def _fit_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether our kernels compute attention of these tensors on a GPU: in half precision, on NVIDIA's."""
    (*heads, queries, size), dtype = query.shape, query.dtype
    if size not in (16, 32, 64, 128) or value.shape[-1] != size or (pairs := math.prod(heads)) >= 2**16:
        return False
    if queries < 128 or pairs * queries * key.shape[-2] < _MANY:  # a kernel has a block of queries
        return False
    if dtype not in (torch.float16, torch.bfloat16) or {key.dtype, value.dtype} != {dtype}:
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != dtype:
        return False
    # a user who wants another implementation switches off this one, as with torch.nn.attention.sdpa_kernel
    wanted: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    if torch.version.hip is not None or not wanted or not has_triton():
        return False
    # A100, H100 and B200, which have the shared memory for blocks of 128 dimensions
    return torch.cuda.get_device_capability(query.device) in ((8, 0), (9, 0), (10, 0))


def _check(query: Tensor, key: Tensor, value: Tensor, encoding: Encoding, mask: Tensor | None) -> None:
    """Raise an error if types or shapes do not fit."""
    check_tensor("query", query)
    same_batch = {query.ndim, key.ndim, value.ndim} == {4} and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not same_batch or not query.shape[2] <= key.shape[2] == value.shape[2] or key.shape[3] != query.shape[3]:
        wanted = "query (batch, heads, q, d), key (batch, heads, k >= q, d) and value (batch, heads, k, d_v) must fit"
        raise ValueError(f"{wanted} (fewer heads need enable_gqa=True), got {query.shape}, {key.shape}, {value.shape}")
    check_encoding(encoding, query.shape[1])
    full = (*query.shape[:3], key.shape[2])
    is_mask = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4)
    sizes = full if mask is None or not is_mask else mask.shape
    if not is_mask or sizes[3] != full[3] or any(size not in (1, most) for size, most in zip(sizes, full, strict=True)):
        wanted = f"booleans {full}, the first three or 1, True where a query sees a key"
        raise ValueError(f"mask must be {wanted}, got {described(mask)}; {_OF_TOKENS}")
