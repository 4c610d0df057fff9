"""Families that multiply content with embeddings of the distance: DeBERTa (He et al., 2021) and DeBERTa-v2/v3."""

# ruff: noqa: D102 - the methods are documented once, on Architecture and KnownLogits

from typing import Any, ClassVar

from torch import Tensor

from pelocality._toeplitz import diagonals
from pelocality.models.families._logits import KnownLogits, split_heads


class Deberta(KnownLogits):
    """DeBERTa: queries (c2p) and keys (p2c) are multiplied with embedded distances; no term is position alone."""

    model_types: ClassVar[tuple[str, ...]] = ("deberta",)
    table = "learned"
    relative_terms = True
    position_methods: ClassVar[tuple[str, ...]] = ("disentangled_att_bias",)
    span_name: ClassVar[str] = "max_relative_positions"  # an attribute of attention: the largest distance

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # (batch, n, 3d) -> (batch, n, head, 3, d_head)
        fused = module.in_proj(hidden).unflatten(-1, (module.num_attention_heads, 3, -1))
        bias = module.q_bias.unflatten(-1, (module.num_attention_heads, -1))
        return (fused[..., 0, :] + bias).transpose(1, 2), fused[..., 1, :].transpose(1, 2)

    def scaling(self, module: Any) -> float:
        return float((module.attention_head_size * (1 + len(module.pos_att_type))) ** -0.5)

    def open_mask(self, attention: Any, call: dict[str, Any]) -> None:
        """Change nothing: without padding, every query sees every key."""

    def why_positions_remain(self, base: Any) -> str | None:
        if getattr(base.config, "conv_kernel_size", 0) > 0:
            return "its convolution over neighbouring tokens (conv_kernel_size > 0) reads their order"
        return None

    def _table(self, base: Any, module: Any, length: int) -> Tensor:
        """Return the embedding of each distance j - i = -(n-1)..n-1: (2n - 1, d)."""
        span: int = getattr(module, self.span_name)
        table: Tensor = base.encoder.get_rel_embedding()[: 2 * span]
        one, every = table.new_empty(1, 1, 1), table.new_empty(1, length, 1)
        # i - j, in buckets where it has them: (1, n, 1) and (1, 1, n)
        column, row = base.encoder.get_rel_pos(one, every), base.encoder.get_rel_pos(every, one)
        distance = diagonals(column[0, :, 0], row[0, 0])
        return table[(distance.long() + span).clamp(0, 2 * span - 1).to(table.device)]

    def _projection(self, module: Any, term: str) -> Any:
        """Return the linear map of the distance table in a term, ``"c2p"`` or ``"p2c"``."""
        return module.pos_proj if term == "c2p" else module.pos_q_proj

    def _relative(self, base: Any, module: Any, length: int, term: str) -> Tensor | None:
        """Return the projected distance table of a term, None where the model does not have the term."""
        if not module.relative_attention or term not in module.pos_att_type:
            return None
        projected = self._projection(module, term)(self._table(base, module, length))
        return split_heads(projected[None], module.attention_head_size)[0]

    def relative_keys(self, base: Any, module: Any, length: int) -> Tensor | None:
        return self._relative(base, module, length, "c2p")

    def relative_queries(self, base: Any, module: Any, length: int) -> Tensor | None:
        return self._relative(base, module, length, "p2c")


class DebertaV2(Deberta):
    """DeBERTa-v2 and v3: logarithmic buckets of distances; content and distance may share projections."""

    model_types = ("deberta-v2",)
    position_methods = ("disentangled_attention_bias",)
    span_name = "pos_ebd_size"
    projections = ("query_proj", "key_proj")

    project = KnownLogits.project

    def scaling(self, module: Any) -> float:
        terms = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
        return float((module.attention_head_size * terms) ** -0.5)

    def _projection(self, module: Any, term: str) -> Any:
        if module.share_att_key:
            return module.key_proj if term == "c2p" else module.query_proj
        return module.pos_key_proj if term == "c2p" else module.pos_query_proj


RECORDS: tuple[KnownLogits, ...] = (Deberta(), DebertaV2())
