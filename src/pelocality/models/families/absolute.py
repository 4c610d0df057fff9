"""Families that add a table of absolute positions to their word embeddings: BERT and similar models, GPT-2."""

# ruff: noqa: D102 - the methods are documented once, on Architecture and KnownLogits

from typing import Any

from torch import Tensor, nn

from pelocality.models.families._logits import AbsoluteInput, KnownLogits, split_heads
from pelocality.models.families._record import Architecture


class Bert(KnownLogits):
    """BERT (Devlin et al., 2019) and models built like it."""

    model_types = ("bert", "electra")
    table = "learned"


class Albert(KnownLogits):
    """ALBERT (Lan et al., 2020): layers share their weights, so one module serves several layers."""

    model_types = ("albert",)
    table = "learned"

    def attention_layers(self, base: Any) -> list[nn.Module]:
        config, groups = base.config, base.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        return [
            layer.attention
            for index in range(config.num_hidden_layers)
            for layer in groups[int(index / per_group)].albert_layers
        ]

    def after_norm(self, base: Any) -> Any:
        return base.encoder.embedding_hidden_mapping_in


class Gpt2(KnownLogits):
    """GPT-2 (Radford et al., 2019): causal, and the first layer norm is in the first block."""

    model_types = ("gpt2",)
    table = "learned"

    def project(self, module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query, key, _ = module.c_attn(hidden).split(module.split_size, dim=-1)
        return split_heads(query, module.head_dim), split_heads(key, module.head_dim)

    def absolute(self, base: Any) -> AbsoluteInput | None:
        return AbsoluteInput(table=base.wpe, norm=base.h[0].ln_1)


_AFTER_PADDING = {"first_row": None, "counts_tokens": True}  # RoBERTa's tokens count from the padding id + 1
_LEARNED = (
    *("bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "bros", "clip_text_model"),
    *("convbert", "dpr", "ernie", "flaubert", "git", "gpt-sw3", "gpt_bigcode", "gpt_neo", "imagegpt", "layoutlm"),
    *("megatron-bert", "mra", "openai-gpt", "rembert", "splinter", "tapas", "vilt", "visual_bert", "xlm"),
)
_LIKE_ROBERTA = (
    *("data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "luke", "markuplm", "roberta-prelayernorm"),
    *("xlm-roberta-xl", "xmod"),
)
_LIKE_M2M = ("kosmos_2_text_model", "kosmos_2_5_text_model", "m2m_100", "nllb-moe")
_LIKE_BART = ("bart", "biogpt", "mbart", "mvp", "nystromformer", "plbart", "yoso")  # two rows are no position

RECORDS: tuple[Architecture, ...] = (
    *(Bert(), Albert(), Gpt2()),
    Bert("distilbert", projections=("q_lin", "k_lin")),  # Sanh et al., 2019
    Bert("roberta", "xlm-roberta", "camembert", **_AFTER_PADDING),
    # Its layers are convolutions over states (batch, d, n) (Iandola et al., 2020).
    Architecture("squeezebert", table="learned", token_axis=2),
    Architecture(*_LEARNED, table="learned"),
    Architecture("blenderbot-small", "mobilebert", "roc_bert", table="learned", maps_words=True),
    Architecture(*_LIKE_ROBERTA, table="learned", **_AFTER_PADDING),
    Architecture(*_LIKE_BART, table="learned", first_row=2),
    Architecture("opt", table="learned", first_row=2, counts_tokens=True),
    Architecture("ctrl", "marian", "pegasus", table="sinusoidal"),
    Architecture("pegasus_x", "tipsv2_text_model", table="sinusoidal", to_base=True),
    Architecture("xglm", table="sinusoidal", to_base=True, first_row=2),
    Architecture(*_LIKE_M2M, table="sinusoidal", to_base=True, **_AFTER_PADDING),
)
