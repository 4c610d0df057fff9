"""Encodings attached to families without a record of their own, and the proof that comes before."""

import functools
import inspect
import types

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from benchmarks.attaching import AddedToLogits, attaching, off_by, random_table
from pelocality.encodings import ALiBi, AttenuatedEncoding, NoEncoding
from pelocality.models import SequenceModel, attach, attached, load
from pelocality.models.attaching import attention, proof
from tests.families import (
    ANY,
    assert_same_outputs,
    family_of,
    same,
    same_weights,
    small,
    spread,
    state,
    tiny,
    tiny_any,
    tokens,
)
from tests.test_models_attachment import hooks, set_implementation
from tests.test_models_restore import lines_of
from tests.test_models_unknown_families import BESIDE_IMAGES

N = 11
EAGER_ONLY = ("gptj", "roformer", "rembert", "megatron-bert", "gpt_oss", "gemma2", "t5gemma", "t5gemma decoder")
EAGER_ONLY += ("codegen", "xlm", "mpt", "squeezebert")
CAUSAL_MODELS = {
    "qwen3": hf.Qwen3ForCausalLM,
    "gemma3": hf.Gemma3ForCausalLM,
    "gpt_neox": hf.GPTNeoXForCausalLM,
    "phi3": hf.Phi3ForCausalLM,
    "gpt_oss": hf.GptOssForCausalLM,
    "jamba": hf.JambaForCausalLM,
    "opt": hf.OPTForCausalLM,
    "gemma3n_text": hf.Gemma3nForCausalLM,
    "gemma4_text": hf.Gemma4ForCausalLM,
    "zamba": hf.ZambaForCausalLM,
}  # fmt: skip


def output(model, ids, **more):
    with torch.no_grad():
        return model(ids, use_cache=False, **more)[0]


def language_model(name):
    torch.manual_seed(1)
    model = spread(CAUSAL_MODELS[name](tiny_any(name).config))
    model.generation_config = hf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.parametrize("name", ANY)
