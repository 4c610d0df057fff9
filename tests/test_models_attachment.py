"""Encodings attached to models of every family, in float64."""

import copy
import functools
import pickle

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import models
from pelocality.encodings import ALiBi, AttenuatedEncoding, DistanceTable, NoEncoding
from pelocality.models import attached
from pelocality.models.logits.terms import captured_inputs
from pelocality.models.sequence_model import SequenceModel
from tests.families import EVERY, FAMILIES, assert_same_outputs, base_of, family_of, same, state, tiny, tokens

N = 11
attach = functools.partial(models.attach, prove=False)  # the proof has tests of its own


def is_causal(name):
    model = tiny(name)
    record = family_of(model)
    return record.causal(base_of(model))


ATTACHABLE = list(EVERY)
WITH_CONVOLUTION = "deberta-v2 with shared projections"  # depends on order through a convolution as well
DISABLEABLE = [name for name in ATTACHABLE if name != WITH_CONVOLUTION]
CAUSAL = [name for name in ATTACHABLE if is_causal(name)]
CHECKPOINTED = [name for name in ATTACHABLE if name in FAMILIES and tiny(name).supports_gradient_checkpointing]
WITH_SDPA = [name for name in ATTACHABLE if not name.startswith(("mpnet", "xlnet", "deberta", "bloom"))]


def with_implementations(names):
    """Return each name with every attention implementation of its family."""
    return [(name, way) for name in names for way in (["eager", "sdpa"] if name in WITH_SDPA else ["eager"])]


def modules_of(model):
    return list(dict.fromkeys(family_of(model).attention_layers(base_of(model))))


def set_implementation(model, implementation):
    for module in model.modules():
        if isinstance(module, hf.PreTrainedModel):
            module.config._attn_implementation = implementation
    return model


def attentions(model, ids, **more):
    with torch.no_grad():
        return base_of(model)(ids, output_attentions=True, **more).attentions


def hidden(model, ids, **more):
    with torch.no_grad():
        return base_of(model)(ids, **more)[0]


def random_table(heads, seed=0):
    """Return a signed table of random numbers, without a symmetry that would hide a wrong formula."""
    table = DistanceTable(heads, length=7, signed=True).double()
    with torch.no_grad():
        table.values.copy_(torch.randn(table.values.shape, generator=torch.Generator().manual_seed(seed)))
    return table


def normalised_over_keys(name="bert", *, learnable=False, **more):
    """Return the published form, whose bias depends on the mask, with a scale that has a visible effect."""
    if name in CAUSAL:
        return AttenuatedEncoding(decay=0.1, scale=5.0, learnable=["decay"] if learnable else False, **more)
    return AttenuatedEncoding(decay=0.1, symmetry=0.4, scale=5.0, learnable=learnable, **more)


@pytest.mark.parametrize(
    "encoding",
    [lambda heads, name: random_table(heads), lambda heads, name: normalised_over_keys(name, heads=heads).double()],
    ids=["table", "delta"],
)
@pytest.mark.parametrize("name", ATTACHABLE)
def test_attention_is_the_softmax_of_the_log_of_the_former_attention_plus_the_bias(name, encoding):
    model = set_implementation(tiny(name), "eager")
    record, base, modules = family_of(model), base_of(model), modules_of(model)
    encoding = encoding(base.config.num_attention_heads, name)
    ids = tokens(2, N)
    before = attentions(model, ids)
    for index, module in enumerate(modules):
        layer = record.attention_layers(base).index(module)  # the first with this module, whose input stays
        others = [NoEncoding() for _ in modules]
        others[index] = encoding
        with attach(model, others, position_embeddings="keep"):
            after = attentions(model, ids)[layer]
        visible = record.visible(base, module, N)
        bias = encoding(N, mask=visible[None]).detach()
        expected = (before[layer].log() + bias).softmax(-1)
        torch.testing.assert_close(after, expected, rtol=0, atol=3e-7)  # some families pass through float32
        assert (after - before[layer]).abs().max() > 1e-2


@pytest.mark.parametrize("name", DISABLEABLE)
def test_disabled_positions_have_no_effect(name):
    """With one word repeated, every visible key gets the same attention in every layer."""
    model = set_implementation(tiny(name), "eager")
    record, base = family_of(model), base_of(model)
    ids = torch.full((1, N), 17)
    with attach(model, NoEncoding()):
        maps = attentions(model, ids)
    for module, weights in zip(record.attention_layers(base), maps, strict=True):
        visible = record.visible(base, module, N).double()
        expected = (visible / visible.sum(-1, keepdim=True)).expand_as(weights)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", DISABLEABLE)
