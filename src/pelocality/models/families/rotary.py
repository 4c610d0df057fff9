"""Families that turn queries and keys by position (RoPE, Su et al., 2021): Llama and kin, ModernBERT."""

# ruff: noqa: D102 - the methods are documented once, on Architecture

from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models.families._record import Architecture, heads, looks_back


class Llama(Architecture):
    """Llama (Touvron et al., 2023) and models built like it: causal, keys shared by groups of heads."""

    model_types = ("llama", "mistral", "qwen2")
    signal = "rotary_emb: queries and keys are rotated by their position in every layer"

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.self_attn for layer in base.layers]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = heads(module.q_proj(hidden), module.head_dim)
        key = heads(module.k_proj(hidden), module.head_dim)
        # grouped-query attention: each key head serves a run of query heads
        return query, key.repeat_interleave(module.num_key_value_groups, dim=1)

    def causal(self, base: Any) -> bool:
        return looks_back(base)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        seen = super().visible(base, module, length)
        if hasattr(module, "sliding_window"):  # Qwen2: some layers only
            window = module.sliding_window
        else:  # Mistral: every layer
            window = getattr(base.config, "sliding_window", None)
        if window is None:
            return seen
        # looking both ways transformers counts the window on either side, looking back it counts the token itself too
        return seen.triu(1 - window) if self.causal(base) else seen.tril(window).triu(-window)

    def rotary(self, base: Any) -> nn.Module | None:
        module: nn.Module = base.rotary_emb
        return module

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        cos, sin = base.rotary_emb(*_places(base, length))
        return cos[0], sin[0]


class ModernBert(Architecture):
    """ModernBERT (Warner et al., 2024): local layers and full ones, each with its own angles."""

    model_types = ("modernbert",)
    signal = "rotary_emb, with one base for full and another for sliding layers"

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.attn for layer in base.layers]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, 3, head, d_head)
        fused = module.Wqkv(hidden).unflatten(-1, (3, -1, module.head_dim))
        return fused[..., 0, :, :].transpose(1, 2), fused[..., 1, :, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float(module.head_dim**-0.5)

    def causal(self, base: Any) -> bool:
        return False

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        everything = torch.ones(length, length, dtype=torch.bool)
        if module.sliding_window is None:
            return everything
        window = base.config.sliding_window  # tokens on either side
        return everything.tril(window).triu(-window)

    def rotary(self, base: Any) -> nn.Module | None:
        module: nn.Module = base.rotary_emb
        return module

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        layer_type = base.config.layer_types[module.layer_idx]
        cos, sin = base.rotary_emb(*_places(base, length), layer_type)
        return cos[0], sin[0]


def _places(base: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return what a rotary module reads: states, for their precision and device alone, and positions (1, n)."""
    device = next(base.rotary_emb.buffers()).device
    return torch.empty(1, dtype=base.dtype, device=device), torch.arange(length, device=device)[None]


RECORDS: tuple[Architecture, ...] = (Llama(), ModernBert())