def test_outputs_are_those_of_a_witness_that_adds_the_bias_to_the_logits_itself(name, disable):
    assert off_by(tiny_any(name), disable=disable) < 1e-6
    if name not in EAGER_ONLY:
        assert off_by(tiny_any(name), disable=disable, implementation="sdpa") < 1e-6


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_no_encoding_on_a_rotary_model_is_the_model_with_cosines_of_1_and_sines_of_0(name):
    model, ids = tiny(name) if name == "llama" else tiny_any(name), tokens(2, N)

    def identity(module, args, output):
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    handle = model.rotary_emb.register_forward_hook(identity)
    expected = output(model, ids)
    handle.remove()
    with attach(model, NoEncoding()):
        assert torch.equal(output(model, ids), expected)
    assert not torch.allclose(output(model, ids), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_generation_is_the_same_with_and_without_a_key_cache(name, cache):
    if name in ("jamba", "zamba") and cache == "static":
        pytest.skip("transformers has no static cache for it")
    model, ids = language_model(name), tokens(2, 6)
    mask = (torch.arange(6) >= torch.tensor([[0], [2]])).long()  # padding on the left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with attach(model, random_table(2), position_embeddings="keep"):
        slow = model.generate(ids, use_cache=False, **options)
        fast = model.generate(ids, use_cache=True, cache_implementation=cache, **options)
        whole = output(model, ids, attention_mask=mask)[:, -1]
    assert torch.equal(fast.sequences, slow.sequences)
    torch.testing.assert_close(fast.logits, slow.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(slow.logits[0], whole, rtol=0, atol=1e-5, check_dtype=False)


def test_a_cache_of_which_the_layer_is_not_known_is_refused():
    model, ids = tiny_any("qwen3"), tokens(1, N)
    with attach(model, random_table(2)), torch.no_grad():
        model.layers[1].self_attn.layer_idx = None
        with pytest.raises(ValueError, match=r"Qwen3Attention does not say which layer .* with use_cache=False"):
            model(ids, use_cache=True)
        output(model, ids)


def test_a_prompt_in_two_parts_is_right_where_one_module_fills_several_layers_of_a_cache():
    torch.manual_seed(1)
    model, ids = spread(hf.HrmTextForCausalLM(small(hf.HrmTextConfig, num_hidden_layers=3, head_dim=8))), tokens(2, N)
    with attach(model, random_table(2)), torch.no_grad():
        cache = hf.StaticCache(config=model.config, max_cache_len=20)
        parts = [model(part, past_key_values=cache).logits for part in (ids[:, :6], ids[:, 6:])]
        torch.testing.assert_close(torch.cat(parts, 1), output(model, ids), rtol=0, atol=1e-4)


def name_of_cache(forward):
    """The name that transformers gives the cache of keys: "cache" since 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class RenamedAttention(Qwen3Attention):
    """Qwen 3's attention with the name that caches have since transformers 5.24, and a layer that its caller says."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, cache_offset=0, **more):
        own = {name_of_cache(Qwen3Attention.forward): cache}
        arguments = {"position_embeddings": position_embeddings, "attention_mask": attention_mask} | own
        self.layer_idx += cache_offset
        try:
            return super().forward(hidden_states, **arguments, **more)
        finally:
            self.layer_idx -= cache_offset


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("offset", [0, 1])
def test_tokens_after_a_cache_of_another_name_get_the_bias_of_their_distances(offset, implementation):
    model, ids = tiny_any("qwen3"), tokens(1, N)
    set_implementation(model, implementation)

    def renamed(attention, args, kwargs):
        cache = kwargs.pop("past_key_values", None)
        return args, {"cache": cache, "cache_offset": offset * attention.layer_idx} | kwargs

    for layer in model.layers:
        layer.self_attn.__class__ = RenamedAttention
        layer.self_attn.register_forward_pre_hook(renamed, with_kwargs=True)
    with attach(model, random_table(2)), torch.no_grad():
        cache = hf.DynamicCache()
        given = {name_of_cache(model.forward): cache}
        parts = [model(part, **given)[0] for part in (ids[:, :5], ids[:, 5:-1], ids[:, -1:])]
        torch.testing.assert_close(torch.cat(parts, 1), output(model, ids), rtol=0, atol=1e-5)


def test_a_model_that_always_fills_a_cache_takes_an_encoding():
    model, ids = tiny_any("qwen3"), tokens(1, N)

    def filling(module, args, kwargs):  # as the encoder of DiffusionGemma
        return args, kwargs | {name_of_cache(module.forward): hf.DynamicCache()}

    plain = output(model, ids)
    model.register_forward_pre_hook(filling, with_kwargs=True)
    torch.testing.assert_close(output(model, ids), plain)
    with attach(model, random_table(2)):
        biased = output(model, ids)
        model._forward_pre_hooks.popitem(last=False)
        torch.testing.assert_close(biased, output(model, ids))
    assert not torch.allclose(biased, plain, atol=1e-3)


class Mixed(nn.Module):
    """Attends to something else than tokens, as Inkling 2 to the outputs of blocks."""

    def forward(self, states):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, states, states, states, None)[0]


def test_a_module_that_attends_to_no_tokens_gets_no_encoding():
    model = tiny_any("qwen3")
    own = family_of(model).attention_layers(model)
    model.layers[0].mixed = Mixed()
    assert family_of(model).attention_layers(model) == own
    with attach(model, random_table(2)) as attachment:
        assert len(attachment.encodings) == len(own)


def test_layers_of_different_numbers_of_heads_take_an_encoding_each():
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    kinds = ["full_attention", "sliding_attention"]
    text = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 8,
            "num_key_value_heads": 2, "num_sliding_attention_heads": 8, "layer_types": kinds, "sliding_window": 6,
            "mlp_layer_types": ["dense"] * 2, "vocab_size": 99}  # fmt: skip
    config = hf.AutoConfig.for_model("step3p7", text_config=text).text_config
    model = spread(modeling.Step3p7TextModel(config).eval())
    with attach(model, [random_table(4), random_table(8)]) as attachment:
        assert [encoding.heads for encoding in attachment.encodings] == [4, 8]
    with pytest.raises(ValueError, match="heads"):
        attach(model, random_table(4))


