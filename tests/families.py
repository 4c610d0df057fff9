"""Tiny models of every family, from configurations, with weights so large that a wrong formula is noticed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.models import SequenceModel

VOCABULARY = 97
# the offset in bytes of the weights of every tiny model from a 64-byte boundary
OFFSET = int(os.environ.get("WEIGHTS_OFFSET", "0"))
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_DECODER = _ENCODER | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
_DEBERTA = _ENCODER | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
}


def _modernbert() -> nn.Module:
    config = hf.ModernBertConfig(
        **_ENCODER,
        local_attention=6,
        global_attn_every_n_layers=3,
        pad_token_id=0,
        max_position_embeddings=64,
    )
    return hf.ModernBertModel(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_ENCODER, max_position_embeddings=40)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**_ENCODER, max_position_embeddings=42, pad_token_id=1)),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=3, n_heads=2, hidden_dim=24, max_position_embeddings=40
        )
    ),
    "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**_ENCODER, embedding_size=12, max_position_embeddings=40)),
    "albert": lambda: hf.AlbertModel(
        hf.AlbertConfig(**_ENCODER, embedding_size=12, num_hidden_groups=2, max_position_embeddings=40)
    ),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**_ENCODER, max_position_embeddings=42)),
    "modernbert": _modernbert,
    "deberta": lambda: hf.DebertaModel(
        hf.DebertaConfig(**_DEBERTA, max_position_embeddings=40, max_relative_positions=10)
    ),
    "deberta-v2": lambda: hf.DebertaV2Model(
        hf.DebertaV2Config(**_DEBERTA, max_position_embeddings=40, position_buckets=8, norm_rel_ebd="layer_norm")
    ),
    "xlnet": lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=3, n_head=2, d_inner=24)),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(**_T5)),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=40)),
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**_DECODER)),
    "bloom": lambda: hf.BloomModel(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=18, n_layer=3, n_head=3)),
}

# The same families with other options, and models of the same architecture.
VARIANTS: dict[str, Callable[[], Any]] = {
    "bert as decoder": lambda: hf.BertModel(hf.BertConfig(**_ENCODER, max_position_embeddings=40, is_decoder=True)),
    "xlm-roberta": lambda: hf.XLMRobertaModel(
        hf.XLMRobertaConfig(**_ENCODER, max_position_embeddings=42, pad_token_id=1)
    ),
    "camembert": lambda: hf.CamembertModel(hf.CamembertConfig(**_ENCODER, max_position_embeddings=42, pad_token_id=1)),
    "albert with inner layers": lambda: hf.AlbertModel(
        hf.AlbertConfig(**_ENCODER, embedding_size=12, inner_group_num=2, max_position_embeddings=40)
    ),
    "gpt2 scaled by layer": lambda: hf.GPT2Model(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=3,
            n_head=2,
            n_positions=40,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "deberta with absolute positions": lambda: hf.DebertaModel(
        hf.DebertaConfig(
            **_DEBERTA | {"position_biased_input": True},
            embedding_size=12,
            type_vocab_size=2,
            max_position_embeddings=40,
        )
    ),
    "deberta-v2 with shared projections": lambda: hf.DebertaV2Model(
        hf.DebertaV2Config(
            **_DEBERTA, max_position_embeddings=40, share_att_key=True, conv_kernel_size=3, conv_act="gelu"
        )
    ),
    "deberta-v2 c2p only": lambda: hf.DebertaV2Model(
        hf.DebertaV2Config(**_DEBERTA | {"pos_att_type": ["c2p"]}, max_position_embeddings=40)
    ),
    "xlnet one way": lambda: hf.XLNetModel(
        hf.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=3, n_head=2, d_inner=24, attn_type="uni")
    ),
    "mt5": lambda: hf.MT5EncoderModel(hf.MT5Config(**_T5)),
    "t5 decoder": lambda: hf.T5Model(hf.T5Config(**_T5)).decoder,
    "mistral": lambda: hf.MistralModel(hf.MistralConfig(**_DECODER, sliding_window=5)),
    "qwen2": lambda: hf.Qwen2Model(
        hf.Qwen2Config(**_DECODER, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ),
}

EVERY = FAMILIES | VARIANTS


def tiny(name: str, seed: int = 0) -> Any:
    """Build one tiny model in float64 and evaluation mode, every parameter random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = EVERY[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.4)
    return misaligned(model.double().eval(), OFFSET)


