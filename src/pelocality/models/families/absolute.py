"""Families that add a table of absolute positions to their words: BERT and its kin, GPT-2."""

# ruff: noqa: D102 - the methods are documented once, on Architecture

from typing import Any, ClassVar

from torch import Tensor, nn

from pelocality.models.families._record import AbsoluteInput, Architecture, heads, looks_back


class Bert(Architecture):
    """BERT (Devlin et al., 2019) and ELECTRA (Clark et al., 2020), whose encoder it is."""

    model_types: ClassVar[tuple[str, ...]] = ("bert", "electra")
    signal = "embeddings.position_embeddings, added to the words before a layer norm"

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.attention.self for layer in base.encoder.layer]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        size = module.attention_head_size
        return heads(module.query(hidden), size), heads(module.key(hidden), size)

    def absolute(self, base: Any) -> AbsoluteInput | None:
        embeddings = base.embeddings
        return AbsoluteInput(
            table=embeddings.position_embeddings,
            offset=0,
            norm=embeddings.LayerNorm,
            token_types=embeddings.token_type_embeddings,
            after_norm=getattr(base, "embeddings_project", None),  # ELECTRA, where embeddings are narrower than layers
        )


class Roberta(Bert):
    """RoBERTa (Liu et al., 2019) and models built like it: positions are counted from the padding id + 1."""

    model_types = ("roberta", "xlm-roberta", "camembert")

    def absolute(self, base: Any) -> AbsoluteInput | None:
        embeddings = base.embeddings
        return AbsoluteInput(
            table=embeddings.position_embeddings,
            offset=embeddings.padding_idx + 1,
            norm=embeddings.LayerNorm,
            token_types=embeddings.token_type_embeddings,
        )


class DistilBert(Architecture):
    """DistilBERT (Sanh et al., 2019): BERT without token types."""

    model_types = ("distilbert",)
    signal = Bert.signal

    def attentions(self, base: Any) -> list[nn.Module]:
        return [layer.attention for layer in base.transformer.layer]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        size = module.attention_head_size
        return heads(module.q_lin(hidden), size), heads(module.k_lin(hidden), size)

    def causal(self, base: Any) -> bool:
        return False

    def absolute(self, base: Any) -> AbsoluteInput | None:
        embeddings = base.embeddings
        return AbsoluteInput(table=embeddings.position_embeddings, offset=0, norm=embeddings.LayerNorm)


class Albert(Architecture):
    """ALBERT (Lan et al., 2020): layers share their weights, so one module serves several layers."""

    model_types = ("albert",)
    signal = Bert.signal

    def attentions(self, base: Any) -> list[nn.Module]:
        config, groups = base.config, base.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        return [
            layer.attention
            for index in range(config.num_hidden_layers)
            for layer in groups[int(index / per_group)].albert_layers
        ]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        size = module.attention_head_size
        return heads(module.query(hidden), size), heads(module.key(hidden), size)

    def causal(self, base: Any) -> bool:
        return False

    def absolute(self, base: Any) -> AbsoluteInput | None:
        embeddings = base.embeddings
        return AbsoluteInput(
            table=embeddings.position_embeddings,
            offset=0,
            norm=embeddings.LayerNorm,
            token_types=embeddings.token_type_embeddings,
            after_norm=base.encoder.embedding_hidden_mapping_in,
        )


class Gpt2(Architecture):
    """GPT-2 (Radford et al., 2019): causal, and the first layer norm stands inside the first block."""

    model_types = ("gpt2",)
    signal = "wpe, added to the words"

    def attentions(self, base: Any) -> list[nn.Module]:
        return [block.attn for block in base.h]

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query, key, _ = module.c_attn(hidden).split(module.split_size, dim=-1)
        return heads(query, module.head_dim), heads(key, module.head_dim)

    def causal(self, base: Any) -> bool:
        return looks_back(base)

    def absolute(self, base: Any) -> AbsoluteInput | None:
        return AbsoluteInput(table=base.wpe, offset=0, norm=base.h[0].ln_1)


RECORDS: tuple[Architecture, ...] = (Bert(), Roberta(), DistilBert(), Albert(), Gpt2())
