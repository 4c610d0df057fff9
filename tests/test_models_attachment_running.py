"""Attached models with caches, memories and compilers, interrupts, and refused arguments."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import ALiBi, AttenuatedEncoding, Encoding, FixedWindow, NoEncoding, RotaryEncoding
from pelocality.models import SequenceModel, _calls, _inference, _restore, attached
from pelocality.models.attaching import attach as attachment, attention, calls, installing, positions, saving, submodule
from pelocality.models.families import _keys, disentangled, relative
from tests.families import assert_same_outputs, same, state, tiny, tokens
from tests.test_models_attachment import (
    WITH_CONVOLUTION,
    attach,
    attentions,
    hidden,
    normalised_over_keys,
    random_table,
    set_implementation,
)
from tests.test_models_restore import every_interrupt

N = 11
LANGUAGE_MODELS = {
    "gpt2": hf.GPT2LMHeadModel,
    "llama": hf.LlamaForCausalLM,
    "mistral": hf.MistralForCausalLM,
    "qwen2": hf.Qwen2ForCausalLM,
    "bloom": hf.BloomForCausalLM,
    "bert as decoder": hf.BertLMHeadModel,
}


def language_model(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LANGUAGE_MODELS[name](tiny(name).config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.4)
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    return model.double().eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("position_embeddings", "padding"), [("disable", 2), ("keep", 2), ("disable", 0)])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_generation_is_the_same_with_and_without_a_key_cache(name, position_embeddings, padding, cache):
    """12 new tokens, beyond the sliding window of 5 of the families that have one."""
    model, ids = language_model(name), tokens(2, 6)
    mask = (torch.arange(6) >= torch.tensor([[0], [padding]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    untouched = model.generate(ids, use_cache=False, **options).logits
    for implementation in ("sdpa", "eager") if name != "bloom" else ("eager",):
        set_implementation(model, implementation)
        with attach(model, normalised_over_keys(name), position_embeddings=position_embeddings):
            slow = model.generate(ids, use_cache=False, **options)
            fast = model.generate(ids, use_cache=True, cache_implementation=cache, **options)
        torch.testing.assert_close(fast.logits, slow.logits, rtol=0, atol=1e-5)
        assert torch.equal(fast.sequences, slow.sequences)
        assert not torch.allclose(slow.logits[0], untouched[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("padding", [False, True])
def test_a_prompt_in_two_parts_gives_the_output_of_the_whole_prompt(padding):
    model, ids = language_model("llama"), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[1, :3] = int(not padding)
    with torch.no_grad(), attach(model, normalised_over_keys("llama")):
        whole = model(ids, attention_mask=mask).logits
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        rest = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 5:], rtol=0, atol=1e-6)


def test_continuous_batching_of_an_attached_model_is_refused():
    model, ids = language_model("llama").float(), tokens(1, 6)
    own = model.init_continuous_batching
    with attach(model, ALiBi(1)):
        with pytest.raises(ValueError, match=r"call model\.generate with padded prompts"):
            model.generate_batch(inputs=ids.tolist())
        attention, hidden = model.model.layers[0].self_attn, model.get_input_embeddings()(ids)
        with pytest.raises(ValueError, match=r"call model\.generate with padded prompts"):
            attention(hidden, position_embeddings=None, attention_mask=None, cache=object())
    assert model.init_continuous_batching == own


@pytest.mark.parametrize("position_embeddings", ["disable", "keep"])
def test_the_memory_of_xlnet_has_positions_before_the_queries(position_embeddings):
    model, ids = tiny("xlnet"), tokens(2, 8)
    table = random_table(2)
    with torch.no_grad():
        model.config.mem_len = model.mem_len = 5
        memory = model(tokens(2, 5, seed=1), use_mems=True).mems
        with attach(model, NoEncoding(), position_embeddings=position_embeddings):
            plain = model(ids, mems=memory, output_attentions=True).attentions[0]
        with attach(model, table, position_embeddings=position_embeddings):
            biased = model(ids, mems=memory, output_attentions=True).attentions[0]
    assert plain.shape[-2:] == (8, 13)
    expected = (plain.log() + table(8, 13).detach()).softmax(-1)
    torch.testing.assert_close(biased, expected, rtol=0, atol=1e-10)


def test_both_streams_of_xlnet_get_the_bias():
    model, ids = tiny("xlnet").float(), tokens(1, 8)  # transformers runs two streams in float32 only
    table = random_table(2).float()
    order = torch.triu(torch.ones(1, 8, 8))  # a query sees the tokens before it
    target = torch.eye(8)[None, 2:5]
    more = {"perm_mask": order, "target_mapping": target, "output_attentions": True}
    with torch.no_grad():
        with attach(model, NoEncoding(), position_embeddings="keep"):
            plain = model(ids, **more).attentions[0]
        with attach(model, table, position_embeddings="keep"):
            biased = model(ids, **more).attentions[0]
    for stream, (old, new) in enumerate(zip(plain, biased, strict=True)):
        seen = slice(stream, None)  # the first row of the query stream sees nothing
        expected = (old.log() + table(8).detach()).softmax(-1)
        torch.testing.assert_close(new[..., seen, :], expected[..., seen, :], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "deberta"])
def test_compiled_models_follow_attaching_and_removal(name):
    model, ids = tiny(name), tokens(2, N)
    mask = (torch.arange(N) < torch.tensor([[N], [7]])).long()
    compiled = torch.compile(model, backend="eager")
    present = mask.bool()

    def both():
        with torch.no_grad():
            outputs = [each(ids, attention_mask=mask)[0][present] for each in (compiled, model)]
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
        return outputs[0]

    before = both()
    attachment = attach(compiled, normalised_over_keys(learnable=True))
    attached_output = both()
    assert not torch.allclose(attached_output, before, rtol=0, atol=1e-4)
    attachment.remove()
    assert_same_outputs(both(), before)
    with attach(model, NoEncoding(), position_embeddings="keep"):
        torch.testing.assert_close(both(), before, rtol=0, atol=2e-6)
    torch.compiler.reset()


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_fixed_encoding_compiles_into_one_graph(name):
    model, ids = tiny(name).float(), tokens(2, N)
    with torch.no_grad(), attach(model, AttenuatedEncoding(decay=0.2)):
        expected = model(ids, use_cache=False)[0]
        output = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False)[0]
    torch.testing.assert_close(output, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_query_with_only_padding_in_its_window_gives_finite_outputs(implementation):
    model, ids = set_implementation(tiny("bert"), implementation), tokens(1, N)
    mask = (torch.arange(N) < 4).long()[None]
    with attach(model, FixedWindow(width=1)):
        output = hidden(model, ids, attention_mask=mask)
        alone = hidden(model, ids[:, :4])
    assert torch.isfinite(output).all()
    torch.testing.assert_close(output[:, :4], alone)


def test_layers_that_share_weights_share_one_encoding():
    model = tiny("albert")  # three layers in two groups
    with attach(model, [NoEncoding(), ALiBi(2)]) as attachment:
        assert [type(encoding) for encoding in attachment.encodings] == [NoEncoding, ALiBi]
    with pytest.raises(ValueError, match="a list of 2, one per layer that does not share its weights, got a list of 3"):
        attach(model, [NoEncoding()] * 3)


def test_each_layer_gets_a_copy_and_the_given_encoding_does_not_change():
    model, encoding = tiny("bert"), AttenuatedEncoding(learnable=True)
    attachment = attach(model, encoding)
    with torch.no_grad():
        attachment.encodings[0].log_decay.fill_(3.0)
    assert encoding.log_decay.dtype == torch.float32
    assert encoding.decay.item() == pytest.approx(0.5)
    assert attachment.encodings[1].decay.item() == pytest.approx(0.5)
    assert attached(model).encodings == attachment.encodings
    assert attached(model).position_embeddings == "disable"


def test_an_optimiser_changes_the_encoding_but_not_the_disabled_table():
    model = tiny("bert").train()
    table = model.embeddings.position_embeddings.weight
    before = table.detach().clone()
    attachment = attach(model, AttenuatedEncoding(learnable=True))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(tokens(2, N))[0].square().sum().backward()
    optimiser.step()
    assert torch.equal(table, before)
    assert (attachment.encodings[0].decay - 0.5).abs().item() > 1e-3


def test_the_handle_of_an_earlier_attachment_does_not_undo_a_later_one():
    model, ids = tiny("bert"), tokens(1, N)
    earlier = attach(model, ALiBi(2))
    earlier.remove()
    attach(model, normalised_over_keys())
    output = hidden(model, ids)
    earlier.remove()
    assert_same_outputs(hidden(model, ids), output)
    assert_same_outputs(hidden(copy.deepcopy(model), ids), output)


def replica(model):
    """Return the copy of a model that nn.DataParallel makes for another device, with weights twice as large."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, found in copies.items():
        found._modules = {name: copies.get(child) for name, child in module._modules.items()}
        found._parameters = {name: None if each is None else 2 * each for name, each in module._parameters.items()}
    return copies[model]