def test_disabling_positions_does_not_change_the_content_term(name):
    """The logits that remain are those of queries and keys without positions."""
    model = set_implementation(tiny(name), "eager")
    record, base = family_of(model), base_of(model)
    module = modules_of(model)[0]
    with attach(model, NoEncoding()), captured_inputs(SequenceModel(model)) as seen:
        weights = attentions(model, tokens(2, N))[0]
    query, key = record.project(module, seen[0])
    if record.content_bias(module) is not None:
        query = query + record.content_bias(module)[:, None]
    logits = record.scaling(module) * query @ key.transpose(-1, -2)
    expected = logits.masked_fill(~record.visible(base, module, N), -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", WITH_SDPA)
def test_eager_and_sdpa_agree(name, padded):
    model, ids = tiny(name), tokens(2, N)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    outputs = []
    with attach(model, normalised_over_keys(name)):
        for implementation in ("eager", "sdpa"):
            set_implementation(model, implementation)
            outputs.append(hidden(model, ids, attention_mask=mask)[mask.bool()])
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "implementation"), with_implementations(name for name in DISABLEABLE if name != "xlnet one way")
)  # which transformers cannot run with a mask
def test_padding_does_not_change_the_output(name, side, implementation):
    model, ids = set_implementation(tiny(name), implementation), tokens(1, 7)
    padding = torch.full((1, 4), 5)
    padded = torch.cat([ids, padding] if side == "right" else [padding, ids], 1)
    present = slice(7) if side == "right" else slice(4, None)
    mask = torch.zeros_like(padded)
    mask[:, present] = 1
    with attach(model, normalised_over_keys(name)):
        alone, among = hidden(model, ids), hidden(model, padded, attention_mask=mask)[:, present]
    torch.testing.assert_close(among, alone, rtol=0, atol=3e-6)


@pytest.mark.parametrize("position_embeddings", ["disable", "keep"])
@pytest.mark.parametrize(("name", "implementation"), with_implementations(CAUSAL))
def test_later_tokens_do_not_change_earlier_outputs_of_causal_models(name, position_embeddings, implementation):
    model = set_implementation(tiny(name), implementation)
    ids = tokens(2, N)
    other = torch.cat([ids[:, :6], tokens(2, N + 3, seed=1)[:, 6:]], 1)
    with attach(model, normalised_over_keys(name), position_embeddings=position_embeddings):
        one, another = hidden(model, ids), hidden(model, other)
        torch.testing.assert_close(one[:, :6], another[:, :6], rtol=0, atol=2e-6)
        assert (one[:, 6:] - another[:, 6:N]).abs().max() > 1e-3


DECODERS = ["gpt2", "llama", "mistral", "qwen2", "bloom", "bert as decoder"]


@pytest.mark.parametrize("asked", ["config", "call"])
@pytest.mark.parametrize(("name", "implementation"), with_implementations(DECODERS))
def test_a_bidirectional_decoder_stays_bidirectional(name, implementation, asked):
    """``is_causal=False`` makes a decoder of transformers an encoder, in which a bias of zero must have no effect."""
    model, ids = set_implementation(tiny(name), implementation), tokens(2, N)
    more = {"use_cache": False}
    if asked == "call":
        more["is_causal"] = False
    else:
        model.config.is_causal = False
    before = hidden(model, ids, **more)
    with attach(model, NoEncoding(), position_embeddings="keep"):
        torch.testing.assert_close(hidden(model, ids, **more), before, rtol=0, atol=2e-6)
    if asked == "config":
        table = random_table(model.config.num_attention_heads)
        maps = attentions(set_implementation(model, "eager"), ids, **more)[0]
        assert torch.equal(maps.amin((0, 1)) > 0, family_of(model).visible(model, modules_of(model)[0], N))
        with attach(model, table, position_embeddings="keep"):
            after = attentions(model, ids, **more)[0]
        torch.testing.assert_close(after, (maps.log() + table(N).detach()).softmax(-1), rtol=0, atol=3e-7)