def test_a_model_without_attention_is_refused_with_that_reason():
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "num_hidden_layers": 2}
    model = hf.Mamba2Model(hf.Mamba2Config(**sizes, vocab_size=99)).eval()
    with pytest.raises(ValueError, match="Mamba2Mixer, which computes no attention that torch shows"):
        attach(model, NoEncoding())


def test_left_padding_does_not_carry_later_tokens_into_recurrent_layers():
    config = small(hf.RecurrentGemmaConfig, num_hidden_layers=3, head_dim=8, lru_width=16, num_key_value_heads=1,
                   attention_window_size=16, block_types=("attention", "recurrent", "attention"))  # fmt: skip
    torch.manual_seed(1)
    model, ids = spread(hf.RecurrentGemmaModel(config)), tokens(1, N)
    mask = (torch.arange(N) >= 3).long()[None]
    with attach(model, NoEncoding(), position_embeddings="keep"):
        same_as_plain = output(model, ids, attention_mask=mask)
    torch.testing.assert_close(same_as_plain, output(model, ids, attention_mask=mask))


def test_entities_of_luke_are_refused():
    config = small(hf.LukeConfig, entity_vocab_size=9, entity_emb_size=8, use_entity_aware_attention=True)
    model, ids = spread(hf.LukeModel(config)), tokens(1, N)
    with attach(model, random_table(2)), torch.no_grad():
        model(ids)
        with pytest.raises(ValueError, match="LukeSelfAttention computes attention of 12 queries and 12 keys"):
            model(ids, entity_ids=torch.tensor([[3]]), entity_position_ids=torch.tensor([[[1, 2]]]))


def test_a_mask_with_other_keys_than_the_tokens_is_refused():
    model, ids = tiny_any("qwen3"), tokens(1, N)
    mask, message = torch.ones(1, 1, N, N + 2).bool(), r"11 queries and 11 keys, got shape \(1, 1, 11, 13\)"
    with attach(model, random_table(2)), pytest.raises(ValueError, match=message):
        output(model, ids, attention_mask=mask)


def test_the_decoder_of_an_encoder_decoder_model_generates_the_same_with_and_without_a_key_cache():
    torch.manual_seed(1)
    model, ids = spread(hf.BartForConditionalGeneration(tiny_any("bart").config)), tokens(2, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "forced_eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **options).logits
    with attach(model.get_decoder(), random_table(2), position_embeddings="keep"):
        cached, slow = (model.generate(ids, use_cache=cache, **options).logits for cache in (True, False))
    torch.testing.assert_close(cached, slow, rtol=0, atol=1e-6)
    assert not torch.allclose(cached[1], plain[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_neox", "gemma4_text", "jamba"])
def test_beam_search_and_assisted_generation_give_what_they_give_without_a_cache(name):
    model, ids = language_model(name), tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False}
    with attach(model, random_table(2), position_embeddings="keep"):
        beams = [model.generate(ids, num_beams=3, use_cache=cache, **options) for cache in (True, False)]
        assert torch.equal(*beams)
        if name != "jamba":  # the state of its other layers cannot be cut back to the accepted tokens
            greedy = model.generate(ids, use_cache=False, **options)
            assert torch.equal(model.generate(ids, assistant_model=language_model(name), **options), greedy)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "eurobert", "mixtral", "jamba", "gemma3n_text"])
def test_gradient_checkpointing_changes_no_gradient(name):
    model, ids = tiny_any(name), tokens(2, N)
    attachment = attach(model, AttenuatedEncoding(decay=0.2, scale=3.0, learnable=["decay"]))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model.train()(ids, use_cache=False)[0].square().sum().backward()
        gradients.append([each.log_decay.grad.clone() for each in attachment.encodings])
        model.gradient_checkpointing_enable()
    assert all(gradient.abs() > 0 for gradient in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_a_compiled_model_of_any_family_follows_attaching_and_removal(name):
    model, ids = tiny_any(name), tokens(2, N)
    compiled = torch.compile(model, backend="aot_eager")
    before = output(compiled, ids)
    with attach(compiled, random_table(2)):
        torch.testing.assert_close(output(compiled, ids), output(model, ids), rtol=0, atol=2e-6)
        assert not torch.allclose(output(compiled, ids), before, rtol=0, atol=1e-3)
    assert_same_outputs(output(compiled, ids), before)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "jamba", "opt", "roformer"])
