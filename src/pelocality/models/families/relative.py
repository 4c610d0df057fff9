"""Families whose positions are a term of the logits: T5, MPNet, BLOOM and MPT (ALiBi), XLNet."""

# ruff: noqa: D102 - the methods are documented once, on Architecture and KnownLogits

from typing import Any

import torch
from torch import Tensor

from pelocality._toeplitz import diagonals
from pelocality.encodings.alibi import published_slopes
from pelocality.models.families._declared import head_size
from pelocality.models.families._logits import KnownLogits
from pelocality.models.families._record import Architecture


class T5(KnownLogits):
    """T5 (Raffel et al., 2020): a bias per bucket of distances, shared by all layers; no 1 / sqrt(d_head)."""

    model_types = ("t5", "mt5")
    projections = ("q", "k")
    head_size = "key_value_proj_dim"

    def scaling(self, module: Any) -> float:
        return 1.0

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        first: Any = self.attention_layers(base)[0]
        column, row = first.compute_bias(length, 1)[0, ..., 0], first.compute_bias(1, length)[0, :, 0]  # (head, n) each
        return diagonals(column, row)


class MpNet(KnownLogits):
    """MPNet (Song et al., 2020): a relative bias in every layer, and an absolute table at the input."""

    model_types = ("mpnet",)
    table = "learned"
    first_row = 2
    counts_tokens = True
    projections = ("q", "k")

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        table = base.encoder.relative_attention_bias
        distance = torch.arange(1 - length, length, device=table.weight.device)
        return table(base.encoder.relative_position_bucket(distance)).T


class Bloom(KnownLogits):
    """BLOOM (BigScience, 2022): causal, with ALiBi's slopes (Press et al., 2022) on the distance.

    transformers adds slope * j, which differs from slope * (j - i) by a constant per row: the softmax is the same.
    """

    model_types = ("bloom",)

    def declared_slopes(self, config: Any) -> Tensor | None:
        return published_slopes(config.n_head)

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, head, 3, d_head): query, key and value are adjacent in each head
        fused = module.query_key_value(hidden).unflatten(-1, (module.num_heads, 3, module.head_dim))
        return fused[..., 0, :].transpose(1, 2), fused[..., 1, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float(module.inv_norm_factor)

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        pair = torch.ones(1, 2, dtype=torch.long)
        slopes = base.build_alibi_tensor(pair, base.num_heads, torch.float32)[:, 0, 1]  # slope * j at j = 1
        return slopes[:, None] * torch.arange(1 - length, length)


class Mpt(Architecture):
    """MPT (MosaicML, 2023): ALiBi's slopes, computed for the longest input that the configuration allows."""

    model_types = ("mpt",)

    def declared_slopes(self, config: Any) -> Tensor | None:
        attention = config.attn_config
        return published_slopes(config.n_heads) ** (attention.alibi_bias_max / 8) if attention.alibi else None

    def max_length(self, base: Any) -> int | None:
        return int(base.config.max_seq_len)

    def open_mask(self, attention: Any, call: dict[str, Any]) -> None:
        call["attention_mask"] = None


class Falcon(Architecture):
    """Falcon (TII, 2023): ALiBi's slopes, which are added before the logits are scaled, or rotations."""

    model_types = ("falcon",)

    def declared_slopes(self, config: Any) -> Tensor | None:
        return published_slopes(config.num_attention_heads) / head_size(config) ** 0.5 if config.alibi else None


class XlNet(KnownLogits):
    """XLNet (Yang et al., 2019) with the relative attention of Transformer-XL (Dai et al., 2019).

    Its logits are (q + r_w_bias) . k + (q + r_r_bias) . (r R): r_w_bias is the content bias u, and r_r_bias . (r R)
    the purely positional term.
    """

    model_types = ("xlnet",)
    relative_terms = True
    token_axis = 0
    mask_arguments = ("attn_mask_h",)
    position_arguments = ("r",)
    position_weights = ("r", "r_r_bias")

    def base(self, model: Any) -> Any:
        """Return the transformer; refuse ``bi_data`` mode, where half of each batch runs backwards."""
        base = super().base(model)
        if base.config.bi_data:
            raise ValueError("XLNet with config.bi_data=True reads half of each batch backwards; set it to False")
        return base

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = torch.einsum("bid,dhe->bhie", hidden, module.q)
        return query, torch.einsum("bid,dhe->bhie", hidden, module.k)

    def scaling(self, module: Any) -> float:
        return float(module.scale)

    def declared_causal(self, config: Any, base: Any) -> bool | None:
        return bool(config.attn_type == "uni")

    def visible_distances(self, base: Any, module: Any, length: int) -> Tensor:
        if self.causal(base) and base.same_length:  # XLNet's mask then hides all but the token itself
            return torch.arange(1 - length, length, device="cpu") == 0
        return super().visible_distances(base, module, length)

    def open_mask(self, attention: Any, call: dict[str, Any]) -> None:
        call["attn_mask_h"] = None

    def _projected_sinusoids(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the sinusoids projected by r, unscaled: (head, 2n - 1, d_head)."""
        # Rows are the distances i - j = n, n - 1, ..., so that row n + k is j - i = k.
        table = base.relative_positional_encoding(length, length)[1:, 0]
        projected = torch.einsum("kd,dhe->hke", table.to(module.r), module.r)
        missing = 2 * length - 1 - projected.shape[1]  # a causal ("uni") model has no rows for the future
        return torch.nn.functional.pad(projected, (0, 0, 0, missing))

    def relative_keys(self, base: Any, module: Any, length: int) -> Tensor | None:
        return self._projected_sinusoids(base, module, length)

    def relative_bias(self, base: Any, module: Any, length: int) -> Tensor | None:
        projected = self._projected_sinusoids(base, module, length)
        return self.scaling(module) * torch.einsum("he,hke->hk", module.r_r_bias, projected)

    def content_bias(self, module: Any) -> Tensor | None:
        return module.r_w_bias

    def segment_logits(self, module: Any, query: Tensor, token_type_ids: Tensor) -> Tensor | None:
        differs = (token_type_ids[:, :, None] != token_type_ids[:, None, :]).long()
        # (batch, head, n, 2): each query against "same segment" and "another segment"
        scores = torch.einsum("bhie,she->bhis", query + module.r_s_bias[:, None], module.seg_embed)
        index = differs[:, None].expand(-1, scores.shape[1], -1, -1)
        return scores.gather(-1, index)


RECORDS: tuple[Architecture, ...] = (
    *(T5(), MpNet(), Bloom(), Mpt(), Falcon(), XlNet()),
    Architecture("inkling_text", "inkling2_text", "inkling2_loop_text", relative_terms=True),
    Architecture("prophetnet", relative_terms=None),  # only its decoder has them
)
