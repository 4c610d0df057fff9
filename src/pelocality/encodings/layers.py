"""Self-attention for your own transformer, with any encoding, injected in any of three ways."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pelocality._checks import count, flag
from pelocality.encodings._scores import HIDDEN, attend, attention_weights
from pelocality.encodings.attention import biased_attention
from pelocality.encodings.base import Encoding, cast
from pelocality.encodings.simple import NoEncoding

Mode = Literal["add", "concat", "sequence"]


class PositionalSelfAttention(nn.Module):
    """Multi-head self-attention with a positional encoding.

        add:       softmax(Q K^T / sqrt(d_head) + bias) V,                        W_o
        concat:    [P V ; softmax(Q K^T / sqrt(d_head)) V],                       W_o from 2d to d
        sequence:  the self-attention, without bias, of X' = P X W_p,             W_o

    with the encoding's ``bias`` and weights ``P``, one of each per head, Q = X W_q and so on: the three ways of the
    code of Chen et al. (2023). It is called as ``nn.MultiheadAttention(batch_first=True)`` is, names its parameters as
    that does (its ``state_dict`` loads in add mode with ``strict=False``), and can take its place in
    ``nn.TransformerEncoderLayer(batch_first=True)``.

    Warning:
        Never in an ``nn.TransformerEncoderLayer`` without ``batch_first=True``, which is not its default: the attention
        module alone knows of that flag, so that after the exchange nothing is left to see that the sequence comes
        first, and the layer would attend over the batch, without a word unless a mask fails to fit.

    Args:
        embed_dim: d.
        num_heads: H; d_head = d / H.
        encoding: Of H heads, or of one that all share; None: no encoding. A causal one makes the layer causal. It is
            kept as it is, not copied, so that layers given one encoding share what it learns; with a device or a dtype
            the layer keeps a copy, moved there, and yours stays as it was.
        mode: How it enters.
        dropout: Share of attention weights left out while training; P is left whole.
        bias: Whether the projections have one.
        device: Where the parameters and the encoding go; None: torch's default, and the encoding stays where it is.
        dtype: Their precision; None: as for device.

    Raises:
        TypeError: An encoding that is none, or an argument of another type than stated.
        ValueError: embed_dim that num_heads does not divide, an encoding of another number of heads, an unknown mode.

    Note:
        Any length works, and padding changes nothing: P and the weights form of `AttenuatedEncoding` are shared out
        among the tokens that are there.

    Examples:
        >>> from pelocality.encodings import AttenuatedEncoding
        >>> layer = PositionalSelfAttention(32, 4, AttenuatedEncoding(heads=4, decay=[0.1, 0.2, 0.4, 0.8]))
        >>> output, attention = layer(torch.randn(2, 10, 32))
        >>> output.shape, attention.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 10, 10]))
    """

    # nn.TransformerEncoderLayer's fused path would read the projections and leave the encoding out: this declines it
    _qkv_same_embed_dim = False
    batch_first = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        encoding: Encoding | None = None,
        mode: Mode = "add",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if count("embed_dim", embed_dim) % count("num_heads", num_heads):
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if mode not in ("add", "concat", "sequence"):
            raise ValueError(f"mode must be 'add', 'concat' or 'sequence', got {mode!r}")
        flag("bias", bias)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"dropout must be a number, got {dropout!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        encoding = NoEncoding() if encoding is None else encoding
        if not isinstance(encoding, Encoding):
            raise TypeError(f"encoding must be a pelocality.encodings.Encoding, got {type(encoding).__name__}")
        if encoding.heads not in (1, num_heads):
            raise ValueError(f"encoding must have 1 or {num_heads} heads, as the layer has, got {encoding.heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.mode, self.dropout, self.encoding = mode, dropout, encoding
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **place))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim * (2 if mode == "concat" else 1), embed_dim, bias, **place)
        self.mix_proj = nn.Linear(embed_dim, embed_dim, bias, **place) if mode == "sequence" else None
        if device is not None or dtype is not None:  # .to() works in place, and the caller's is not ours to cast
            self.encoding = copy.deepcopy(encoding).to(**place)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)  # as nn.MultiheadAttention does
        for linear in (self.out_proj, self.mix_proj):
            if linear is not None and linear.bias is not None:
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
        """Attend.

        Args:
            query: X, (batch, n, embed_dim) or (n, embed_dim).
            key: The same tensor again, or None.
            value: The same tensor again, or None.
            key_padding_mask: (batch, n) or (n,), True where a token is padding, as in ``nn.MultiheadAttention`` (the
                opposite of a tokenizer's ``attention_mask``); or floats, which are added to the logits, and of which
                -1000 and anything below, such as -1e4 and ``finfo.min``, hides a key, as True does.
            need_weights: Whether to return the attention too. Without it SDPA computes the output, faster.
            attn_mask: (n, n) or (batch * num_heads, n, n), True where a query must not see a key; or floats, as
                above. P knows no content and no logits: of a float mask it takes what is hidden, and nothing else.
            average_attn_weights: Whether the attention is averaged over heads.
            is_causal: Whether a query sees no later key. Unlike in ``nn.MultiheadAttention`` it needs no attn_mask.

        Returns:
            The output, as query, and the attention, before dropout: (batch, n, n), averaged, or (batch, heads, n, n),
            or None. In concat mode both kinds of heads: the H positional ones first, then the H of content. In
            sequence mode attention is over the mixed sequence X'. Rows sum to 1; a query that sees nothing has zeros
            in its row, and its output is the projection's bias.

        Raises:
            TypeError: A query that is no tensor, or a mask that is no tensor of booleans or floats.
            ValueError: Keys or values other than the queries, shapes that do not fit, or a nested tensor.
        """
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("this is self-attention: key and value must be the query itself, or left out")
        _check_tensors(query=query, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if query.ndim not in (2, 3) or query.shape[-1] != self.embed_dim:
            raise ValueError(
                f"query must be (batch, n, {self.embed_dim}) or (n, {self.embed_dim}), got shape {tuple(query.shape)}"
            )
        if query.shape[-2] == 0:
            raise ValueError(f"query must hold at least one position, got shape {tuple(query.shape)}")
        x = query if query.ndim == 3 else query[None]
        if query.ndim == 2 and key_padding_mask is not None and key_padding_mask.ndim == 1:
            key_padding_mask = key_padding_mask[None]
        added, visible = self._masks(x, key_padding_mask, attn_mask, is_causal)  # (batch or 1, heads or 1, n or 1, n)

        if self.mode == "sequence":
            assert self.mix_proj is not None
            x = self._merged(self._mix(self._split(self.mix_proj(x)), visible)[0])
        q, k, v = map(self._split, functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if self.mode == "add" and added is None and not need_weights:
            output = biased_attention(q, k, v, self.encoding, mask=visible, dropout_p=dropout)
        else:
            mask = self._mask(x.shape[1], added, visible, q.dtype)
            if need_weights:
                weights = attention_weights(q, k, mask)
                output = functional.dropout(weights, dropout) @ v
            else:
                output = attend(q, k, v, mask, dropout, None)
        output = self._merged(output)
        if self.mode == "concat":
            positional, P = self._mix(v, visible)
            output = torch.cat([self._merged(positional), output], -1)
            if weights is not None:
                weights = torch.cat([P.expand_as(weights), weights], -3)
        output = self.out_proj(output)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        if query.ndim == 2:
            return output[0], None if weights is None else weights[0]
        return output, weights

    def _mask(self, n: int, added: Tensor | None, visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the logits, the bias included, -inf where a key is hidden; or what is visible, or None."""
        if self.mode == "add":
            return self.encoding.additive_mask(n, n, mask=visible, dtype=dtype, added=added)
        if added is None:
            return visible
        return cast(added if visible is None else torch.where(visible, added, -torch.inf), dtype)

    def _mix(self, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """P V, (batch, heads, n, d_head), and P, (batch or 1, heads or 1, n, n)."""
        P = self.encoding.weights(v.shape[-2], mask=visible).to(v.dtype)
        if P.ndim == 3:  # the same for the whole batch: one product per head, P never repeated
            return torch.einsum("hqk,bhkd->bhqd", P, v), P[None]
        return P @ v, P

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)  # (batch, heads, n, d_head)

    def _merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)  # (batch, n, d)

    def _masks(
        self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the logits, and which keys are visible, each (batch or 1, heads or 1, query or 1, key)."""
        batch, n, _ = x.shape
        added: list[Tensor] = []
        visible: list[Tensor] = []
        shaped = []
        if key_padding_mask is not None:
            if key_padding_mask.shape != (batch, n):
                raise ValueError(f"key_padding_mask must be {(batch, n)}, got shape {tuple(key_padding_mask.shape)}")
            shaped.append(("key_padding_mask", key_padding_mask[:, None, None]))
        if attn_mask is not None:
            if attn_mask.shape == (n, n):
                shaped.append(("attn_mask", attn_mask[None, None]))
            elif attn_mask.shape == (batch * self.num_heads, n, n):
                shaped.append(("attn_mask", attn_mask.reshape(batch, self.num_heads, n, n)))
            else:
                per_head = (batch * self.num_heads, n, n)
                raise ValueError(f"attn_mask must be {(n, n)} or {per_head}, got shape {tuple(attn_mask.shape)}")
        for name, mask in shaped:
            if mask.dtype == torch.bool:
                visible.append(~mask)
            elif mask.is_floating_point():
                added.append(mask)
                visible.append(~(mask <= HIDDEN))  # so NaN is no way to hide, and shows
            else:
                raise TypeError(f"{name} must hold booleans (True: left out) or floats (added), got {mask.dtype}")
        if is_causal or (self.encoding.causal and self.mode != "add"):  # in add the bias itself is causal
            visible.append(torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None])
        total = None if not added else added[0] if len(added) == 1 else added[0] + added[1]
        seen = None
        for one in visible:
            seen = one if seen is None else seen & one
        return total, seen

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.embed_dim}, {self.num_heads}, mode={self.mode!r}, dropout={self.dropout}"


def _check_tensors(query: Tensor, **masks: Tensor | None) -> None:
    for name, given in {"query": query, **masks}.items():
        if not isinstance(given, Tensor) and (given is not None or name == "query"):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
        if given is not None and given.is_nested:
            raise ValueError(
                f"{name} must be a padded tensor with a key_padding_mask, got a nested one; where "
                "nn.TransformerEncoder made it, build that with enable_nested_tensor=False, else call "
                f"{name}.to_padded_tensor(0.0)"
            )
