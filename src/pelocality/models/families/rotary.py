"""Families that rotate queries and keys by position (RoPE, Su et al., 2021): Llama and similar models, ModernBERT."""

# ruff: noqa: D102 - the methods are documented once, on Architecture and KnownLogits

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pelocality.encodings._rotary_angles import RotaryAngles
from pelocality.models._calls import argument_names
from pelocality.models.families._logits import KnownLogits, split_heads
from pelocality.models.families._record import ATTACHED, Architecture


class Rotary(KnownLogits):
    """Llama (Touvron et al., 2023) and models built like it, with what each of them adds.

    Groups of heads may share keys. Queries and keys may be normed (Qwen3, OLMo 2, Gemma 3), a part of their dimensions
    rotated (Phi, StableLM), logits capped (Gemma 2), sinks learned, which are no key (GPT-OSS), layers left without
    rotations (SmolLM3) or given others than their neighbours (Gemma 3).

    Dimensions that are not rotated are pairs of frequency 0.
    """

    model_types: ClassVar[tuple[str, ...]] = (
        *("llama", "mistral", "mixtral", "ministral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "olmo3", "gemma"),
        *("gemma2", "gemma3_text", "vaultgemma", "smollm3", "phi", "stablelm", "granite", "granitemoe", "starcoder2"),
        *("arcee", "apertus", "cwm", "seed_oss", "nemotron", "bitnet", "glm4_moe", "dots1", "minimax_m2", "eurobert"),
        *("qwen2_vl_text", "qwen2_5_vl_text", "gpt_oss"),
    )
    projections = ("q_proj", "k_proj")
    head_size = "head_dim"

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (self._normed(module, hidden, *each) for each in zip(self.projections, "qk", strict=True))
        return self._grouped(module, query, key)

    def _normed(self, module: Any, hidden: Tensor, projection: str, letter: str) -> Tensor:
        """Return queries or keys after their norm, (batch, head, n, d_head)."""
        states: Tensor = getattr(module, projection)(hidden)
        norm: Any = getattr(module, f"{letter}_norm", None)
        if norm is not None and norm.weight.shape == states.shape[-1:]:  # OLMo 2's, over all heads
            states, norm = norm(states), None
        states = states.view(*states.shape[:-1], -1, getattr(module, self.head_size))
        states = (states if norm is None else norm(states)).transpose(1, 2)
        return getattr(module, f"{letter}_layernorm", nn.Identity())(states)  # Phi's and StableLM's

    def _grouped(self, module: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, and the keys of each query head; dimensions that rotate together half of d_head apart."""
        size, rotated = query.shape[-1], self._rotated(module)
        pairs = torch.arange(rotated).view(-1, 2).T if self.interleaved else torch.arange(rotated).view(2, -1)
        order = torch.cat([pairs, torch.arange(rotated, size).view(2, -1)], dim=1).flatten().to(query.device)
        # In grouped-query attention, each key head serves several adjacent query heads.
        return query[..., order], key[..., order].repeat_interleave(query.shape[1] // key.shape[1], dim=1)

    def _rotated(self, module: Any) -> int:
        """Return the number of dimensions of queries and keys that are rotated, even."""
        angles = self.declared_rotation(module.config, module.layer_idx)
        dims = angles.dims if isinstance(angles, RotaryAngles) else getattr(module, self.head_size)
        return int(dims + dims % 2)

    def visible_distances(self, base: Any, module: Any, length: int) -> Tensor:
        # Qwen2: some layers only; Mistral: every layer
        window: int | None = getattr(module, "sliding_window", getattr(base.config, "sliding_window", None))
        seen = super().visible_distances(base, module, length)
        if window is None:
            return seen
        # A bidirectional window counts the tokens on either side; a causal one, and Gemma's, the token itself too.
        own = self.causal(base) or getattr(base.config, "use_bidirectional_attention", False)
        return seen & (torch.arange(1 - length, length, device="cpu").abs() < window + (not own))

    def rotation(self, base: Any, module: Any, length: int) -> tuple[Tensor, Tensor] | None:
        device = next(base.rotary_emb.buffers()).device
        # Only dtype and device are read here: angles of half precision are not rounded.
        states = torch.empty(1, dtype=torch.promote_types(base.dtype, torch.float32), device=device)
        axes = len((base.config.rope_parameters or {}).get("mrope_section", ()))  # text has one coordinate on all
        position_ids = torch.arange(length, device=device).expand(*([axes] if axes else []), 1, -1)
        types = "layer_type" in argument_names(base.rotary_emb)
        layer_type = (base.config.layer_types[module.layer_idx],) if types else ()
        angles = base.rotary_emb(states, position_ids, *layer_type)
        # One number for each pair (GPT-OSS), for each dimension (Command R), or for the first of each pair, and again.
        step = 2 if torch.equal(angles[0][..., ::2], angles[0][..., 1::2]) else 1
        cos, sin = (each.flatten(0, -3)[0, :, ::step][:, : self._rotated(module) // 2] for each in angles)
        if ATTACHED in module._modules:
            cos, sin = (each[0] for each in getattr(module, ATTACHED).encoding.angles_from(0, length, device))
        in_window = getattr(module, "sliding_window", 0) is not None  # Command R7B
        if not (getattr(module, "use_rope", True) and (in_window or not self.rotates_in_windows_alone)):  # SmolLM3
            return torch.ones_like(cos), torch.zeros_like(sin)
        rest = getattr(module, self.head_size) // 2 - cos.shape[-1]
        return nn.functional.pad(cos, (0, rest), value=1.0), nn.functional.pad(sin, (0, rest))


class Fused(Rotary):
    """Phi-3 (Abdin et al., 2024): one projection gives queries, keys and values of all heads."""

    model_types = ("phi3",)

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        size, heads = module.head_dim, module.config.num_attention_heads
        fused = split_heads(module.qkv_proj(hidden), size)  # queries of all heads, then keys, then values
        return self._grouped(module, fused[:, :heads], fused[:, heads : heads + module.num_key_value_heads])


class GptNeoX(Rotary):
    """GPT-NeoX (Black et al., 2022) and Pythia: query, key and value are adjacent in each head."""

    model_types = ("gpt_neox",)
    head_size = "head_size"

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query, key, _ = split_heads(module.query_key_value(hidden), 3 * module.head_size).chunk(3, dim=-1)
        return self._grouped(module, query, key)


class ModernBert(Rotary):
    """ModernBERT (Warner et al., 2024): local and full layers, with different angles."""

    model_types = ("modernbert",)

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, 3, head, d_head)
        fused = module.Wqkv(hidden).unflatten(-1, (3, -1, module.head_dim))
        return fused[..., 0, :, :].transpose(1, 2), fused[..., 1, :, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float(module.head_dim**-0.5)

    def visible_distances(self, base: Any, module: Any, length: int) -> Tensor:
        distance, window = torch.arange(1 - length, length, device="cpu"), base.config.sliding_window  # on either side
        return distance.abs() <= (length if module.sliding_window is None else window)


class RoFormer(Architecture):
    """RoFormer (Su et al., 2021): a table of sines, and then cosines, by which queries and keys are rotated.

    Its pairs of dimensions are not those of the equation.
    """

    model_types = ("roformer",)
    interleaved = True
    rotates_by_default = True

    def without_position(self, output: Tensor) -> Tensor:
        sin, cos = output.chunk(2, dim=-1)
        return torch.cat([torch.zeros_like(sin), torch.ones_like(cos)], dim=-1)


_INTERLEAVED = (
    *("deepseek_v2", "deepseek_v4", "glm4v_text", "glm_ocr_text", "hy_v4_vl_text"),
    *("llama4_text", "moonshine", "moonshine_streaming", "openai_privacy_filter"),
)
_SECTIONS_IN_TURNS = (
    *("cohere_compass_text", "cosmos3_edge_text", "qwen3_vl_moe_text", "qwen3_5_text"),
    *("qwen3_5_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen4_exp_text"),
)
_IN_WINDOWS = ("afmoe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini")

RECORDS: tuple[Architecture, ...] = (
    *(Rotary(), Fused(), GptNeoX(), ModernBert(), RoFormer()),
    Rotary("cohere", "cohere2", interleaved=True, rotates_in_windows_alone=True),  # Command R, and R7B (Cohere, 2024)
    # GLM (Zeng et al., 2023) and others that rotate adjacent dimensions together
    Rotary("glm", "glm4", "helium", "ernie4_5", "ernie4_5_moe", interleaved=True),
    Architecture("gptj", "codegen", interleaved=True, rotates_by_default=True),
    Architecture(*_INTERLEAVED, interleaved=True),
    Architecture(*_SECTIONS_IN_TURNS, sections="turns"),
    Rotary("qwen3_vl_text", sections="turns"),
    Architecture("ernie4_5_vl_moe_text", interleaved=True, sections="time last"),
    Architecture("nanochat", direction=-1),
    Architecture("jamba", "kimi_linear", "nemotron_h", "zamba", rotates_by_default=False),
    Architecture(*_IN_WINDOWS, rotates_in_windows_alone=True),
    Architecture("cohere2_moe", interleaved=True, rotates_in_windows_alone=True),
)