@pytest.mark.parametrize("least", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize(("name", "implementation"), with_implementations(["bert", "llama"]))
def test_a_float_mask_gives_the_output_of_the_boolean_one(name, implementation, least):
    model, ids = set_implementation(tiny(name), implementation), tokens(2, N)
    visible = (torch.arange(N) < torch.tensor([[N], [7]]))[:, None, None].expand(2, 1, N, N)
    if name == "llama":
        visible = visible & torch.ones(N, N, dtype=torch.bool).tril()
    added = torch.zeros(visible.shape).double().masked_fill(~visible, least)
    with attach(model, normalised_over_keys(name)):
        expected, output = (hidden(model, ids, attention_mask=mask)[:, :7] for mask in (visible, added))
        torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
        with pytest.raises(TypeError, match=r"must be boolean.* got torch\.int64; pass attention_mask\.bool\(\)"):
            hidden(model, ids, attention_mask=visible.long())


@pytest.mark.parametrize("least", [-1e3, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("name", "implementation"), with_implementations(["bert", "llama"]))
def test_a_hidden_key_stays_hidden_whatever_the_bias(name, implementation, least):
    """The visible keys are so distant that their bias is below the number that hides the nearer ones."""
    model, ids = set_implementation(tiny(name), implementation), tokens(1, N)
    distance = torch.arange(N)[:, None] - torch.arange(N)
    visible = (distance > 3 if name == "llama" else distance.abs() > 3)[None, None]
    visible[..., :4, 0] = True  # what a query does that sees no key depends on the kind of mask
    added = torch.zeros(visible.shape).double().masked_fill(~visible, least)
    with attach(model, ALiBi(base_of(model).config.num_attention_heads, slopes=9e3)):
        expected, output = (hidden(model, ids, attention_mask=mask) for mask in (visible, added))
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ATTACHABLE)
def test_attention_weights_are_returned_or_refused(name):
    model = tiny(name)
    with attach(model, NoEncoding(), position_embeddings="keep"):
        if name in WITH_SDPA:
            set_implementation(model, "sdpa")
            with pytest.raises(ValueError, match="set_attn_implementation"):
                attentions(model, tokens(1, N))
            with pytest.raises(ValueError, match="set_attn_implementation"):
                model(tokens(1, N), output_attentions=True)
            set_implementation(model, "eager")
        maps = attentions(model, tokens(1, N))
    assert len(maps) == len(family_of(model).attention_layers(base_of(model)))
    for weights in maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ATTACHABLE)
def test_learnable_parameters_get_gradients(name):
    model = tiny(name)
    learnable = AttenuatedEncoding(learnable=["decay", "scale"], scale=3.0)
    attachment = attach(model, learnable, position_embeddings="keep")
    (base_of(model)(tokens(2, N))[0] * torch.randn(16 if name != "bloom" else 18).double()).sum().backward()
    for encoding in attachment.encodings:
        gradients = [parameter.grad for parameter in encoding.parameters()]
        assert len(gradients) == 2
        assert all(gradient is not None and (gradient != 0).all() for gradient in gradients)
    assert {id(parameter) for encoding in attachment.encodings for parameter in encoding.parameters()} <= {
        id(parameter) for parameter in model.parameters()
    }
    assert all(parameter.grad is None for parameter in learnable.parameters())