def misaligned(model: Any, offset: int) -> Any:
    """Move every weight to memory at an offset in bytes from a 64-byte boundary, and return the model.

    Weights from a file are at any multiple of 8 bytes, where matrix libraries sum in another order: outputs of the same
    weights then differ by a few units in the last place.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and not tensor.is_quantized:
            memory = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
            start = -memory.data_ptr() % 64 + offset % 64
            moved = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = moved.copy_(tensor.detach())
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids that are neither padding nor special in any family above."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, VOCABULARY, (batch, length), generator=generator)


def small(config_class: Any, **more: Any) -> Any:
    """Build the configuration of a tiny model."""
    small = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return config_class(**small | {"intermediate_size": 16} | more)


# Families without a record.
UNKNOWN: dict[str, Callable[[], Any]] = {
    "megatron-bert": lambda: hf.MegatronBertModel(small(hf.MegatronBertConfig)),
    "rembert": lambda: hf.RemBertModel(small(hf.RemBertConfig, input_embedding_size=8)),
    "roformer": lambda: hf.RoFormerModel(small(hf.RoFormerConfig)),
}


_GROUPED = {"num_key_value_heads": 1, "pad_token_id": 0, "max_position_embeddings": 64}
_ALTERNATING = ["sliding_attention", "full_attention"]
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _t5gemma() -> Any:
    half = small(hf.T5GemmaModuleConfig, head_dim=8, sliding_window=5, **_GROUPED)
    return hf.T5GemmaModel(hf.T5GemmaConfig(encoder=half, decoder=half, vocab_size=99))


def _shared_keys(config_class: Any, **more: Any) -> Any:
    """Return a configuration whose last two layers read the keys of the first two."""
    return small(
        config_class,
        **_GROUPED | {"num_hidden_layers": 4, "layer_types": _ALTERNATING * 2, "num_kv_shared_layers": 2},
        head_dim=8,
        sliding_window=5,
        vocab_size_per_layer_input=99,
        hidden_size_per_layer_input=8,
        **more,
    )


_GEMMA3N = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}


def _bart() -> Any:
    sizes = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in _HALF.items()}
    return hf.BartModel(hf.BartConfig(vocab_size=99, d_model=16, max_position_embeddings=64, pad_token_id=0, **sizes))


_HALF = {"layers": 2, "ffn_dim": 16, "attention_heads": 2}

# Families that are attached by the record of all families, and what is special about each.
ANY: dict[str, Callable[[], Any]] = UNKNOWN | {
    # windows in some layers
    "qwen3": lambda: hf.Qwen3Model(
        small(hf.Qwen3Config, head_dim=8, sliding_window=5, use_sliding_window=True, layer_types=_ALTERNATING,
              **_GROUPED)
    ),
    # logits capped before the mask, and other angles in layers with a window
    "gemma2": lambda: hf.Gemma2Model(small(hf.Gemma2Config, head_dim=8, sliding_window=5, **_GROUPED)),
    "gemma3": lambda: hf.Gemma3TextModel(
        small(hf.Gemma3TextConfig, head_dim=8, sliding_window=5, layer_types=_ALTERNATING, **_GROUPED)
    ),
    "smollm3": lambda: hf.SmolLM3Model(small(hf.SmolLM3Config, no_rope_layers=[1, 0], **_GROUPED)),  # one without RoPE
    "olmo2": lambda: hf.Olmo2Model(small(hf.Olmo2Config, **_GROUPED)),  # norms after attention
    "gpt_neox": lambda: hf.GPTNeoXModel(small(hf.GPTNeoXConfig, max_position_embeddings=64)),
    "gptj": lambda: hf.GPTJModel(
        hf.GPTJConfig(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    ),  # rotates by a buffer inside attention
    "eurobert": lambda: hf.EuroBertModel(small(hf.EuroBertConfig, **_GROUPED)),
    "mixtral": lambda: hf.MixtralModel(small(hf.MixtralConfig, sliding_window=5, **_MOE, **_GROUPED)),
    "phi3": lambda: hf.Phi3Model(small(hf.Phi3Config, sliding_window=5, **_GROUPED)),
    "gpt_oss": lambda: hf.GptOssModel(
        small(hf.GptOssConfig, head_dim=8, sliding_window=5, layer_types=_ALTERNATING,
              rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **_MOE, **_GROUPED)
    ),  # learned sinks
    "jamba": lambda: hf.JambaModel(
        small(hf.JambaConfig, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
              expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=4,
              use_mamba_kernels=False, **_GROUPED)
    ),  # attention in layers 1 and 3
    "opt": lambda: hf.OPTModel(
        hf.OPTConfig(vocab_size=99, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=2,
                     num_attention_heads=2, max_position_embeddings=64, pad_token_id=0)
    ),  # a table of its own class
    "bart": lambda: _bart().get_encoder(),
    "bart decoder": lambda: _bart().get_decoder(),
    "t5gemma": lambda: _t5gemma().get_encoder(),
    "t5gemma decoder": lambda: _t5gemma().get_decoder(),
    "gemma3n_text": lambda: hf.Gemma3nTextModel(_shared_keys(hf.Gemma3nTextConfig, **_GEMMA3N)),
    "gemma4_text": lambda: hf.Gemma4TextModel(_shared_keys(hf.Gemma4TextConfig, global_head_dim=8)),
    # logits that are divided after the mask, a mask of tokens alone, and one that is True at hidden keys
    "codegen": lambda: hf.CodeGenModel(
        hf.CodeGenConfig(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    ),
    "xlm": lambda: hf.XLMModel(hf.XLMConfig(vocab_size=99, emb_dim=16, n_layers=2, n_heads=2)),
    "mpt": lambda: hf.MptModel(hf.MptConfig(vocab_size=99, d_model=16, n_heads=2, n_layers=2, max_seq_len=64)),
    # states (batch, d, n)
    "squeezebert": lambda: hf.SqueezeBertModel(
        small(hf.SqueezeBertConfig, embedding_size=16, max_position_embeddings=64,
              **{f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")})
    ),
    # one attention module for several layers
    "zamba": lambda: hf.ZambaModel(
        small(hf.ZambaConfig, num_hidden_layers=6, hidden_size=32, attention_hidden_size=64, num_key_value_heads=2,
              mamba_d_state=8, n_mamba_heads=2, attn_layer_period=3, attn_layer_offset=1, use_mamba_kernels=False,
              pad_token_id=0)
    ),
}  # fmt: skip


def tiny_any(name: str, seed: int = 0) -> Any:
    """Build one tiny model of a family in `ANY`, in float64 and evaluation mode, every parameter random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return spread(ANY[name]())


