"""Families that rotate queries and keys by position (RoPE, Su et al., 2021): Llama and similar models, ModernBERT."""

# ruff: noqa: D102 - the methods are documented once, on Architecture and KnownLogits

from typing import Any, ClassVar

import torch
from torch import Tensor

from pelocality.models.families._logits import KnownLogits
from pelocality.models.families._record import Architecture


class Llama(KnownLogits):
    """Llama (Touvron et al., 2023) and models built like it: causal, keys shared by groups of heads."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    projections = ("q_proj", "k_proj")
    head_size = "head_dim"

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        # Qwen2: some layers only; Mistral: every layer
        window = getattr(module, "sliding_window", getattr(base.config, "sliding_window", None))
        seen = super().visible(base, module, length)
        if window is None:
            return seen
        # a bidirectional window counts the tokens on either side, a causal one counts the token itself too
        return seen.triu(1 - window) if self.causal(base) else seen.tril(window).triu(-window)

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        device = next(base.rotary_emb.buffers()).device
        states = torch.empty(1, dtype=base.dtype, device=device)  # read for dtype and device alone
        position_ids = torch.arange(length, device=device)[None]
        cos, sin = base.rotary_emb(states, position_ids, *self._layer_type(base, module))
        return cos[0], sin[0]

    def _layer_type(self, base: Any, module: Any) -> tuple[str, ...]:
        """Return the arguments of the rotary module that choose its angles."""
        return ()


class ModernBert(Llama):
    """ModernBERT (Warner et al., 2024): local and full layers, with different angles."""

    model_types = ("modernbert",)

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, 3, head, d_head)
        fused = module.Wqkv(hidden).unflatten(-1, (3, -1, module.head_dim))
        return fused[..., 0, :, :].transpose(1, 2), fused[..., 1, :, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float(module.head_dim**-0.5)

    def visible(self, base: Any, module: Any, length: int) -> Tensor:
        seen, window = KnownLogits.visible(self, base, module, length), base.config.sliding_window  # on either side
        return seen if module.sliding_window is None else seen.tril(window).triu(-window)

    def _layer_type(self, base: Any, module: Any) -> tuple[str, ...]:
        return (base.config.layer_types[module.layer_idx],)


class RoFormer(Architecture):
    """RoFormer (Su et al., 2021): a table of sines, and then cosines, by which queries and keys are rotated.

    Its pairs of dimensions are not those of the equation.
    """

    model_types = ("roformer",)

    def without_position(self, output: Tensor) -> Tensor:
        sin, cos = output.chunk(2, dim=-1)
        return torch.cat([torch.zeros_like(sin), torch.ones_like(cos)], dim=-1)


RECORDS: tuple[Architecture, ...] = (Llama(), ModernBert(), RoFormer())