@pytest.mark.parametrize("name", DISABLEABLE)
def test_half_precision_and_autocast_stay_near_float32(name):
    model, ids = tiny(name).float(), tokens(2, N)
    more = {} if name == "xlnet one way" else {"attention_mask": (torch.arange(N) < torch.tensor([[N], [7]])).long()}
    with attach(model, normalised_over_keys(name, learnable=True)):
        exact = hidden(model, ids, **more)
        with torch.autocast("cpu", torch.bfloat16):
            automatic = hidden(model, ids, **more)
        model.to(torch.bfloat16)
        half = hidden(model, ids, **more)
    assert half.dtype == torch.bfloat16
    present = more.get("attention_mask", torch.ones_like(ids)).bool()
    spread = exact[present].std()
    for output in (automatic, half):
        assert (output.float() - exact)[present].abs().mean() < 0.1 * spread


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["bert", "deberta", "t5", "xlnet"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_that_rises_with_distance_is_exact_among_padding_in_half_precision(dtype, name, side):
    """The nearest key has the lowest bias, so the padding beyond the last token would have the highest."""
    if name == "xlnet" and dtype == torch.float16:
        pytest.skip("XLNet takes does not support a bias in float16")
    model, length = set_implementation(tiny(name), "eager"), 512
    for parameter in (each for module in modules_of(model) for each in module.parameters()):
        nn.init.zeros_(parameter)  # attention is the softmax of the bias alone
    present = slice(400) if side == "right" else slice(112, None)
    mask = torch.zeros(1, length, dtype=torch.long)
    mask[:, present] = 1
    rising = AttenuatedEncoding(decay=1.0, scale=-1.0, form="logits")
    with attach(model.to(dtype), rising):
        weights = attentions(model, tokens(1, length), attention_mask=mask)[0][0, :, present, present].double()
    expected = rising.double()(length)[:, present, present].softmax(-1).expand_as(weights)
    torch.testing.assert_close(weights, expected, rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_changes_no_gradient(name, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny(name)
        attachment = attach(model, normalised_over_keys(name, learnable=True))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.train()
        torch.manual_seed(0)
        base_of(model)(tokens(2, N))[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in attachment.encodings[0].parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ATTACHABLE)
def test_removing_from_a_copy_does_not_change_the_original(name):
    model, ids = tiny(name), tokens(1, N)
    before = hidden(model, ids)
    attach(model, normalised_over_keys(name), position_embeddings="keep")
    changed = hidden(model, ids)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_outputs(hidden(clone, ids), changed)
        attached(clone).remove()
        assert_same_outputs(hidden(clone, ids), before)
        assert_same_outputs(hidden(model, ids), changed)
    again = copy.deepcopy(model)
    attached(model).remove()
    assert_same_outputs(hidden(again, ids), changed)


def hooks(model):
    return [
        (name, list(found))
        for name, module in model.named_modules()
        for found in (module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    ] + [sorted(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("position_embeddings", ["disable", "keep"])
@pytest.mark.parametrize("name", DISABLEABLE)
def test_removal_restores_every_weight_exactly_and_the_outputs(name, position_embeddings):
    model, ids = tiny(name).train(), tokens(2, N)
    model.eval()
    output, before, registered = hidden(model, ids), state(model), hooks(model)
    attachment = attach(model, normalised_over_keys(name, learnable=True), position_embeddings=position_embeddings)
    assert not torch.allclose(hidden(model, ids), output, rtol=0, atol=2e-6)
    attachment.remove()
    attachment.remove()
    assert same(before, state(model))
    assert hooks(model) == registered
    assert_same_outputs(hidden(model, ids), output)


@pytest.mark.parametrize("name", DISABLEABLE)
def test_an_error_inside_the_block_restores_the_model(name):
    model, ids = tiny(name), tokens(2, N)
    output, before, registered = hidden(model, ids), state(model), hooks(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = modules_of(model)[-1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), attach(model, normalised_over_keys(name)):
        hidden(model, ids)
    handle.remove()
    assert same(before, state(model))
    assert hooks(model) == registered
    assert_same_outputs(hidden(model, ids), output)


def test_an_attachment_that_was_removed_cannot_be_entered_again():
    model = tiny("bert")
    attachment = attach(model, NoEncoding())
    with attachment:
        pass
    for others in (0, 1):
        if others:
            attach(model, ALiBi(2))
        with (
            pytest.raises(ValueError, match="encodings of this attachment were removed; call attach again"),
            attachment,
        ):
            pass


def test_encodings_attached_in_inference_mode_are_trained():
    model, ids = tiny("bert"), tokens(2, N)
    with torch.inference_mode():
        encoding = AttenuatedEncoding(decay=0.3, form="logits", learnable=("decay",))
        (attached, *_) = attach(model, encoding).encodings
    model(ids).last_hidden_state.square().sum().backward()
    assert attached.log_decay.grad.any()


@pytest.mark.parametrize("name", DISABLEABLE)
def test_models_with_disabled_positions_run_at_four_times_their_length(name):
    model = tiny(name)
    length = 4 * 42
    ids = tokens(1, length)
    with attach(model, normalised_over_keys(name)):
        output = hidden(model, ids)
        assert output.shape[1] == length
        assert torch.isfinite(output).all()
        if family_of(model).max_length(base_of(model)) is not None:
            embedded = hidden(model, None, inputs_embeds=base_of(model).get_input_embeddings()(ids))
            torch.testing.assert_close(embedded, output)


@pytest.mark.parametrize("name", ATTACHABLE)
def test_attaching_to_one_model_does_not_change_another_of_the_same_configuration(name):
    one = tiny(name)
    two = type(one)(one.config).double().eval()
    two.load_state_dict(one.state_dict())
    before, described = hidden(two, tokens(1, N)), two.config.to_dict()
    attach(one, normalised_over_keys(name), position_embeddings="keep")
    assert attached(two) is None
    assert_same_outputs(hidden(two, tokens(1, N)), before)
    assert two.config.to_dict() == described


@pytest.mark.parametrize("name", ["bert", "gpt2", "xlnet"])
def test_hooks_of_the_user_find_the_arguments_where_they_were_given(name):
    model, ids, found = tiny(name), tokens(2, 6), []
    attention = modules_of(model)[0]
    attention.register_forward_hook(lambda module, args, output: found.append(args))
    model(ids)
    with models.attach(model, AttenuatedEncoding(1, 0.3)):
        model(ids)
    plain, attached = found[0], found[-1]
    assert len(plain) == len(attached) > 0
    assert plain[0].shape == attached[0].shape


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
def test_a_model_without_attention_is_not_said_to_have_other_heads(name):
    config = getattr(hf, f"{name}Config")(vocab_size=97, hidden_size=8, num_hidden_layers=1)
    model = hf.AutoModel.from_config(config).eval()
    with pytest.raises(ValueError, match="MambaMixer, which computes no attention that torch shows"):
        models.attach(model, AttenuatedEncoding(heads=2, decay=0.2))
