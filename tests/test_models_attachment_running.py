"""Attached models under compilers and on other devices, interrupts, handles and refused arguments."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from pelocality import models
from pelocality.encodings import ALiBi, AttenuatedEncoding, CoPE, NoEncoding, RotaryEncoding
from pelocality.models import attached
from tests.families import assert_same_outputs, same, spread, state, tiny, tokens
from tests.test_models_attachment import (
    WITH_CONVOLUTION,
    attach,
    hidden,
    modules_of,
    normalised_over_keys,
    random_table,
    set_implementation,
)

N = 11
ENCODINGS = {  # for a llama with 4 heads of 4 dimensions that share 2 keys
    "bias by head": lambda: random_table(4).float(),
    "attenuated": lambda: AttenuatedEncoding(decay=0.1, scale=5.0),
    "rotation": lambda: RotaryEncoding(4, base=50.0),
    "rotation by head": lambda: RotaryEncoding(4, base=50.0).with_heads(2).scaled([0.5, 2.0]),
    "CoPE": lambda: spread(CoPE(4, positions=4, heads=4)).float(),
}


IN_STEPS = ("attenuated", "rotation")


def llama_of_one_layer():
    config = copy.deepcopy(tiny("llama").config)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return spread(hf.LlamaModel(config))


@pytest.fixture
def _compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.usefixtures("_compiled_anew")
@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "sdpa") for kind in ENCODINGS), *((kind, "eager") for kind in IN_STEPS)]
)
def test_a_compiled_model_of_one_graph_follows_attaching_and_removal(kind, way):
    model, ids = set_implementation(llama_of_one_layer().float(), way), tokens(2, N)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = hidden(compiled, ids, use_cache=False)
    assert_same_outputs(plain, hidden(model, ids, use_cache=False))
    with attach(compiled, ENCODINGS[kind]()):
        changed = hidden(compiled, ids, use_cache=False)
        torch.testing.assert_close(changed, hidden(model, ids, use_cache=False))
    assert not torch.allclose(changed, plain, rtol=0, atol=1e-3)
    assert_same_outputs(hidden(compiled, ids, use_cache=False), plain)


@pytest.mark.parametrize("kind", ["table", "attenuated", "rotation", "CoPE"])
def test_gradients_of_encodings_are_finite_differences(kind):
    encoding = {
        "table": random_table(2),
        "attenuated": AttenuatedEncoding(2, learnable=True, scale=3.0),
        "rotation": RotaryEncoding(8, base=5.0, learnable=True),
        "CoPE": spread(CoPE(8, positions=4, heads=2)),
    }[kind]
    model, ids = tiny("bert"), tokens(2, N)
    wanted = torch.randn(2, N, 16, generator=torch.Generator().manual_seed(0)).double()
    parameter = next(attach(model, encoding).encodings[1].parameters())
    (model(ids)[0] * wanted).sum().backward()
    place = torch.unravel_index(parameter.grad.abs().argmax(), parameter.shape)
    values, step = [], 1e-5
    with torch.no_grad():
        for change in (step, -2 * step):
            parameter[place] += change
            values.append((model(ids)[0] * wanted).sum().item())
    assert parameter.grad[place].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("kind", ENCODINGS)
def test_every_encoding_stays_near_float32_in_half_precision_and_autocast(kind):
    model, ids = tiny("llama").float(), tokens(2, N)
    mask = (torch.arange(N) < torch.tensor([[N], [7]])).long()
    with attach(model, ENCODINGS[kind]()):
        exact = hidden(model, ids, attention_mask=mask)
        with torch.autocast("cpu", torch.bfloat16):
            automatic = hidden(model, ids, attention_mask=mask)
        half = hidden(model.to(torch.bfloat16), ids, attention_mask=mask)
    assert half.dtype == torch.bfloat16
    for output in (automatic, half):
        assert (output.float() - exact)[mask.bool()].abs().mean() < 0.1 * exact[mask.bool()].std()


# ---- other devices


def replica(model):
    """Return the copy of a model that nn.DataParallel makes for another device, with weights twice as large."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, found in copies.items():
        found._modules = {name: copies.get(child) for name, child in module._modules.items()}
        found._parameters = {name: None if each is None else 2 * each for name, each in module._parameters.items()}
    return copies[model]