@pytest.mark.parametrize("name", ["bert", "deberta", "llama"])
def test_a_replica_for_another_device_runs_its_own_weights_with_the_bias(name):
    model, ids = tiny(name).requires_grad_(False), tokens(2, N)
    attach(model, normalised_over_keys(name))
    before, found = hidden(model, ids), hidden(replica(model), ids)
    assert_same_outputs(hidden(model, ids), before)
    other = tiny(name)
    for weight in other.parameters():
        weight.data *= 2
    with attach(other, normalised_over_keys(name)):
        assert_same_outputs(found, hidden(other, ids))


def test_attaching_to_an_encoder_decoder_model_changes_the_encoder():
    model = hf.T5ForConditionalGeneration(tiny("t5").config).eval()
    ids = tokens(1, N)
    before = model.decoder(ids).last_hidden_state
    with attach(model, normalised_over_keys()) as attachment:
        assert len(attachment.encodings) == 3
        assert_same_outputs(model.decoder(ids).last_hidden_state, before)
        with pytest.raises(ValueError, match="has an encoding attached already"):
            attach(model.encoder, normalised_over_keys())
        with attach(model.decoder, normalised_over_keys("t5 decoder")):
            assert not torch.allclose(model.decoder(ids).last_hidden_state, before, rtol=0, atol=1e-4)


