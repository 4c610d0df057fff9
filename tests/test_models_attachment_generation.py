"""One contract of decoders: with any encoding, generation is the same with and without a cache, padding and beams."""

import inspect

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pelocality.encodings import ALiBi, AttenuatedEncoding, CoPE, NoEncoding, RotaryEncoding
from pelocality.models import attach
from tests.families import small, spread, tiny, tiny_any, tokens
from tests.test_models_attachment import Even, hidden, random_table, set_implementation

N = 11
LATENT = {  # the attention of DeepSeek, whose cache holds latent vectors or whose rotation is of the last dimensions
    "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip


def _like(name, model_class):
    """Return the language model of a tiny model."""
    return lambda: model_class((tiny_any(name) if name != "mistral" else tiny(name)).config)


DECODERS = {  # windows of 5 tokens where there are any
    "bert as decoder": lambda: hf.BertLMHeadModel(tiny("bert as decoder").config),
    "bloom": lambda: hf.BloomForCausalLM(tiny("bloom").config),
    "cohere2": lambda: hf.Cohere2ForCausalLM(small(hf.Cohere2Config, sliding_window=5, pad_token_id=0)),
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(small(hf.DeepseekV2Config, **LATENT)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(small(hf.DeepseekV3Config, **LATENT)),
    "gemma3": _like("gemma3", hf.Gemma3ForCausalLM),
    "gemma3n": _like("gemma3n_text", hf.Gemma3nForCausalLM),  # layers that read the keys of earlier ones
    "glm": lambda: hf.GlmForCausalLM(small(hf.GlmConfig, head_dim=8, num_key_value_heads=2, pad_token_id=0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(tiny("gpt2").config),
    "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),  # heads stand where queries do
    "gpt_oss": _like("gpt_oss", hf.GptOssForCausalLM),
    "jamba": _like("jamba", hf.JambaForCausalLM),
    "mistral": _like("mistral", hf.MistralForCausalLM),
    "phi3": _like("phi3", hf.Phi3ForCausalLM),
    "qwen3": _like("qwen3", hf.Qwen3ForCausalLM),
    "zamba": _like("zamba", hf.ZambaForCausalLM),  # one attention module for several layers
}
EAGER_ALONE = ("bloom", "gpt_oss")
WITHOUT_STATIC_CACHE = ("jamba", "zamba")
FEW = ("bert as decoder", "bloom", "deepseek_v3", "gemma3")  # those that are tested with every kind
KINDS = ("bias by head", "attenuated", "rotation", "rotation by head", "CoPE")


def language_model(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = spread(DECODERS[name]()).float()
    model.generation_config = hf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


def encoding_of(kind, model):
    """Return an encoding that fits the model, with numbers that change its outputs visibly."""
    heads = model.config.num_attention_heads
    if kind == "bias by head":
        return random_table(heads)
    if kind == "attenuated":  # normalised over keys, and so another at each padding
        return AttenuatedEncoding(decay=0.1, scale=5.0)
    attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    size = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None) or 8
    if kind == "CoPE":
        return spread(CoPE(size, positions=4, heads=heads)).float()
    frequencies = [2 * len(each) for name, each in model.named_buffers() if name.endswith("inv_freq")]
    rotation = RotaryEncoding(frequencies[0] if frequencies else 4, base=30.0)
    shared = heads // getattr(attention, "num_key_value_groups", 1)
    return (
        rotation if kind == "rotation" else rotation.with_heads(shared).scaled([0.4 + head for head in range(shared)])
    )


def assert_same_logits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, kind) for n in DECODERS for kind in KINDS if kind in ("CoPE", "bias by head", "rotation by head") or n in FEW],
)
def test_a_cache_padding_and_beams_change_no_generated_token(name, kind):
    model, ids = language_model(name), tokens(2, 6)
    mask = (torch.arange(6) >= torch.tensor([[0], [2]])).long()  # padding on the left
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    logged = options | {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **logged).logits
    encoding, ways = encoding_of(kind, model), ["eager"] if name in EAGER_ALONE else ["sdpa", "eager"]
    for way in ways:
        set_implementation(model, way)
        if kind == "CoPE" and way == "eager":
            with pytest.raises(ValueError, match="CoPE"):
                attach(model, encoding)
            continue
        with torch.no_grad(), attach(model, encoding):
            slow = model.generate(ids, attention_mask=mask, use_cache=False, **logged)
            assert not torch.allclose(slow.logits[0], plain[0], rtol=0, atol=1e-3)
            for cache in ("dynamic", "static")[: 1 if name in WITHOUT_STATIC_CACHE else 2]:
                given = {"attention_mask": mask, "cache_implementation": cache}
                if (name, cache, way) == ("gemma3n", "static", "eager") and kind.startswith("rotation"):
                    with pytest.raises(ValueError, match="keys of an earlier layer in a static cache"):
                        model.generate(ids, **given, **logged)
                    continue
                assert_same_logits(model.generate(ids, **given, **logged).logits, slow.logits)
            alone = model.generate(ids[1:, 2:], attention_mask=mask[1:, 2:], use_cache=False, **logged)
            assert_same_logits([each[1:] for each in slow.logits], alone.logits)
            if way == ways[0]:
                beams = [model.generate(ids, num_beams=2, use_cache=cache, **options) for cache in (True, False)]
                assert torch.equal(*beams)
            first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
            if name not in WITHOUT_STATIC_CACHE:
                rest = model(ids[:, 4:], attention_mask=mask, past_key_values=first.past_key_values)
                assert_same_logits([rest.logits[:, -1]], slow.logits[:1])


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_assisted_generation_gives_what_generation_without_a_cache_gives(name):
    model, ids = language_model(name), tokens(1, 6)
    options = {"max_new_tokens": 6, "do_sample": False}
    with attach(model, random_table(2), position_embeddings="keep"):
        greedy = model.generate(ids, use_cache=False, **options)
        assert torch.equal(model.generate(ids, assistant_model=language_model(name), **options), greedy)


def test_the_decoder_of_an_encoder_decoder_model_generates_the_same_with_and_without_a_cache():
    torch.manual_seed(1)
    model, ids = spread(hf.BartForConditionalGeneration(tiny_any("bart").config)), tokens(2, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "forced_eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **options).logits
    for encoding in (random_table(2), RotaryEncoding(8, base=2.0)):
        with attach(model.get_decoder(), encoding, position_embeddings="keep"):
            cached, slow = (model.generate(ids, use_cache=cache, **options).logits for cache in (True, False))
        torch.testing.assert_close(cached, slow, rtol=0, atol=1e-6)
        assert not torch.allclose(cached[-1], plain[-1], rtol=0, atol=1e-4)


# ---- a step of generation


class Reads(TorchDispatchMode):
    """Counts the numbers that are read from tensors, for which the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += str(func) in ("aten._local_scalar_dense.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


def reads(model, ids):
    """Return how many numbers are read in one step with a static cache."""
    cache = hf.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        with Reads() as counted:
            model(ids[:, -1:], past_key_values=cache)
    return counted.number


def test_a_step_with_a_static_cache_reads_no_number_from_the_device():
    model, ids = language_model("glm"), tokens(2, N)
    set_implementation(model, "sdpa")
    plain = reads(model, ids)
    for encoding in (*(encoding_of(kind, model) for kind in KINDS), ALiBi(2)):
        with attach(model, encoding):
            assert reads(model, ids) <= plain, encoding
    with attach(model, Even()):  # shows that reads are counted
        assert reads(model, ids) > plain


# ---- caches of other kinds


def name_of_cache(forward):
    """Return the name that transformers gives the cache of keys: "cache" since 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def test_a_prompt_in_two_parts_is_right_where_one_module_fills_several_layers_of_a_cache():
    torch.manual_seed(1)
    model, ids = spread(hf.HrmTextForCausalLM(small(hf.HrmTextConfig, num_hidden_layers=3, head_dim=8))), tokens(2, N)
    for kind in ("bias by head", "rotation"):
        with attach(model, encoding_of(kind, model)), torch.no_grad():
            cache = hf.StaticCache(config=model.config, max_cache_len=20)
            parts = [model(part, past_key_values=cache).logits for part in (ids[:, :6], ids[:, 6:])]
            whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-4)


def test_a_model_that_always_fills_a_cache_takes_an_encoding():
    model, ids = tiny_any("qwen3"), tokens(1, N)

    def filling(module, args, kwargs):  # as the encoder of DiffusionGemma
        return args, kwargs | {name_of_cache(module.forward): hf.DynamicCache()}

    plain = hidden(model, ids, use_cache=False)
    model.register_forward_pre_hook(filling, with_kwargs=True)
    torch.testing.assert_close(hidden(model, ids), plain)
    with attach(model, random_table(2)):
        biased = hidden(model, ids)
        model._forward_pre_hooks.popitem(last=False)
        torch.testing.assert_close(biased, hidden(model, ids, use_cache=False))
    assert not torch.allclose(biased, plain, atol=1e-3)


def test_continuous_batching_of_an_attached_model_is_refused():
    model, ids = language_model("mistral"), tokens(1, 6)
    own = model.init_continuous_batching
    with attach(model, ALiBi(1)):
        with pytest.raises(ValueError, match=r"call model\.generate with padded prompts"):
            model.generate_batch(inputs=ids.tolist())
        attention, states = model.model.layers[0].self_attn, model.get_input_embeddings()(ids)
        with pytest.raises(ValueError, match=r"call model\.generate with padded prompts"):
            attention(states, position_embeddings=None, attention_mask=None, cache=object())
    assert model.init_continuous_batching == own


@pytest.mark.parametrize("position_embeddings", ["disable", "keep"])
def test_the_memory_of_xlnet_has_positions_before_the_queries(position_embeddings):
    model, ids, table = tiny("xlnet"), tokens(2, 8), random_table(2)
    maps = []
    with torch.no_grad():
        model.config.mem_len = model.mem_len = 5
        memory = model(tokens(2, 5, seed=1), use_mems=True).mems
        for encoding in (NoEncoding(), table):
            with attach(model, encoding, position_embeddings=position_embeddings):
                maps.append(model(ids, mems=memory, output_attentions=True).attentions[0])
    assert maps[0].shape[-2:] == (8, 13)
    expected = (maps[0].log() + table(8, 13).detach()).softmax(-1)
    torch.testing.assert_close(maps[1], expected, rtol=0, atol=1e-10)


def test_both_streams_of_xlnet_get_the_bias():
    model, ids = tiny("xlnet").float(), tokens(1, 8)  # transformers runs two streams in float32 only
    table, maps = random_table(2).float(), []
    order = torch.triu(torch.ones(1, 8, 8))  # a query sees the tokens before it
    more = {"perm_mask": order, "target_mapping": torch.eye(8)[None, 2:5], "output_attentions": True}
    for encoding in (NoEncoding(), table):
        with torch.no_grad(), attach(model, encoding, position_embeddings="keep"):
            maps.append(model(ids, **more).attentions[0])
    for stream, (old, new) in enumerate(zip(*maps, strict=True)):
        seen = slice(stream, None)  # the first row of the query stream sees nothing
        expected = (old.log() + table(8).detach()).softmax(-1)
        torch.testing.assert_close(new[..., seen, :], expected[..., seen, :], rtol=0, atol=1e-6)


# ---- padding between tokens


def test_padding_between_tokens_that_position_ids_skip_is_refused():
    model, text = language_model("gpt2"), tokens(1, 8)
    ids = torch.cat([text[:, :5], torch.zeros(1, 3, dtype=torch.long), text[:, 5:]], 1)
    mask = torch.ones_like(ids)
    mask[:, 5:8] = 0
    skipping, counting = (mask.cumsum(1) - 1).clamp(min=0), torch.arange(11)[None]
    with attach(model, ALiBi(2), position_embeddings="keep"):
        with pytest.raises(ValueError, match="attention_mask has padding between tokens that position_ids skip"):
            model(ids, attention_mask=mask, position_ids=skipping)
        model(ids, attention_mask=mask, position_ids=counting)
        padded, left = (nn.functional.pad(each, (3, 0)) for each in (text, torch.ones_like(text)))
        places = (left.cumsum(1) - 1).clamp(min=0)
        on_the_left = model(padded, attention_mask=left, position_ids=places).logits[:, 3:]
        torch.testing.assert_close(on_the_left, model(text).logits, rtol=0, atol=1e-5)
    model(ids, attention_mask=mask, position_ids=skipping)


def test_a_learned_prompt_before_padding_on_the_left_is_refused():
    peft = pytest.importorskip("peft")
    model = language_model("gpt2")
    attach(model, ALiBi(2), position_embeddings="keep")
    prompted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    prompted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="padding between tokens that position_ids skip"):
        prompted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)