@pytest.mark.parametrize("name", ["bert", "deberta", "llama"])
def test_a_replica_for_another_device_runs_its_own_weights_with_the_encoding(name):
    encoding = ENCODINGS["rotation by head"]() if name == "llama" else normalised_over_keys(name)
    model, ids = tiny(name).requires_grad_(False), tokens(2, N)
    attach(model, encoding)
    before, found = hidden(model, ids), hidden(replica(model), ids)
    assert_same_outputs(hidden(model, ids), before)
    other = tiny(name)
    for weight in other.parameters():
        weight.data *= 2
    with attach(other, encoding):
        assert_same_outputs(found, hidden(other, ids))


# ---- interrupts


@pytest.mark.parametrize("name", ["xlnet", "llama"])
def test_an_interrupt_at_any_call_while_attaching_restores_the_model(name):
    """XLNet freezes weights and replaces methods, and llama is rotated."""
    model = llama_of_one_layer() if name == "llama" else tiny(name)
    encoding = RotaryEncoding(4, base=50.0) if name == "llama" else normalised_over_keys(name)
    attach(model, encoding).remove()  # what is set up once in a process is set up here
    calls, at, interrupted = 0, 0, True

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls > at:
            raise KeyboardInterrupt

    handles = [module.register_forward_hook(interrupt) for module in model.modules() if next(module.children(), None)]
    before = state(model), attributes_and_hooks(model)
    while interrupted:
        calls, at, interrupted = 0, at + 1, False
        try:
            attach(model, encoding)
        except KeyboardInterrupt:
            interrupted = True
            assert attached(model) is None, at
            assert same(before[0], state(model)), at
            assert attributes_and_hooks(model) == before[1], at
            assert not _get_current_function_mode_stack(), at
            assert torch.is_grad_enabled(), at
    assert at > 8
    for handle in handles:
        handle.remove()
    ids = tokens(1, 4)
    model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), attached(model):
        hidden(model, ids)
    assert attached(model) is None


def attributes_and_hooks(model):
    """Return the names of the attributes of every module, and the number of its hooks."""
    return [
        {
            name: len(value) if "hook" in name and isinstance(value, dict) else None
            for name, value in vars(module).items()
        }
        for module in model.modules()
    ]


# ---- handles


def test_each_layer_gets_a_copy_and_layers_that_share_weights_share_one():
    model, encoding = tiny("bert"), AttenuatedEncoding(learnable=True)
    handle = attach(model, encoding)
    with torch.no_grad():
        handle.encodings[0].log_decay.fill_(3.0)
    assert encoding.log_decay.dtype == torch.float32
    assert [encoding.decay.item(), handle.encodings[1].decay.item()] == pytest.approx([0.5, 0.5])
    assert attached(model).encodings == handle.encodings
    assert attached(model).position_embeddings == "disable"
    printed = repr(handle)
    assert printed.startswith("Attachment(")
    assert printed.count("AttenuatedEncoding(heads=1") == 2  # one was changed above
    assert "BertLayer" not in printed
    albert = tiny("albert")  # three layers in two groups
    with attach(albert, [NoEncoding(), ALiBi(2)]) as handle:
        assert [type(each) for each in handle.encodings] == [NoEncoding, ALiBi]
    with pytest.raises(ValueError, match="a list of 2, one per layer that does not share its weights, got a list of 3"):
        attach(albert, [NoEncoding()] * 3)


def test_the_handle_of_an_earlier_attachment_does_not_undo_a_later_one():
    model, ids = tiny("bert"), tokens(1, N)
    earlier = attach(model, ALiBi(2))
    with earlier:
        assert attached(model) is not None
    for others in (False, True):
        if others:
            attach(model, normalised_over_keys())
        with pytest.raises(ValueError, match="encodings of this attachment were removed; call attach again"), earlier:
            pass
    output = hidden(model, ids)
    earlier.remove()
    assert_same_outputs(hidden(model, ids), output)
    assert_same_outputs(hidden(copy.deepcopy(model), ids), output)