def test_models_to_which_a_bias_cannot_be_added_exactly_are_refused():
    with pytest.raises(ValueError, match="convolution over neighbouring tokens"):
        attach(tiny(WITH_CONVOLUTION), NoEncoding())
    config = tiny("deberta").config
    config.relative_attention = False
    with pytest.raises(ValueError, match="relative_attention=False"):
        attach(hf.DebertaModel(config), NoEncoding())


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_implementations_that_would_ignore_the_bias_are_refused_before_and_after_attaching(implementation):
    model = tiny("bert")
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=f"'{implementation}' of BertModel does not support a bias"):
        attach(model, NoEncoding())
    model.config._attn_implementation = "sdpa"
    with attach(model, NoEncoding()):
        model.config._attn_implementation = implementation
        with pytest.raises(ValueError, match=f"'{implementation}' of BertModel does not support a bias"):
            hidden(model, tokens(1, N))


def test_the_repr_of_the_handle_shows_the_encodings_but_not_the_model():
    printed = repr(attach(tiny("bert"), ALiBi(2)))
    assert printed.startswith("Attachment(encodings=(ALiBi(heads=2")
    assert "BertLayer" not in printed
    assert len(printed.splitlines()) == 1


def test_errors_name_the_invalid_argument():
    model = tiny("bert")
    for wrong, error, message in [
        (3.0, TypeError, "encoding must be a pelocality Encoding"),
        ([NoEncoding(), "x", NoEncoding()], TypeError, "encoding must be a pelocality Encoding"),
        ([NoEncoding()] * 2, ValueError, "a list of 3"),
        (ALiBi(heads=3), ValueError, "1 or 2 heads, as the attention has, got 3"),
    ]:
        with pytest.raises(error, match=message):
            attach(model, wrong)
    with pytest.raises(ValueError, match="must be 'disable' or 'keep', got 'drop'"):
        attach(model, NoEncoding(), position_embeddings="drop")
    with pytest.raises(ValueError, match="example_inputs is for modules that read no token ids"):
        attach(SequenceModel(model), NoEncoding(), example_inputs=tokens(1, 4))
    with pytest.raises(ValueError, match=r"does: leave it out; .* pass SequenceModel\(model, inputs="):
        attach(model, NoEncoding(), example_inputs=tokens(1, 4))
    with pytest.raises(TypeError, match="transformers PreTrainedModel"):
        attach(nn.Linear(2, 2), NoEncoding())
    assert attached(model) is None


