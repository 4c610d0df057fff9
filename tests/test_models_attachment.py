"""Encodings attached to models of every family, in float64."""

import copy
import functools
import pickle

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import models
from pelocality.encodings import ALiBi, AttenuatedEncoding, DistanceTable, Encoding, FixedWindow, NoEncoding
from pelocality.models import attached
from pelocality.models.logits.terms import captured_inputs
from pelocality.models.sequence_model import SequenceModel
from tests.families import EVERY, FAMILIES, assert_same_outputs, base_of, family_of, same, state, tiny, tokens

N = 11
attach = functools.partial(models.attach, prove=False)  # the proof has tests of its own


def is_causal(name):
    model = tiny(name)
    return family_of(model).causal(base_of(model))


ATTACHABLE = list(EVERY)
WITH_CONVOLUTION = "deberta-v2 with shared projections"  # depends on order through a convolution as well
DISABLEABLE = [name for name in ATTACHABLE if name != WITH_CONVOLUTION]
CAUSAL = [name for name in ATTACHABLE if is_causal(name)]
CHECKPOINTED = [name for name in FAMILIES if tiny(name).supports_gradient_checkpointing]


def ways(name):
    """Return the attention implementations of a family."""
    return ["eager"] if name.startswith(("mpnet", "xlnet", "deberta", "bloom")) else ["eager", "sdpa"]


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


# ---- what an encoding does, and nothing else


@pytest.mark.parametrize("name", ATTACHABLE)
def test_attention_is_the_softmax_of_the_log_of_the_former_attention_plus_the_bias(name):
    model = set_implementation(tiny(name), "eager")
    record, base, modules = family_of(model), base_of(model), modules_of(model)
    encoding = normalised_over_keys(name, heads=base.config.num_attention_heads).double()
    ids = tokens(2, N)
    before = attentions(model, ids)
    for index, module in enumerate(modules):
        layer = record.attention_layers(base).index(module)  # the first with this module, whose input stays
        others = [NoEncoding() for _ in modules]
        others[index] = encoding
        with attach(model, others, position_embeddings="keep"):
            after = attentions(model, ids)
        assert len(after) == len(before)
        bias = encoding(N, mask=record.visible(base, module, N)[None]).detach()
        expected = (before[layer].log() + bias).softmax(-1)
        torch.testing.assert_close(after[layer], expected, rtol=0, atol=3e-7)  # some families pass through float32
        assert (after[layer] - before[layer]).abs().max() > 1e-2