def test_a_saved_model_loads_with_its_encodings(name, tmp_path):
    model, ids = tiny_any(name).float(), tokens(2, N)
    attach(model, random_table(2).float())
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert_same_outputs(output(loaded, ids), output(model, ids))
    with pytest.raises(ValueError, match=r"load it with pelocality\.load"):
        type(model).from_pretrained(tmp_path)
    assert len(attached(loaded).encodings) == len(family_of(model).attention_modules(model))


@pytest.mark.parametrize("name", ["gemma3", "t5gemma2", "mixtral"])
def test_models_whose_weights_transformers_saves_under_other_names_load_with_their_encodings(name, tmp_path):
    model = (tiny_any(name) if name in ANY else BESIDE_IMAGES[name][0]()).float().eval()
    attach(model, random_table(2).float(), position_embeddings="keep")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert same_weights(loaded.state_dict(), model.state_dict())
    assert len(attached(loaded).encodings) == 2


@pytest.mark.parametrize(("name", "target"), [("qwen3", "q_proj"), ("gpt_neox", "query_key_value"), ("opt", "v_proj")])
def test_an_adapter_trains_and_saves_the_encoding_of_any_family(name, target, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = tiny_any(name).float(), tokens(1, N)
    again = tiny_any(name).float()
    for each in (model, again):
        attach(each, AttenuatedEncoding(learnable=["decay"]))
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=[target], modules_to_save=["pelocality"])
    ).eval()
    trained = [weight for name, weight in adapted.named_parameters() if weight.requires_grad and "log_decay" in name]
    assert len(trained) == 2
    for weight in trained:
        nn.init.constant_(weight, 0.7)
    adapted.save_pretrained(tmp_path)
    assert_same_outputs(output(peft.PeftModel.from_pretrained(again, tmp_path).eval(), ids), output(adapted, ids))


def test_beside_images_the_language_model_is_changed():
    text = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 16, "model_type": "llama"}  # fmt: skip
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}  # fmt: skip
    model = spread(hf.LlavaModel(hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)))
    with attach(model, random_table(2)) as attachment:
        assert len(attachment.encodings) == 2
        assert attached(model.language_model) is not None
        assert not any("pelocality" in name for name, _ in model.vision_tower.named_modules())
    assert off_by(model, disable=True) < 1e-6


def test_the_longest_input_is_known_for_tables_of_a_class_of_their_own():
    for name, longest in (("opt", 64), ("gpt_neox", None)):  # GPT-NeoX rotates, by any distance
        model = tiny_any(name)
        assert SequenceModel(model).longest == longest
        with attach(model, NoEncoding()):
            assert SequenceModel(model).longest == longest


# ---- the proof


def replace_forward(module, forward):
    """Give one module another forward pass, with the same arguments."""
    module.forward = types.MethodType(functools.wraps(type(module).forward)(forward), module)


def attention(self, hidden_states, mask):
    """Return the weights of Qwen3's eager attention without rotations, and its values."""
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    return (query @ key.mT * self.scaling + mask).softmax(-1), value