def test_an_error_while_attaching_restores_the_model(monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    model, ids = tiny("bert"), tokens(1, N)
    before, output = set(model.state_dict()), hidden(model, ids)
    monkeypatch.setattr(family, "disable_positions", fail)
    with pytest.raises(KeyboardInterrupt):
        attach(model, normalised_over_keys())
    assert attached(model) is None
    assert set(model.state_dict()) == before
    assert_same_outputs(hidden(model, ids), output)


OF_MODELS = (attachment, installing, positions, submodule, calls, _inference, _restore, saving)
OF_FAMILIES = (_calls, _keys, disentangled, relative)
ATTACHING = [module.__file__ for module in (*OF_MODELS, *OF_FAMILIES)]
INTERRUPTED = ["bert", "xlnet", "deberta-v2", "llama"]


def attributes_and_hooks(model):
    """Return the names of the attributes of every module, and the number of its hooks."""
    return [
        {
            name: len(value) if "hook" in name and isinstance(value, dict) else None
            for name, value in vars(module).items()
        }
        for module in model.modules()
    ]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_while_attaching_restores_the_model(name):
    model, handles = tiny(name), []
    before, hanging = state(model), attributes_and_hooks(model)

    def check(at):
        assert same(before, state(model)), at
        assert attributes_and_hooks(model) == hanging, at

    def prepare():
        while handles:
            handles.pop().remove()

    def call():
        handles.append(attach(model, normalised_over_keys(name)))

    call()  # what is set up once in a process is set up here
    assert every_interrupt(call, check, ATTACHING, prepare) > 60


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_interrupt_while_attaching_rotations_restores_the_model(name):
    model, handles = tiny(name), []
    rotation = RotaryEncoding.from_model(model) if name == "llama" else RotaryEncoding(4)
    before, hanging = state(model), attributes_and_hooks(model)

    def check(at):
        assert same(before, state(model)), at
        assert attributes_and_hooks(model) == hanging, at

    def prepare():
        while handles:
            handles.pop().remove()

    def call():
        handles.append(attach(model, rotation.scaled(0.5)))

    call()
    files = [each.__file__ for each in (attachment, installing, submodule, attention)]
    assert every_interrupt(call, check, files, prepare) > 60


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_inside_or_on_leaving_the_block_restores_the_model(name):
    model, entered, ids = tiny(name), [], tokens(1, 4)
    before, hanging = state(model), attributes_and_hooks(model)

    def leave():
        handle = entered.pop()
        hidden(model, ids)
        handle.__exit__(None, None, None)

    def check(at):
        assert same(before, state(model)), at
        assert attributes_and_hooks(model) == hanging, at

    def prepare():
        entered.append(attach(model, normalised_over_keys(name)).__enter__())

    assert every_interrupt(leave, check, ATTACHING, prepare) > 60


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_during_removal_removes_all_of_the_encodings_or_none(name):
    model = tiny(name)
    before, hanging = state(model), attributes_and_hooks(model)
    handle = attach(model, normalised_over_keys(name))
    complete = attributes_and_hooks(model)

    def prepare():
        nonlocal handle
        if attached(model) is None:
            handle = attach(model, normalised_over_keys(name))

    def check(at):
        if attached(model) is None:
            assert same(before, state(model)), at
            assert attributes_and_hooks(model) == hanging, at
        else:
            assert attributes_and_hooks(model) == complete, at

    assert every_interrupt(lambda: handle.remove(), check, ATTACHING, prepare) > 30


def test_an_encoding_of_absolute_positions_can_be_attached():
    """Not every encoding depends on distance alone: this one favours even keys."""

    class Even(Encoding):
        def __init__(self, heads=1, causal=False):
            super().__init__(heads, causal)

        def bias(self, query_length, key_length, mask):
            row = 3.0 * (torch.arange(key_length) % 2 == 0).to(self.working_dtype)
            return row.expand(1, query_length, key_length)

    model, ids = set_implementation(tiny("bert"), "eager"), tokens(1, N)
    before = attentions(model, ids)[0]
    with attach(model, Even(), position_embeddings="keep"):
        after = attentions(model, ids)[0]
    torch.testing.assert_close(after, (before.log() + Even().double()(N)).softmax(-1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_between_tokens_that_position_ids_skip_is_refused(family):
    model, text = language_model(family), tokens(1, 8)
    ids = torch.cat([text[:, :5], torch.zeros(1, 3, dtype=torch.long), text[:, 5:]], 1)
    mask = torch.ones_like(ids)
    mask[:, 5:8] = 0
    skipping, counting = (mask.cumsum(1) - 1).clamp(min=0), torch.arange(11)[None]
    with attach(model, ALiBi(model.config.num_attention_heads), position_embeddings="keep"):
        with pytest.raises(ValueError, match="attention_mask has padding between tokens that position_ids skip"):
            model(ids, attention_mask=mask, position_ids=skipping)
        model(ids, attention_mask=mask, position_ids=counting)
        padded, left = (torch.nn.functional.pad(each, (3, 0)) for each in (text, torch.ones_like(text)))
        places = (left.cumsum(1) - 1).clamp(min=0)
        on_the_left = model(padded, attention_mask=left, position_ids=places).logits[:, 3:]
        torch.testing.assert_close(on_the_left, model(text).logits, rtol=0, atol=1e-6)
    model(ids, attention_mask=mask, position_ids=skipping)


def test_a_learned_prompt_before_padding_on_the_left_is_refused():
    peft = pytest.importorskip("peft")
    model = language_model("gpt2").float()
    attach(model, ALiBi(2), position_embeddings="keep")
    prompted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    prompted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="a learned prompt or a cache before padding on the left"):
        prompted.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)


def test_a_block_that_is_entered_twice_is_refused_and_stays_as_it_is():
    model = tiny("bert").eval()
    with attach(model, ALiBi(2)) as attachment:
        with pytest.raises(ValueError, match="the block of this attachment was entered already"), attachment:
            pass
        assert attached(model) is not None
    assert attached(model) is None
    with pytest.raises(TypeError, match=r"disable must be a list of names, got 'p'"):
        attach(model, ALiBi(2), disable="p")
