"""The proof before an encoding is attached: what it notices, and models that are special in one thing."""

import functools
import types

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from benchmarks.attaching import AddedToLogits, attaching, off_by
from pelocality.encodings import ALiBi, AttenuatedEncoding, NoEncoding, RotaryEncoding
from pelocality.models import SequenceModel, attach, attached
from pelocality.models.attaching.attention import Encoded
from tests.families import assert_same_outputs, family_of, same, small, spread, state, tiny, tiny_any, tokens
from tests.test_models_attachment import hooks, random_table, set_implementation

N = 11


def output(model, ids, **more):
    with torch.no_grad():
        return model(ids, use_cache=False, **more)[0]


# ---- the proof


def replace_forward(module, forward):
    """Give one module another forward pass, with the same arguments."""
    module.forward = types.MethodType(functools.wraps(type(module).forward)(forward), module)


def written_out(self, hidden_states, mask):
    """Return the weights of Qwen3's eager attention without rotations, and its values."""
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    return (query @ key.mT * self.scaling + mask).softmax(-1), value


def heads_exchanged(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    weights, value = written_out(self, hidden_states, attention_mask)
    return self.o_proj((weights.flip(1) @ value).transpose(1, 2).flatten(2)), None


def softmax_without_use(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    weights, value = written_out(self, hidden_states, attention_mask)
    weights = (weights + 1).log().exp() - 1
    return self.o_proj((weights.square() @ value).transpose(1, 2).flatten(2)), None


def first_token_doubled(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    states = torch.cat([2 * hidden_states[:, :1], hidden_states[:, 1:]], 1)
    return type(self).forward(self, states, position_embeddings, attention_mask, **kwargs)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (heads_exchanged, "Qwen3Attention, which computes no attention that torch shows"),
        (softmax_without_use, "Qwen3Attention, which computes no attention that torch shows"),
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
    if forward is first_token_doubled:
        attach(model, ALiBi(2), prove=False).remove()


class OwnAttention(Qwen3Attention):
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
    exact = Encoded._bias
    monkeypatch.setattr(Encoded, "_bias", lambda self, *call: exact(self, *call) * 1.01)
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


def bound_the_input(module, args, kwargs):
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].tanh()}


def double_the_first_token(module, args, kwargs):
    states = kwargs["hidden_states"]
    return args, kwargs | {"hidden_states": torch.cat([2 * states[:, :1], states[:, 1:]], 1)}


def test_hooks_of_the_user_may_change_the_input_and_output_of_attention():
    model, ids, table = tiny_any("qwen3"), tokens(2, N), random_table(2)
    model.layers[0].self_attn.register_forward_hook(lambda module, args, output: (output[0] / 2, *output[1:]))
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


def test_a_hook_that_changes_what_enters_attention_is_noticed():
    model = set_implementation(tiny_any("qwen3"), "eager")
    output(model, tokens(1, N), output_attentions=True)  # with hooks of transformers
    model.layers[1].self_attn.register_forward_pre_hook(double_the_first_token, with_kwargs=True)
    with pytest.raises(ValueError, match="depend on the order of tokens"):
        attach(model, ALiBi(2))
    attach(model, ALiBi(2), position_embeddings="keep").remove()


@pytest.mark.parametrize(("name", "encoding"), [("bert", ALiBi(2)), ("llama", RotaryEncoding(4))])
def test_steps_of_rounding_are_no_effect_of_order(name, encoding):
    """As in models whose activations are quantised."""
    model = tiny(name).float()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: output + 1e-3 * ((output * 2**20).round() % 2))
    attach(model, encoding).remove()


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
    "fnet": (lambda: hf.FNetModel(hf.FNetConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1)), "no attention"),
    "mamba": (lambda: hf.MambaModel(hf.MambaConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1)), "MambaMixer"),
    "mamba2": (
        lambda: hf.Mamba2Model(hf.Mamba2Config(hidden_size=32, num_heads=8, head_dim=8, n_groups=1, state_size=8,
                                               num_hidden_layers=2, vocab_size=99)),
        "Mamba2Mixer, which computes no attention that torch shows",
    ),
}  # fmt: skip


def test_the_proof_runs_the_model_a_few_times_in_evaluation_mode_and_can_be_turned_off():
    model, runs = tiny_any("qwen3").train(), []
    model.register_forward_hook(lambda module, args, output: runs.append(module.training))
    attach(model, NoEncoding(), prove=False).remove()
    assert runs == [False]  # to find its attention
    attach(model, NoEncoding()).remove()
    assert runs == [False] * 11
    assert model.training
    with pytest.raises(TypeError, match="prove"):
        attach(model, NoEncoding(), prove="yes")


# ---- models that are special in one thing


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


def test_the_longest_input_is_known_for_tables_of_a_class_of_their_own():
    for name, longest in (("opt", 64), ("gpt_neox", None)):  # GPT-NeoX rotates, by any distance
        model = tiny_any(name)
        assert SequenceModel(model).longest == longest
        with attach(model, NoEncoding()):
            assert SequenceModel(model).longest == longest


def test_queries_that_grow_with_their_position_cannot_be_disabled():
    config = hf.Llama4TextConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, vocab_size=99,
        intermediate_size=16, intermediate_size_mlp=16, num_local_experts=2, no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"attn_temperature_tuning\); use position_embeddings='keep'"):
        attach(hf.Llama4TextModel(config).eval(), NoEncoding())


@pytest.mark.parametrize(("name", "disable"), [("DeepseekV32", True), ("GlmMoeDsa", False)])
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