def heads_exchanged(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    weights, value = attention(self, hidden_states, attention_mask)
    return self.o_proj((weights.flip(1) @ value).transpose(1, 2).flatten(2)), None


def softmax_without_use(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    weights, value = attention(self, hidden_states, attention_mask)
    weights = (weights + 1).log().exp() - 1
    return self.o_proj((weights.square() @ value).transpose(1, 2).flatten(2)), None


def first_token_doubled(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    states = torch.cat([2 * hidden_states[:, :1], hidden_states[:, 1:]], 1)
    return type(self).forward(self, states, position_embeddings, attention_mask, **kwargs)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (heads_exchanged, "1 attentions over all its tokens ran, 2 got the bias"),
        (softmax_without_use, "1 attentions over all its tokens ran, 2 got the bias"),
        (first_token_doubled, "all masks opened, its outputs depend on the order of tokens"),
    ],
)
def test_a_model_that_breaks_a_promise_is_refused_by_the_check_that_failed_and_left_as_it_was(forward, message):
    model, ids = set_implementation(tiny_any("qwen3"), "eager"), tokens(2, N)
    replace_forward(model.layers[1].self_attn, forward)
    before, registered, expected = state(model), hooks(model), output(model, ids)
    with pytest.raises(ValueError, match=rf"cannot be attached to Qwen3Model \(model type 'qwen3'\): .*({message})"):
        attach(model, ALiBi(2))
    assert same(before, state(model))
    assert hooks(model) == registered
    assert torch.equal(output(model, ids), expected)
    with attach(model, ALiBi(2), prove=False):
        assert attached(model) is not None


class Mixin:
    pass


class OwnAttention(Mixin, Qwen3Attention):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)


class WithoutMask(Qwen3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        seen = torch.ones(2 * [hidden_states.shape[1]], dtype=torch.bool).tril()[None, None]
        return super().forward(hidden_states, position_embeddings, seen, **options)


def test_an_attention_module_of_a_subclass_gets_the_encoding_or_is_refused():
    model, ids = tiny_any("qwen3"), tokens(2, N)
    attach(model, ALiBi(2))
    expected = output(model, ids)
    attached(model).remove()
    model.layers[1].self_attn.__class__ = OwnAttention
    with attach(model, ALiBi(2)) as attachment:
        assert len(attachment.encodings) == len(model.layers)
        assert_same_outputs(output(model, ids), expected)
    model.layers[1].self_attn.__class__ = WithoutMask
    with pytest.raises(ValueError, match="all masks opened, its outputs depend on the order of tokens"):
        attach(model, ALiBi(2))  # its mask cannot be opened
    with attach(model, ALiBi(2), position_embeddings="keep"):
        kept = output(model, ids)
    model.layers[1].self_attn.__class__ = Qwen3Attention
    with attach(model, ALiBi(2), position_embeddings="keep"):
        assert_same_outputs(kept, output(model, ids))


def test_a_bias_that_differs_from_that_of_the_encoding_is_noticed(monkeypatch):
    exact = attention.Encoded._bias
    monkeypatch.setattr(attention.Encoded, "_bias", lambda self, *call: exact(self, *call) * 1.01)
    for implementation in ("eager", "sdpa"):
        model = set_implementation(tiny_any("qwen3").float(), implementation)
        with pytest.raises(ValueError, match=r"does not enter its softmax exactly, weights are off by 0\.0"):
            attach(model, NoEncoding())


def test_a_model_whose_attention_computes_no_softmax_is_refused_with_that_reason():
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        heads = hidden_states.unflatten(-1, (2, -1)).transpose(1, 2)
        return ((heads @ heads.mT).sigmoid() @ heads).transpose(1, 2).flatten(2), None

    model = tiny_any("qwen3")
    for layer in model.layers:
        replace_forward(layer.self_attn, forward)
    with pytest.raises(ValueError, match="Qwen3Attention, which computes no attention that torch shows"):
        attach(model, ALiBi(2))


@pytest.mark.parametrize("window", [1, 2])
def test_windows_of_one_or_two_tokens_are_taken(window):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf.MistralModel(hf.MistralConfig(vocab_size=99, intermediate_size=16, sliding_window=window, **sizes))
    with attach(spread(model).float(), ALiBi(4)) as attachment:
        assert len(attachment.encodings) == 2


def test_hooks_of_the_user_may_change_the_output_of_attention():
    model = tiny_any("qwen3")
    model.layers[0].self_attn.register_forward_hook(lambda module, args, output: (output[0] / 2, *output[1:]))
    before, registered = state(model), hooks(model)
    attach(model, ALiBi(2)).remove()
    assert same(before, state(model))
    assert hooks(model) == registered


def bound_the_input(module, args, kwargs):
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].tanh()}