@pytest.mark.parametrize("name", DISABLEABLE)
def test_the_logits_without_positions_are_those_of_queries_and_keys(name):
    """With one word repeated, every visible key then gets the same attention in every layer."""
    model = set_implementation(tiny(name), "eager")
    record, base, module = family_of(model), base_of(model), modules_of(model)[0]
    with attach(model, NoEncoding()):
        maps = attentions(model, torch.full((1, N), 17))
        with captured_inputs(SequenceModel(model)) as seen:
            weights = attentions(model, tokens(2, N))[0]
    for layer, repeated in zip(record.attention_layers(base), maps, strict=True):
        visible = record.visible(base, layer, N).double()
        expected = (visible / visible.sum(-1, keepdim=True)).expand_as(repeated)
        torch.testing.assert_close(repeated, expected, rtol=0, atol=1e-6)
    query, key = record.project(module, seen[0])
    if record.content_bias(module) is not None:
        query = query + record.content_bias(module)[:, None]
    logits = record.scaling(module) * query @ key.transpose(-1, -2)
    expected = logits.masked_fill(~record.visible(base, module, N), -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", DISABLEABLE)
def test_padding_and_the_implementation_of_attention_do_not_change_the_output(name):
    model, ids, padding = tiny(name), tokens(1, 7), torch.full((1, 4), 5)
    outputs = []
    with attach(model, normalised_over_keys(name)):
        for way in ways(name):
            set_implementation(model, way)
            outputs.append(hidden(model, ids))
            for side in ("right", "left") if name != "xlnet one way" else ():  # which transformers runs without a mask
                padded = torch.cat([ids, padding] if side == "right" else [padding, ids], 1)
                mask = (padded != 5).long()
                outputs.append(hidden(model, padded, attention_mask=mask)[mask.bool()][None])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_later_tokens_do_not_change_earlier_outputs_of_causal_models(name):
    model, ids = tiny(name), tokens(2, N)
    other = torch.cat([ids[:, :6], tokens(2, N + 3, seed=1)[:, 6:]], 1)
    for position_embeddings in ("disable", "keep"):
        with attach(model, normalised_over_keys(name), position_embeddings=position_embeddings):
            for way in ways(name):
                set_implementation(model, way)
                one, another = hidden(model, ids), hidden(model, other)
                torch.testing.assert_close(one[:, :6], another[:, :6], rtol=0, atol=2e-6)
                assert (one[:, 6:] - another[:, 6:N]).abs().max() > 1e-3


@pytest.mark.parametrize("name", DISABLEABLE)
def test_models_with_disabled_positions_run_at_four_times_their_length(name):
    model, ids = tiny(name), tokens(1, 4 * 42)
    with attach(model, normalised_over_keys(name)):
        output = hidden(model, ids)
        assert torch.isfinite(output).all()
        if family_of(model).max_length(base_of(model)) is not None:
            embedded = hidden(model, None, inputs_embeds=base_of(model).get_input_embeddings()(ids))
            torch.testing.assert_close(embedded, output)


# ---- masks


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert as decoder"])
def test_a_bidirectional_decoder_stays_bidirectional(name):
    """``is_causal=False`` makes a decoder of transformers an encoder, in which a bias of zero must have no effect."""
    model, ids, more = tiny(name), tokens(2, N), {"use_cache": False}
    heads = model.config.num_attention_heads
    for way in ways(name):
        set_implementation(model, way)
        for asked in ({"is_causal": False}, {}):  # in the call, and in the configuration
            model.config.is_causal = bool(asked)
            before = hidden(model, ids, **more, **asked)
            with attach(model, NoEncoding(), position_embeddings="keep"):
                torch.testing.assert_close(hidden(model, ids, **more, **asked), before, rtol=0, atol=2e-6)
    table, maps = random_table(heads), attentions(set_implementation(model, "eager"), ids, **more)[0]
    assert torch.equal(maps.amin((0, 1)) > 0, family_of(model).visible(model, modules_of(model)[0], N))
    with attach(model, table, position_embeddings="keep"):
        after = attentions(model, ids, **more)[0]
    torch.testing.assert_close(after, (maps.log() + table(N).detach()).softmax(-1), rtol=0, atol=3e-7)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_float_mask_gives_the_output_of_the_boolean_one_whatever_the_bias(name, way):
    """At last the visible keys are so distant that their bias is below the number that hides the nearer ones."""
    model, ids = set_implementation(tiny(name), way), tokens(2, N)
    near = (torch.arange(N) < torch.tensor([[N], [7]]))[:, None, None].expand(2, 1, N, N)
    distance = torch.arange(N)[:, None] - torch.arange(N)
    near, far = (near & (distance >= 0), distance > 3) if name == "llama" else (near, distance.abs() > 3)
    far = far.expand(2, 1, N, N).clone()
    far[..., :4, 0] = True  # what a query does that sees no key depends on the kind of mask
    steep = ALiBi(model.config.num_attention_heads, slopes=9e3)
    for encoding, visible, last in ((normalised_over_keys(name), near, 7), (steep, far, N)):
        with attach(model, encoding):
            expected = hidden(model, ids, attention_mask=visible)[:, :last]
            for least in (-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf if encoding is not steep else -1e3):
                added = torch.zeros(visible.shape).double().masked_fill(~visible, least)
                output = hidden(model, ids, attention_mask=added)[:, :last]
                torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
            with pytest.raises(TypeError, match=r"attention_mask.*pass attention_mask\.bool\(\)"):
                hidden(model, ids, attention_mask=visible.long())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_query_with_only_padding_in_its_window_gives_finite_outputs(implementation):
    model, ids = set_implementation(tiny("bert"), implementation), tokens(1, N)
    mask = (torch.arange(N) < 4).long()[None]
    floats = torch.zeros(1, 1, N, N, dtype=model.dtype).masked_fill(mask[:, None, None] == 0, -1e9)
    with attach(model, FixedWindow(width=1)):
        alone = hidden(model, ids[:, :4])
        for given in (mask, floats):
            output = hidden(model, ids, attention_mask=given)
            assert torch.isfinite(output).all()
            torch.testing.assert_close(output[:, :4], alone)


class Even(Encoding):
    """Favours even keys, and so depends on more than distance."""

    def __init__(self, heads=1, causal=False):
        super().__init__(heads, causal)

    def bias(self, query_length, key_length, mask):
        row = 3.0 * (torch.arange(key_length) % 2 == 0).to(self.working_dtype)
        return row.expand(1, query_length, key_length)


def test_an_encoding_of_absolute_positions_can_be_attached():
    model, ids = set_implementation(tiny("bert"), "eager"), tokens(1, N)
    before = attentions(model, ids)[0]
    with attach(model, Even(), position_embeddings="keep"):
        after = attentions(model, ids)[0]
    torch.testing.assert_close(after, (before.log() + Even().double()(N)).softmax(-1))


def test_attention_weights_are_refused_where_the_kernel_returns_none():
    model, ids = hf.BertForMaskedLM(tiny("bert").config).eval(), tokens(1, N)
    model.set_attn_implementation("sdpa")
    before = model(ids).logits
    attach(model, normalised_over_keys())
    for asked in (model, model.bert):
        with pytest.raises(ValueError, match="set_attn_implementation"):
            asked(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    assert all(weights.shape == (1, 2, N, N) for weights in model(ids, output_attentions=True).attentions)
    attached(model.bert).remove()  # through a part of the model
    model.set_attn_implementation("sdpa")
    assert_same_outputs(model(ids).logits, before)
    model(ids, output_attentions=True)


# ---- precision and gradients


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
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bert", torch.bfloat16), ("deberta", torch.float16), ("t5", torch.float16), ("xlnet", torch.bfloat16)],
)
def test_a_bias_that_rises_with_distance_is_exact_among_padding_in_half_precision(dtype, name, side):
    """The nearest key has the lowest bias, so the padding beyond the last token would have the highest."""
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


@pytest.mark.parametrize("name", ATTACHABLE)
def test_learnable_parameters_get_gradients_also_through_gradient_checkpointing(name):
    model, learnable = tiny(name), AttenuatedEncoding(learnable=["decay", "scale"], scale=3.0)
    positions, gradients = "keep" if name == WITH_CONVOLUTION else "disable", []
    attachment = attach(model, learnable, position_embeddings=positions)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = torch.randn(16 if name != "bloom" else 18, generator=torch.Generator().manual_seed(0)).double()
    ways_of_checkpointing = [None, {"use_reentrant": False}, {"use_reentrant": True}]
    for options in ways_of_checkpointing if name in CHECKPOINTED else [None]:
        if options is not None:
            model.gradient_checkpointing_enable(options)
            model.enable_input_require_grads()
        torch.manual_seed(0)
        model.train().zero_grad()
        (base_of(model)(tokens(2, N))[0] * wanted).sum().backward()
        parameters = [parameter for encoding in attachment.encodings for parameter in encoding.parameters()]
        gradients.append([parameter.grad.clone() for parameter in parameters])
        torch.testing.assert_close(gradients[-1], gradients[0], rtol=1e-5, atol=1e-7)
    assert len(parameters) == 2 * len(attachment.encodings)
    assert all((gradient != 0).all() for gradient in gradients[0])
    assert {id(parameter) for parameter in parameters} <= {id(parameter) for parameter in model.parameters()}
    assert all(parameter.grad is None for parameter in learnable.parameters())


# ---- removal, copies and other models


def hooks(model):
    """Return the hooks and the names of the attributes of every module."""
    return [
        (name, list(found))
        for name, module in model.named_modules()
        for found in (module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    ] + [sorted(module.__dict__) for module in model.modules()]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ATTACHABLE)
def test_removal_or_an_error_restores_every_weight_exactly_and_touches_no_copy(name):
    model, ids = tiny(name), tokens(2, N)
    other = type(model)(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    plain, before, registered = hidden(model, ids), state(model), hooks(model)

    def check():
        assert same(before, state(model))
        assert hooks(model) == registered
        assert_same_outputs(hidden(model, ids), plain)

    for positions in ("keep", "disable")[: 1 if name == WITH_CONVOLUTION else 2]:
        options = {"encoding": normalised_over_keys(name, learnable=True), "position_embeddings": positions}
        attachment = attach(model, **options)
        changed = hidden(model, ids)
        assert not torch.allclose(changed, plain, rtol=0, atol=2e-6)
        assert attached(other) is None
        assert_same_outputs(hidden(other, ids), plain)
        clone = copy.deepcopy(model) if positions == "keep" else pickle.loads(pickle.dumps(model))
        assert_same_outputs(hidden(clone, ids), changed)
        attached(clone).remove()
        assert_same_outputs(hidden(clone, ids), plain)
        assert_same_outputs(hidden(model, ids), changed)
        clone = copy.deepcopy(model)
        attachment.remove()
        attachment.remove()
        check()
        assert_same_outputs(hidden(clone, ids), changed)
        handle = modules_of(model)[-1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), attach(model, **options):
            hidden(model, ids)
        handle.remove()
        check()
