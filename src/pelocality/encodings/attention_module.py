"""Self-attention for your own transformer, which combines content with an encoding in one of three modes."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pelocality._checks import HIDDEN, check_choice
from pelocality.encodings._checks import check_tensor
from pelocality.encodings._scores import attend, attention_weights
from pelocality.encodings.attention_function import biased_attention
from pelocality.encodings.base import Encoding, cast, check_encoding
from pelocality.encodings.base_content import ContentEncoding
from pelocality.encodings.fixed import NoEncoding


class PositionalSelfAttention(nn.MultiheadAttention):
    """Multi-head self-attention with a positional encoding.

        add:       softmax(Q K^T / sqrt(d_head) + bias) V,                        W_o
        concat:    [P V ; softmax(Q K^T / sqrt(d_head)) V],                       W_o from 2d to d
        sequence:  self-attention without bias over X' = P X W_p,                 W_o

    with the encoding's ``bias`` and weights ``P`` of each head, Q = X W_q and so on. These are the three modes of the
    code of Chen et al. (2023). The layer has the interface and the parameter names of
    ``nn.MultiheadAttention(batch_first=True)``, and can replace it in ``nn.TransformerEncoderLayer(batch_first=True)``.
    In add mode, the ``state_dict`` of ``nn.MultiheadAttention`` loads with ``strict=False``.

    Warning:
        In an ``nn.TransformerEncoderLayer``, always give ``batch_first=True``, which is not the default. The layer
        stores this flag only in the attention module that is replaced. Without the flag, attention would run over the
        batch dimension, without an error unless the shape of a mask does not fit.

    Args:
        embed_dim: d.
        num_heads: H; d_head = d / H.
        encoding: An encoding with H heads, or with one head that all heads share; None: no encoding. A causal encoding
            makes the layer causal. The encoding is not copied, so layers with the same encoding share its parameters.
            With a device or a dtype, the layer uses a copy on that device and in that dtype.
        mode: How content and encoding are combined.
        dropout: Probability of dropping an attention weight in training; P has no dropout.
        bias: Whether the projections have a bias.
        device: Device of the parameters and the encoding; None: torch's default, and the encoding's own.
        dtype: Dtype of the parameters and the encoding; None: torch's default, and the encoding's own.

    Raises:
        TypeError: The encoding is not an `Encoding`, or another argument has the wrong type.
        ValueError: The encoding has another number of heads, or an unknown mode.

    Note:
        Any length works, and padding does not change the output: P and the weights form of `AttenuatedEncoding` are
        normalised over the visible tokens.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> layer = PositionalSelfAttention(32, 4, AttenuatedEncoding(heads=4, decay=[0.1, 0.2, 0.4, 0.8]))
        >>> output, attention = layer(torch.randn(2, 10, 32))
        >>> output.shape, attention.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encoding: Encoding | None = None,
        mode: Literal["add", "concat", "sequence"] = "add",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("mode", mode, ("add", "concat", "sequence"))
        encoding = NoEncoding() if encoding is None else encoding
        check_encoding(encoding, num_heads)
        if mode != "add" and isinstance(encoding, ContentEncoding):
            raise TypeError(f"mode '{mode}' needs weights without content, and {type(encoding).__name__} has none")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=True, **place)
        # disables the fused path of nn.TransformerEncoderLayer, which would ignore the encoding
        self._qkv_same_embed_dim = False
        self.mode = mode
        # a copy where it is moved, since .to() works in place
        self.encoding = encoding if device is None and dtype is None else copy.deepcopy(encoding).to(**place)
        if mode == "concat":
            self.out_proj = nn.Linear(2 * embed_dim, embed_dim, bias, **place)  # type: ignore[assignment]
        self.mix_proj = nn.Linear(embed_dim, embed_dim, bias, **place) if mode == "sequence" else None
        for linear in (self.out_proj, self.mix_proj) if bias else ():
            if linear is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention.

        Args:
            query: X, (batch, n, embed_dim) or (n, embed_dim).
            key: The same tensor as query, or None.
            value: The same tensor as query, or None.
            key_padding_mask: (batch, n) or (n,), True where a token is padding, as in ``nn.MultiheadAttention`` (the
                opposite of a tokenizer's ``attention_mask``). Floats are added to the logits. A float of -1000 or below
                (-1e4, ``finfo.min``) hides a key as True does.
            need_weights: Whether to return the attention. Without it SDPA computes the output, which is faster.
            attn_mask: (n, n) or (batch * num_heads, n, n), True where a query does not see a key; or floats, as
                above. P has no logits, so a float mask only hides keys from P.
            average_attn_weights: Whether the attention is averaged over heads.
            is_causal: Whether later keys are hidden. Unlike ``nn.MultiheadAttention``, this needs no attn_mask.

        Returns:
            The output, of the shape of query, and the attention before dropout, (batch, n, n), averaged, or
            (batch, heads, n, n), or None. Concat mode has 2H heads, first those of P and then those of content. In
        sequence mode, attention is over X'. Rows sum to 1. A fully masked row is 0, and its output is the bias of the
        output projection.

        Raises:
            TypeError: The query is not a tensor, or a mask is not a tensor of booleans or floats.
            ValueError: Keys or values other than the query, shapes that do not fit, or a nested tensor.
        """
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("this is self-attention: key and value must be the query itself, or left out")
        check_tensor("query", query)
        x = query if query.ndim == 3 else query[None]
        added, visible = self._masks(x, key_padding_mask, attn_mask, is_causal)  # (batch or 1, heads or 1, n or 1, n)

        if self.mode == "sequence":
            assert self.mix_proj is not None
            x = self._merge(self._mix(self._split(self.mix_proj(x)), visible)[0])
        q, k, v = map(self._split, functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if self.mode == "add" and added is None and not need_weights:
            output = biased_attention(q, k, v, self.encoding, mask=visible, dropout_p=dropout)
        else:
            if self.mode == "add":
                q, k, mask = self.encoding.attention_inputs(q, k, mask=visible, added=added)
            else:
                mask = visible if added is None else cast(added, q.dtype, visible)
            weights = attention_weights(q, k, mask) if need_weights else None
            dropped = None if weights is None else functional.dropout(weights, dropout)
            output = attend(q, k, v, mask, dropout, None) if dropped is None else dropped @ v
        output = self._merge(output)
        if self.mode == "concat":
            positional, P = self._mix(v, visible)
            output = torch.cat([self._merge(positional), output], -1)
            if weights is not None:
                weights = torch.cat([P.expand_as(weights), weights], -3)
        output = self.out_proj(output)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        if query.ndim == 2:
            output, weights = output[0], None if weights is None else weights[0]
        return output, weights

    def _mix(self, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return P V, (batch, heads, n, d_head), and P, (batch or 1, heads or 1, n, n)."""
        P = self.encoding.weights(v.shape[-2], mask=visible).to(v.dtype)
        if P.ndim == 3:  # the same P for the whole batch, which is not expanded
            return torch.einsum("hqk,bhkd->bhqd", P, v), P[None]
        return P @ v, P

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)  # (batch, heads, n, d_head)

    def _merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)  # (batch, n, d)

    def _masks(
        self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the floats to add and the visible keys, each None or (batch or 1, heads or 1, query or 1, key)."""
        (batch, n, _), H = x.shape, self.num_heads
        added: Tensor | None = None
        visible: Tensor | None = None
        if is_causal or (self.encoding.causal and self.mode != "add"):  # the bias itself is causal in add mode
            visible = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
        of_keys = [((batch, n), (batch, 1, 1, n)), *([((n,), (1, 1, 1, n))] if batch == 1 else [])]
        of_pairs = [((n, n), (1, 1, n, n)), ((batch * H, n, n), (batch, H, n, n))]
        for name, mask, shapes in (("key_padding_mask", key_padding_mask, of_keys), ("attn_mask", attn_mask, of_pairs)):
            if mask is None:
                continue
            check_tensor(name, mask)
            shape = next((full for given, full in shapes if mask.shape == given), None)
            if shape is None:
                wanted = " or ".join(str(given) for given, _ in shapes)
                raise ValueError(f"{name} must be {wanted}, got shape {tuple(mask.shape)}")
            mask = mask.reshape(shape)
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise TypeError(f"{name} must hold booleans (True: hidden) or floats (added), got {mask.dtype}")
            if mask.is_floating_point():
                added = mask if added is None else added + mask
                mask = mask <= HIDDEN  # NaN is visible, and so reaches the output
            visible = ~mask if visible is None else visible & ~mask
        return added, visible

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.embed_dim}, {self.num_heads}, mode={self.mode!r}, dropout={self.dropout}"
