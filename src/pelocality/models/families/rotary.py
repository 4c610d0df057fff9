"""Families that rotate queries and keys by position (RoPE, Su et al., 2021): Llama and similar models, ModernBERT."""

# ruff: noqa: D102 - the methods are documented once, on Architecture

from typing import Any

import torch
from torch import Tensor, nn

from pelocality.models.families._record import Architecture, heads


class Llama(Architecture):
    """Llama (Touvron et al., 2023) and models built like it: causal, keys shared by groups of heads."""

    model_types = ("llama", "mistral", "qwen2")
    decoder = True

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.self_attn for layer in base.layers]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = heads(module.q_proj(hidden), module.head_dim)
        key = heads(module.k_proj(hidden), module.head_dim)
        # grouped-query attention: each key head serves several adjacent query heads
        return query, key.repeat_interleave(module.num_key_value_groups, dim=1)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        seen = super().visible(base, module, length)
        if hasattr(module, "sliding_window"):  # Qwen2: some layers only
            window = module.sliding_window
        else:  # Mistral: every layer
            window = getattr(base.config, "sliding_window", None)
        if window is None:
            return seen
        # a bidirectional window counts the tokens on either side, a causal one counts the token itself too
        return seen.triu(1 - window) if self.causal(base) else seen.tril(window).triu(-window)

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        cos, sin = base.rotary_emb(*_states_and_positions(base, length))
        return cos[0], sin[0]


class ModernBert(Architecture):
    """ModernBERT (Warner et al., 2024): local and full layers, with different angles."""

    model_types = ("modernbert",)
    decoder = False

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.attn for layer in base.layers]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, 3, head, d_head)
        fused = module.Wqkv(hidden).unflatten(-1, (3, -1, module.head_dim))
        return fused[..., 0, :, :].transpose(1, 2), fused[..., 1, :, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float(module.head_dim**-0.5)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        seen, window = super().visible(base, module, length), base.config.sliding_window  # tokens on either side
        return seen if module.sliding_window is None else seen.tril(window).triu(-window)

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        layer_type = base.config.layer_types[module.layer_idx]
        cos, sin = base.rotary_emb(*_states_and_positions(base, length), layer_type)
        return cos[0], sin[0]


def _states_and_positions(base: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return the arguments of a rotary module: states, read for dtype and device alone, and positions (1, n)."""
    device = next(base.rotary_emb.buffers()).device
    return torch.empty(1, dtype=base.dtype, device=device), torch.arange(length, device=device)[None]


RECORDS: tuple[Architecture, ...] = (Llama(), ModernBert())