def test_an_inner_block_of_a_handle_leaves_the_encodings_to_the_outer_one():
    model, ids = tiny("bert"), tokens(1, N)
    before = hidden(model, ids)
    with attach(model, ALiBi(2)) as outer:
        encoded = hidden(model, ids)
        with pytest.raises(KeyError), outer:
            raise KeyError
        with outer as inner:
            assert inner is outer
        assert_same_outputs(hidden(model, ids), encoded)
    assert attached(model) is None
    assert_same_outputs(hidden(model, ids), before)


def test_encodings_attached_in_inference_mode_are_trained():
    model, ids = tiny("bert"), tokens(2, N)
    with torch.inference_mode():
        encoding = AttenuatedEncoding(decay=0.3, form="logits", learnable=("decay",))
        (first, *_) = attach(model, encoding).encodings
    model(ids).last_hidden_state.square().sum().backward()
    assert first.log_decay.grad.any()


@pytest.mark.parametrize("name", ["bert", "gpt2", "xlnet"])
def test_hooks_of_the_user_find_the_arguments_where_they_were_given(name):
    model, ids, found = tiny(name), tokens(2, 6), []
    modules_of(model)[0].register_forward_hook(lambda module, args, output: found.append(args))
    model(ids)
    with models.attach(model, AttenuatedEncoding(1, 0.3)):
        model(ids)
    plain, changed = found[0], found[-1]
    assert len(plain) == len(changed) > 0
    assert plain[0].shape == changed[0].shape


def test_attaching_to_an_encoder_decoder_model_changes_the_encoder():
    model, ids = hf.T5ForConditionalGeneration(tiny("t5").config).eval(), tokens(1, N)
    before = model.decoder(ids).last_hidden_state
    with attach(model, normalised_over_keys()) as handle:
        assert len(handle.encodings) == 3
        assert_same_outputs(model.decoder(ids).last_hidden_state, before)
        with pytest.raises(ValueError, match="has an encoding attached already"):
            attach(model.encoder, normalised_over_keys())
        with attach(model.decoder, normalised_over_keys("t5 decoder")):
            assert not torch.allclose(model.decoder(ids).last_hidden_state, before, rtol=0, atol=1e-4)


# ---- refusals


def test_errors_name_the_invalid_argument():
    model, no = tiny("bert"), NoEncoding()
    for given, encoding, options, error, message in [
        (model, 3.0, {}, TypeError, "encoding must be a pelocality Encoding"),
        (model, [no, "x", no], {}, TypeError, "encoding must be a pelocality Encoding"),
        (model, [no] * 2, {}, ValueError, "a list of 3"),
        (model, ALiBi(heads=3), {}, ValueError, "1 or 2 heads, as the attention has, got 3"),
        (model, no, {"position_embeddings": "drop"}, ValueError, "must be 'disable' or 'keep', got 'drop'"),
        (model, no, {"disable": "p"}, ValueError, "disable is for modules"),
        (nn.Linear(2, 2), no, {}, TypeError, "transformers PreTrainedModel"),
        (tiny(WITH_CONVOLUTION), no, {}, ValueError, "convolution over neighbouring tokens"),
    ]:
        with pytest.raises(error, match=message):
            attach(given, encoding, **options)
    assert attached(model) is None


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_implementations_that_would_ignore_the_bias_are_refused_before_and_after_attaching(implementation):
    model, message = tiny("bert"), f"'{implementation}' does not support a bias"
    set_implementation(model, implementation)
    with pytest.raises(ValueError, match=message):
        attach(model, NoEncoding())
    set_implementation(model, "sdpa")
    with attach(model, NoEncoding()):
        set_implementation(model, implementation)
        with pytest.raises(ValueError, match=message):
            hidden(model, tokens(1, N))
