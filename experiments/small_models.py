"""Small models of several families from random weights; encoders compute logits only at words to be predicted."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.modeling_outputs import MaskedLMOutput

from pelocality import AttenuatedEncoding, DistanceTable, NoEncoding, PositionalSelfAttention, T5Buckets, attach

ENCODERS = ("bert", "deberta-v2", "mpnet", "modernbert", "xlnet")
FAMILIES = (*ENCODERS, "gpt2")
MIXED = ("concat", "sequence", "uniform concat", "uniform sequence")  # modes of PositionalSelfAttention without bias
ENCODINGS = ("learned", "none", "T5", "attenuated", "table", "shared table", *MIXED)


class MaskedWords:
    """Compute logits at labelled positions only: the same loss at a fraction of the cost.

    Attributes:
        heads: modules that lead from the last hidden states to the logits.
    """

    heads: tuple[str, ...]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        """Return the loss at labelled positions; without labels, all logits."""
        if labels is None:
            return super().forward(input_ids, **options)
        labelled = labels != -100
        states = self.base_model(input_ids, **options).last_hidden_state[labelled]
        for name in self.heads:
            states = getattr(self, name)(states)
        return MaskedLMOutput(loss=functional.cross_entropy(states, labels[labelled]))


class MaskedBert(MaskedWords, BertForMaskedLM):
    """Learned absolute positions."""

    heads = ("cls",)


class MaskedDeberta(MaskedWords, DebertaV2ForMaskedLM):
    """A learned vector per distance, in products with queries and keys."""

    heads = ("cls",)


class MaskedMPNet(MaskedWords, MPNetForMaskedLM):
    """Learned absolute positions, and a bias per bucket of distances."""

    heads = ("lm_head",)


class MaskedModernBert(MaskedWords, ModernBertForMaskedLM):
    """Rotary positions."""

    heads = ("head", "decoder")


class MaskedXLNet(MaskedWords, XLNetLMHeadModel):
    """Sinusoids of the distance; sees all words at once here, where XLNet was made for words in a random order."""

    heads = ("lm_loss",)


class MixedAttention(nn.Module):
    """The attention of a BERT as a `PositionalSelfAttention`, output projection included."""

    def __init__(self, config: BertConfig, name: str):
        super().__init__()
        heads, (*uniform, mode) = config.num_attention_heads, name.split()
        encoding = NoEncoding(heads) if uniform else AttenuatedEncoding(heads)
        self.attention = PositionalSelfAttention(config.hidden_size, heads, encoding, mode=mode)
        for weights in self.attention.parameters():
            if weights.ndim > 1:
                nn.init.normal_(weights, std=config.initializer_range)

    def forward(self, states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return the output; the mask is as transformers passes it, (batch, 1, n or 1, n)."""
        hidden = None if attention_mask is None else attention_mask[:, 0, 0]
        hidden = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
        return self.attention(states, key_padding_mask=hidden, need_weights=False)[0], None


def mix(model: PreTrainedModel, name: str) -> None:
    """Disable the position embeddings of a BERT, and give each layer a `MixedAttention`."""
    table = model.base_model.embeddings.position_embeddings.weight
    nn.init.zeros_(table).requires_grad_(False)
    for layer in model.base_model.encoder.layer:
        layer.attention.self = MixedAttention(model.config, name)
        layer.attention.output.dense = nn.Identity()


def make_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model of `arguments.family` with random weights, and its encoding attached where one is named."""
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": arguments.width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "intermediate_size": 4 * arguments.width,
        "max_position_embeddings": arguments.length,
        "initializer_range": arguments.width**-0.5,  # BERT's 0.02 suits 768 units and is too small for fewer
    }
    dropout = {"hidden_dropout_prob": arguments.dropout, "attention_probs_dropout_prob": arguments.dropout}
    match arguments.family:
        case "bert":
            model = MaskedBert(BertConfig(**size, **dropout))
        case "deberta-v2":  # as released, where distances below 128 have a bucket each
            relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
            relative |= {
                "max_relative_positions": arguments.length,
                "norm_rel_ebd": "layer_norm",
                "share_att_key": True,
            }
            model = MaskedDeberta(DebertaV2Config(**size, **dropout, **relative))
        case "gpt2":
            size["n_positions"] = size.pop("max_position_embeddings")
            size["n_inner"] = size.pop("intermediate_size")
            rates = {f"{part}_pdrop": arguments.dropout for part in ("resid", "embd", "attn")}
            ids = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
            model = GPT2LMHeadModel(GPT2Config(**size, **rates, **ids))
        case "mpnet":  # its positions begin at 2
            size["max_position_embeddings"] += 2
            model = MaskedMPNet(MPNetConfig(**size, **dropout))
        case "modernbert":
            names = ("pad", "bos", "eos", "cls", "sep")
            ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
            rates = {f"{part}_dropout": arguments.dropout for part in ("attention", "embedding", "mlp")}
            size["intermediate_size"] = round(8 / 3 * arguments.width)  # gated: three matrices, as many weights
            model = MaskedModernBert(ModernBertConfig(**size, **ids, **rates))
        case "xlnet":
            of_xlnet = {"n_layer": arguments.layers, "n_head": arguments.heads, "d_model": arguments.width}
            of_xlnet |= {"d_inner": 4 * arguments.width, "vocab_size": len(tokenizer), "dropout": arguments.dropout}
            of_xlnet |= {"initializer_range": size["initializer_range"], "pad_token_id": tokenizer.pad_token_id}
            model = MaskedXLNet(XLNetConfig(**of_xlnet))
    heads = arguments.heads
    match arguments.encoding:
        case "attenuated":
            named = {name: getattr(arguments, name) for name in ("decay", "symmetry", "form", "learnable")}
            attach(model, AttenuatedEncoding(heads, **named))
        case "none":
            attach(model, NoEncoding(heads))
        case "T5":
            attach(model, T5Buckets(heads))
        case "table" | "shared table":  # as published: a number per distance, which begins as that of w = 0.5
            options = {"shared": arguments.encoding == "shared table"}
            attach(model, DistanceTable.from_encoding(AttenuatedEncoding(heads), arguments.length, **options))
        case "concat" | "sequence" | "uniform concat" | "uniform sequence":
            mix(model, arguments.encoding)
    return model