def spread(model: Any) -> Any:
    """Draw every parameter of a model anew, so large that a wrong formula is noticed, and make it float64."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    for module in model.modules():
        if isinstance(module, hf.PreTrainedModel):
            module.config._experts_implementation = "eager"  # the others take no float64
    return model.double().eval()


def base_of(model: Any) -> Any:
    """Return the bare transformer in a model."""
    return SequenceModel(model).module


def family_of(model: Any) -> Any:
    """Return what the library knows of the family of a model."""
    return SequenceModel(model).family


@contextmanager
def eagerly(model: Any) -> Iterator[None]:
    """Run a model without gradients in eager attention, which returns weights, in a with-statement."""
    base = base_of(model)
    before = base.config._attn_implementation
    base.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            yield
    finally:
        base.config._attn_implementation = before


def add_adapter(model: Any, settings: Any) -> None:
    """Add an adapter by transformers' own method; skip the test where transformers refuses the installed peft."""
    try:
        model.add_adapter(settings)
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))


def offloaded(model):
    """Return a model whose weights accelerate offloads and loads for each call."""
    accelerate = pytest.importorskip("accelerate")
    # DeBERTa's encoder reads the weights of its parts without calling them
    accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=["DebertaEncoder", "DebertaV2Encoder"])
    return model


def quantised(model):
    """Return a model whose linear layers round their weights and inputs to 8 bits."""
    return torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear}, dtype=torch.qint8)


def assert_same_outputs(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare outputs of equal weights: equal within a few units in the last place of the largest.

    How a sum is rounded depends on the processor, the threads and where a weight lies: no test asks for the last bit.
    Some families go through float32 whatever their dtype, so float64 is compared within two units of float32.
    """
    few = max(16 * torch.finfo(expected.dtype).eps, 2 * torch.finfo(torch.float32).eps)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=few * scale)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts hold exactly the same numbers."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state(model):
    """Return everything about a model that a user could find changed."""
    return (
        {name: tensor.clone() for name, tensor in [*model.state_dict().items(), *model.named_buffers()]},
        {name: module.training for name, module in model.named_modules()},
        model.config.to_dict(),
        [module.config._attn_implementation for module in model.modules() if isinstance(module, hf.PreTrainedModel)],
        [parameter.requires_grad for parameter in model.parameters()],
        torch.get_rng_state().tolist(),
    )


def same(before, after):
    return before[1:] == after[1:] and same_weights(before[0], after[0])