def double_the_first_token(module, args, kwargs):
    states = kwargs["hidden_states"]
    return args, kwargs | {"hidden_states": torch.cat([2 * states[:, :1], states[:, 1:]], 1)}


def test_hooks_of_the_user_may_change_the_input_of_attention():
    model, ids, table = tiny_any("qwen3"), tokens(2, N), random_table(2)
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(bound_the_input, with_kwargs=True)
    before, registered = state(model), hooks(model)
    with AddedToLogits(table(N).detach()), torch.no_grad():
        expected = set_implementation(model, "eager")(ids, use_cache=False)[0]
    with attach(model, table, position_embeddings="keep"):
        torch.testing.assert_close(output(model, ids), expected, rtol=0, atol=1e-6)
    set_implementation(model, "sdpa")
    assert same(before, state(model))
    assert hooks(model) == registered


def test_positions_below_a_decoder_are_noticed_also_where_its_encoder_is_deeper():
    sizes = {"d_model": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    model = spread(
        hf.BartModel(hf.BartConfig(vocab_size=99, encoder_layers=3, decoder_layers=2, **sizes)).get_decoder()
    )
    ramp = torch.linspace(-1, 1, 64, dtype=torch.float64)
    model.layernorm_embedding.register_forward_hook(lambda module, args, x: x + ramp[: x.shape[1], None])
    with pytest.raises(ValueError, match="its outputs depend on the order of tokens; remove its hooks"):
        attach(model, ALiBi(4))


def test_a_refusal_names_the_hooks_that_may_be_its_reason():
    model = set_implementation(tiny_any("qwen3"), "eager")
    output(model, tokens(1, N), output_attentions=True)  # with hooks of transformers
    model.layers[1].self_attn.register_forward_pre_hook(double_the_first_token, with_kwargs=True)
    model.embed_tokens.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(
        ValueError,
        match=r"depend on the order of tokens; remove its hooks if one of them is the reason: [^,]*<lambda> on "
        r"embed_tokens, double_the_first_token on layers\.1\.self_attn$",
    ):
        attach(model, ALiBi(2))
    attach(model, ALiBi(2), position_embeddings="keep").remove()


REFUSED = {
    "convbert": (
        lambda: hf.ConvBertModel(hf.ConvBertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2,
                                                   num_attention_heads=4, intermediate_size=16, embedding_size=16)),
        "its outputs depend on the order of tokens",
    ),
    "big_bird": (
        lambda: hf.BigBirdModel(hf.BigBirdConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2,
                                                 num_attention_heads=2, intermediate_size=16)),
        "attention_type='original_full'",
    ),
    "fnet": (
        lambda: hf.FNetModel(hf.FNetConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1)),
        "no attention module that takes a mask",
    ),
}  # fmt: skip


def test_queries_that_grow_with_their_position_cannot_be_disabled():
    config = hf.Llama4TextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, vocab_size=99,
        intermediate_size=16, intermediate_size_mlp=16, num_local_experts=2, no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"attn_temperature_tuning\); use position_embeddings='keep'"):
        attach(hf.Llama4TextModel(config).eval(), NoEncoding())


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_the_keys_that_an_indexer_selects_do_not_depend_on_the_bias(name, disable):
    # each query attends to 8 of up to 11 keys; the proof's seven tokens are fewer than that
    config = getattr(hf, f"{name}Config")(
        hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=16,
        index_topk=8, vocab_size=99, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = spread(getattr(hf, f"{name}Model")(config)), tokens(2, N)
    assert off_by(model, disable=disable) < 1e-6
    assert off_by(model, disable=disable, implementation="sdpa") < 1e-6
    # an encoding that normalises over keys, over those that are selected
    position_embeddings, outputs = "disable" if disable else "keep", []
    with attach(model, AttenuatedEncoding(2, decay=0.3), position_embeddings=position_embeddings):
        for implementation in ("eager", "sdpa"):
            set_implementation(model, implementation)
            outputs.append(output(model, ids))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_encoding_that_normalises_over_keys_sees_the_masks_that_a_model_adds_itself():
    model = spread(hf.OpenAIGPTModel(hf.OpenAIGPTConfig(vocab_size=99, n_embd=16, n_layer=2, n_head=2))).float()
    ids = tokens(2, N)
    attach(model, AttenuatedEncoding(2, decay=0.3), position_embeddings="keep")
    expected = output(model, ids)
    assert_same_outputs(output(model, ids, attention_mask=torch.ones_like(ids)), expected)
    assert_same_outputs(output(model, ids[:, :5], attention_mask=torch.ones_like(ids[:, :5])), expected[:, :5])


def test_a_state_space_layer_beside_attention_in_every_layer_is_a_hybrid():
    config = hf.FalconH1Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8,
        vocab_size=99, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    assert off_by(spread(hf.FalconH1Model(config)), disable=True) < 1e-6


def test_a_decoder_alone_is_found_inside_its_language_model():
    config = hf.MarianConfig(
        d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=99, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, max_position_embeddings=64, forced_eos_token_id=None,
    )  # fmt: skip
    model = hf.MarianForCausalLM(config).eval()
    with attach(model, ALiBi(2)):
        assert attached(model.model.decoder) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_proved_are_refused_by_name_with_the_check_that_failed(name):
    make, reason = REFUSED[name]
    model = make().eval()
    before = state(model)
    with pytest.raises(ValueError, match=rf"model type '{name}'\)(.|\n)*{reason}"):
        attach(model, NoEncoding())
    assert same(before, state(model))


def test_the_sweep_tells_attached_models_from_others():
    assert attaching(lambda: tiny_any("qwen3")) == "attached"
    assert attaching(REFUSED["convbert"][0]).startswith("attached with its positions (with positions disabled")
    assert attaching(REFUSED["big_bird"][0]).startswith("refused: ")


def test_a_symmetry_is_refused_where_the_model_was_seen_to_be_causal():
    clip = hf.CLIPTextModel(
        hf.CLIPTextConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                          intermediate_size=16, eos_token_id=2)
    )  # fmt: skip
    with pytest.raises(ValueError, match="symmetry of AttenuatedEncoding acts on future keys only"):
        attach(clip, AttenuatedEncoding(symmetry=0.5))


@pytest.mark.parametrize(("name", "causal"), [("bert", False), ("modernbert", False), ("llama", True)])
def test_a_model_whose_attention_ends_in_weights_of_zero_is_as_causal_as_its_family(name, causal):
    model = tiny(name)
    for each, weight in model.named_parameters():
        if each.endswith(
            ("attention.output.dense.weight", "attention.output.dense.bias", "Wo.weight", "o_proj.weight")
        ):
            nn.init.zeros_(weight)
    if not causal:
        attach(model, AttenuatedEncoding(symmetry=4)).remove()
    else:
        with pytest.raises(ValueError, match="symmetry of AttenuatedEncoding acts on future keys only"):
            attach(model, AttenuatedEncoding(symmetry=4))
        attach(model, AttenuatedEncoding()).remove()


def test_theproof_runs_the_model_five_times_in_evaluation_mode_and_can_be_turned_off():
    model, runs = tiny_any("qwen3").train(), []
    model.register_forward_hook(lambda module, args, output: runs.append(module.training))
    attach(model, NoEncoding(), prove=False).remove()
    assert not runs
    attach(model, NoEncoding()).remove()
    assert runs == [False] * 5
    assert model.training
    with pytest.raises(TypeError, match="prove"):
        attach(model, NoEncoding(), prove="yes")


def test_an_interrupt_during_theproof_restores_the_model():
    model = set_implementation(tiny_any("qwen3"), "sdpa")
    before, registered = state(model), hooks(model)
    lines = len(lines_of(lambda: attach(model, NoEncoding()).remove(), [proof.__file__], 10**6))
    for at in range(0, lines, 47):
        reached = len(lines_of(lambda: attach(model, NoEncoding()), [proof.__file__], at))
        assert reached == at + 1
        assert same(before, state(model)), at
        assert hooks(model) == registered, at
