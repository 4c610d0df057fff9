"""attach with rotary encodings, against the model's buffers and against rotations by complex numbers."""

import copy
import itertools
import pickle

import pytest
import torch
import transformers as hf
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama

from pelocality.encodings import AttenuatedEncoding, CoPE, NoEncoding, RotaryEncoding
from pelocality.metrics import past_locality
from pelocality.models import (
    attach,
    attached,
    audit,
    decompose,
    load,
    positional_attention,
    positional_logits,
    rotary_from_targets,
    text_average,
)

from tests.families import (
    add_adapter,
    assert_same_outputs,
    base_of,
    eagerly,
    family_of,
    same,
    small,
    spread,
    state,
    tiny,
    tokens,
)

N = 9
GPTJ = hf.GPTJConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def llama(layers=3, **more):
    torch.manual_seed(0)
    config = small(hf.LlamaConfig, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **more)
    return spread(hf.LlamaForCausalLM(config).eval())


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.fixture
def model():
    return llama()


# ---- exactness


@pytest.mark.parametrize("heads", [1, 2])
def test_the_models_own_rotation_gives_its_own_outputs(model, heads):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    before = logits(model, ids)
    with attach(model, own.with_heads(heads)):
        found = logits(model, ids)
    assert torch.equal(found, before) if heads == 1 else torch.allclose(found, before, atol=1e-6)


def test_bands_that_are_stopped_are_frequencies_of_zero(model):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    with attach(model, own.without(slowest=0.5)):
        found = logits(model, ids)
    buffer = model.model.rotary_emb.inv_freq
    buffer[len(buffer) // 2 :] = 0
    assert torch.equal(found, logits(model, ids))


def by_complex_numbers(frequencies):
    """Return a function in the place of transformers' rotation: with w[layer][head of keys], layer after layer."""
    layers = itertools.count()

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        w = frequencies[next(layers) % len(frequencies)]
        turned = []
        for states in (q, k):
            half = states.shape[-1] // 2
            own = w.repeat_interleave(states.shape[1] // len(w), 0).double()  # (head, band)
            angle = torch.arange(states.shape[2], dtype=torch.float64)[:, None] * own[:, None]
            z = torch.complex(states[..., :half].double(), states[..., half:].double()) * torch.exp(1j * angle)
            turned.append(torch.cat([z.real, z.imag], -1).to(states))
        return turned

    return rotate


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_layers_and_heads_rotate_by_their_own_frequencies(model, implementation, monkeypatch):
    model.set_attn_implementation(implementation)
    ids, own = tokens(2, N), RotaryEncoding.from_model(model).with_heads(2)
    plain = logits(model, ids)
    encodings = [own.scaled([0.3, 1.7]), own.rebased(50.0), own.without(bands=[0]).scaled([2.0, 0.0])]
    with attach(model, encodings) as attachment:
        found = logits(model, ids)
        frequencies = [each.frequencies for each in attachment.encodings]
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", by_complex_numbers(frequencies))
    expected = logits(model, ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3


def test_layers_that_are_not_named_keep_their_rotation(model):
    ids, own = tokens(2, N), RotaryEncoding.from_model(model)
    with attach(model, [own, own.scaled(0.5), own]):
        expected = logits(model, ids)
    with attach(model, own.scaled(0.5), layers=[1]) as attachment:
        assert len(attachment.encodings) == 1
        assert torch.equal(logits(model, ids), expected)


def test_padding_and_a_cache_change_nothing(model):
    encoding = RotaryEncoding.from_model(model).with_heads(2).scaled([0.5, 2.0])
    attach(model, encoding)
    ids = tokens(1, N)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(N + 3) >= 3).long()[None]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    alone, behind, uncached = (
        model.generate(given, attention_mask=seen, return_dict_in_generate=True, use_cache=cache, **options)
        for given, seen, cache in (
            (ids, torch.ones_like(ids), True),
            (padded, mask, True),
            (ids, torch.ones_like(ids), False),
        )
    )
    for other in (behind, uncached):
        torch.testing.assert_close(torch.stack(other.logits), torch.stack(alone.logits), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (hf.ModernBertConfig, {"pad_token_id": 0}),
        (hf.Gemma3TextConfig, GROUPED | {"num_hidden_layers": 6}),
        (hf.Qwen3Config, GROUPED),
        (hf.GPTNeoXConfig, {"hidden_size": 64, "rotary_pct": 0.5}),
        (hf.PhiConfig, {"hidden_size": 64}),
        (hf.CohereConfig, {}),
        (hf.Llama4TextConfig, GROUPED | {"num_hidden_layers": 4, "num_local_experts": 2}),
        (hf.EsmConfig, {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 4}),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_families_with_other_pairs_and_types_of_layers(config, sizes):
    model = spread(hf.AutoModel.from_config(small(config, **sizes)).eval())
    before, ids = state(model), tokens(2, N)
    dims = {2 * len(b) for n, b in model.named_buffers() if n.endswith("inv_freq")}
    encoding = RotaryEncoding(dims.pop(), base=300.0)
    with torch.no_grad():
        plain = model(ids)[0]
        with attach(model, encoding):
            changed = model(ids)[0]
        assert not torch.equal(changed, plain)
        assert torch.equal(model(ids)[0], plain)
    assert same(before, state(model))


def test_layers_that_do_not_rotate_are_left_alone():
    config = small(hf.SmolLM3Config, **GROUPED, no_rope_layers=[1, 0, 1], num_hidden_layers=3, pad_token_id=0)
    model = spread(hf.SmolLM3Model(config).eval())
    own = RotaryEncoding.from_model(model)
    assert len(attach(model, own).encodings) == 2
    attached(model).remove()
    with pytest.raises(ValueError, match=r"layers holds \[1\], in which .* rotates no queries and keys"):
        attach(model, own, layers=[1])


def test_layers_that_share_keys_share_their_rotation():
    sizes = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    config = small(hf.Gemma3nTextConfig, **GROUPED, **sizes, **kinds, vocab_size_per_layer_input=99)
    model = spread(hf.Gemma3nTextModel(config).eval())
    own, ids = RotaryEncoding.from_model(model, layer_type="full_attention"), tokens(2, N)
    position_ids = torch.arange(N)[None]
    with torch.no_grad(), attach(model, own.scaled(0.3)):
        found = [model(ids, position_ids=position_ids + shift)[0] for shift in (0, 20)]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    learned = RotaryEncoding(own.dim, learnable=True)
    for encoding, layers in ((own, [3]), (learned, None), ([own, own, own, own.scaled(2.0)], None)):
        with pytest.raises(ValueError, match="share their keys"):
            attach(model, encoding, layers=layers)


# ---- cosines that do not arrive as they were made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_that_are_copied_on_the_way_are_refused(model, dtype):
    def copied(layer, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (cos.clone(), sin.clone())}

    model.to(dtype).model.layers[1].register_forward_pre_hook(copied, with_kwargs=True)
    with pytest.raises(ValueError, match=r"attention layers \[1\] are copied or cut"):
        attach(model, RotaryEncoding.from_model(model))


def test_rotations_past_torchs_functions_take_no_frequencies_by_head(model, monkeypatch):
    plain = modeling_llama.apply_rotary_pos_emb

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, cos, sin):
            with torch._C.DisableTorchFunctionSubclass():
                return plain(q, k, cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args, **kwargs: Kernel.apply(*args))
    own = RotaryEncoding.from_model(model)
    attach(model, own.scaled(0.5)).remove()
    with pytest.raises(ValueError, match="for each head"):
        attach(model, own.with_heads(2).scaled([0.5, 2.0]))


def test_a_model_that_is_offloaded_after_attaching(model):
    accelerate, ids = pytest.importorskip("accelerate"), tokens(2, N)
    before, attachment = logits(model, ids), attach(model, RotaryEncoding.from_model(model).scaled(0.5))
    accelerate.cpu_offload(model, execution_device="cpu")
    attachment.remove()
    assert_same_outputs(logits(model, ids), before)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert_same_outputs(logits(model, ids), before)


def test_a_model_of_inference_mode():
    with torch.inference_mode():
        made = llama()
        attach(made, RotaryEncoding.from_model(made).scaled(0.5)).remove()


# ---- models without rotations


class Turning(TorchFunctionMode):
    """Rotates, by complex numbers, what the projections of queries and keys of a model give."""

    def __init__(self, model, encoding):
        super().__init__()
        base, family = base_of(model), family_of(model)
        layers = family.attention_layers(base)
        self.weights = [getattr(layer, name).weight for layer in layers for name in family.projections]
        self.size, self.frequencies = getattr(layers[0], family.head_size), encoding.frequencies.double()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.nn.functional.linear or not any(args[1] is each for each in self.weights):
            return result
        states = result.unflatten(-1, (-1, self.size)).double()  # (batch, n, head, d)
        half, rotated = self.frequencies.shape[1], 2 * self.frequencies.shape[1]
        angle = torch.arange(states.shape[1], dtype=torch.float64)[:, None, None] * self.frequencies
        z = torch.complex(states[..., :half], states[..., half:rotated]) * torch.exp(1j * angle)
        return torch.cat([z.real, z.imag, states[..., rotated:]], -1).flatten(2).to(result)


@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "t5", "mpnet", "electra"])
@pytest.mark.parametrize("positions", ["disable", "keep"])
def test_queries_and_keys_of_a_model_without_rotations_are_rotated(name, positions):
    model, ids = tiny(name), tokens(2, N)
    base, before = base_of(model), state(model)
    size = getattr(family_of(model).attention_layers(base)[0], family_of(model).head_size)
    encoding = RotaryEncoding(size - size % 4, base=50.0)  # of an odd half, the rest is left as it is
    with torch.no_grad(), attach(model, encoding, position_embeddings=positions):
        found = base(ids)[0]
        mask = (torch.arange(N) < N - 2).long().expand(2, -1)
        padded = base(ids * mask, attention_mask=mask)[0]
        shorter = base(ids[:, :-2])[0]
    assert_same_outputs(padded[:, :-2], shorter)
    assert same(before, state(model))
    with torch.no_grad(), attach(model, NoEncoding(), position_embeddings=positions), Turning(model, encoding):
        expected = base(ids)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, base(ids)[0], atol=1e-3)


def test_a_projection_that_is_replaced_later_is_refused(tmp_path):
    model, ids = tiny("bert"), tokens(2, N)
    attach(model, RotaryEncoding(4))
    expected = model(ids)[0]
    model.save_pretrained(tmp_path)
    assert_same_outputs(load(tmp_path)(ids)[0], expected)
    other = copy.deepcopy(model)
    assert_same_outputs(other(ids)[0], expected)
    other.encoder.layer[0].attention.self.query = torch.nn.Linear(32, 32).double()
    with pytest.raises(ValueError, match="'query' of BertSelfAttention was replaced"):
        other(ids)


# ---- learning, saving, copies


def test_frequencies_are_learned(model):
    own = RotaryEncoding.from_model(model)
    learned = RotaryEncoding(own.dim, heads=2, frequencies=own.frequencies, learnable=True)
    attachment = attach(model, learned)
    ids = tokens(2, N)
    model(ids).logits.square().mean().backward()
    parameter, step = attachment.encodings[1].free_frequencies, 1e-3
    assert parameter.grad.shape == (2, own.dim // 2)
    with torch.no_grad():
        values = []
        for change in (step, -2 * step):
            parameter[1, 0] += change
            values.append(model(ids).logits.square().mean().item())
    assert parameter.grad[1, 0].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3)


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_a_rotation_is_saved_and_loaded(model, layers, tmp_path):
    ids = tokens(2, N)
    attach(model, RotaryEncoding.from_model(model).with_heads(2).scaled([0.5, 2.0]), layers=layers)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_outputs(logits(again, ids), expected)
    assert len(attached(again).encodings) == (3 if layers is None else 2)
    attached(again).remove()
    assert_same_outputs(logits(again, ids), logits(llama(), ids))
    with pytest.raises(ValueError, match=r"load it with pelocality\.load"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_rotate_alike_and_on_their_own(model, copied):
    ids = tokens(2, N)
    attach(model, RotaryEncoding.from_model(model).with_heads(2).scaled([0.5, 2.0]))
    expected = logits(model, ids)
    other = copied(model)
    attached(model).remove()
    assert torch.equal(logits(other, ids), expected)
    attached(other).remove()
    assert torch.equal(logits(other, ids), logits(model, ids))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(model, reentrant):
    own, ids = RotaryEncoding.from_model(model), tokens(2, N)
    attach(model, RotaryEncoding(own.dim, heads=2, frequencies=own.frequencies, learnable=True))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(attached(model).encodings[0].free_frequencies.grad.clone())
    assert_same_outputs(gradients[1], gradients[0])


def test_an_adapter_on_an_attached_model(model):
    peft = pytest.importorskip("peft")
    ids = tokens(2, N)
    attach(model, RotaryEncoding.from_model(model).scaled(0.5))
    expected = logits(model, ids)
    add_adapter(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert_same_outputs(logits(model, ids), expected)


def test_a_compiled_model_rotates():
    model, ids = llama(layers=1), tokens(2, N)
    attach(model, RotaryEncoding.from_model(model).scaled(0.5))
    compiled = torch.compile(model, backend="eager")
    assert_same_outputs(logits(compiled, ids), logits(model, ids))


# ---- measuring


def test_an_attached_model_is_measured(model):
    tokenizer_free = {"length": 8, "words": [7, 9], "progress": False}
    own = RotaryEncoding.from_model(model)
    plain = positional_attention(model, **tokenizer_free)
    with attach(model, own.scaled(0.5)):
        result = positional_attention(model, **tokenizer_free)
        assert "RotaryEncoding" in str(result.source.encoding)
        assert (
            text_average(
                model, [{"input_ids": [5, 6, 7, 8, 9, 10]}] * 2, length=6, special_tokens=True, progress=False
            ).attention.shape[-1]
            == 6
        )
    assert not torch.allclose(result.attention, plain.attention)


def test_an_audit_sees_the_base_of_an_attached_rotation():
    model = llama()
    with attach(model, RotaryEncoding(RotaryEncoding.from_model(model).dim, base=500.0)):
        found = audit(model)
    assert any("measured rotary, base 500:" in each for each in found.mismatches)
    with attach(model, RotaryEncoding.from_model(model).with_heads(2).scaled([0.5, 2.0])):
        assert any("measured queries change by position" in each for each in audit(model).mismatches)
    assert not audit(model).mismatches


def test_the_logits_of_an_attached_rotation_are_known(model):
    ids = tokens(2, N)
    with attach(model, RotaryEncoding.from_model(model).scaled(0.5)), eagerly(model):
        parts = decompose(model, ids)
        with torch.no_grad():
            expected = torch.stack(model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(parts.attention, expected.to(parts.attention), atol=1e-6, rtol=1e-5)
    with attach(model, RotaryEncoding.from_model(model).with_heads(2)), pytest.raises(ValueError, match="an attached"):
        decompose(model, ids)


def test_the_scale_of_a_past_locality(model):
    texts = [{"input_ids": tokens(4, 12)}]
    options = {"texts": texts, "special_tokens": True, "length": 16, "progress": False}
    own, before = RotaryEncoding.from_model(model), state(model)
    content, n = positional_logits(model, **options).content.mean(), 16
    i = torch.arange(n)

    def reached(scale):
        """Return the past locality by the kernel of the encoding itself."""
        rotary = own.double().scaled(scale)
        kernels = [rotary.kernel(content.queries[0, layer], content.keys[0, layer], n) for layer in range(3)]
        matrices = torch.stack(kernels)[..., i[None] - i[:, None] + n - 1]
        return past_locality(matrices.masked_fill(i[None] > i[:, None], -torch.inf).softmax(-1)).mean().item()

    wanted = reached(1.3)
    found = rotary_from_targets(model, past_locality=wanted, **options)
    scale = (found.frequencies / own.frequencies).mean().item()
    assert reached(scale) == pytest.approx(wanted, abs=1e-6)
    assert same(before, state(model))
    with pytest.raises(ValueError, match=r"past_locality must be between 0\.\d+ and 0\.\d+"):
        rotary_from_targets(model, past_locality=0.999, **options)


# ---- refusals


def test_what_cannot_be_attached_is_refused_and_changes_nothing(model):
    own = RotaryEncoding.from_model(model)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cases = [
        (llama(rope_parameters=dynamic), own, {}, "length of its input"),
        (model, RotaryEncoding(2 * own.dim), {}, f"rotate the {own.dim} dimensions"),
        (model, own, {"position_embeddings": "keep"}, "replaces the rotation"),
        (model, RotaryEncoding(own.dim, interleaved=True), {}, "interleaved"),
        (model, own.with_heads(3), {}, "1 or 2 heads"),
        (model, own.with_heads(4), {}, "1 or 2 heads"),
        (model, own, {"layers": [7]}, "indices into the model's 3 layers"),
        (model, [own, own], {}, "list of 3"),
        (
            hf.GPTJModel(hf.GPTJConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)),
            own,
            {},
            "no rotary",
        ),
    ]
    modernbert = hf.ModernBertModel(small(hf.ModernBertConfig, pad_token_id=0))
    before = state(model)
    for given, encoding, options, match in cases:
        with pytest.raises(ValueError, match=match):
            attach(given, encoding, **options)
    for mixed in ([own, AttenuatedEncoding(), own], [NoEncoding(), own, own]):
        with pytest.raises(TypeError, match="rotary for all layers"):
            attach(model, mixed)
    for content in (CoPE(8), [NoEncoding(), CoPE(8), NoEncoding()]):
        with pytest.raises(TypeError, match="needs queries and keys"):
            attach(model, content)
    with pytest.raises(ValueError, match="rotate the"):
        attach(model, RotaryEncoding(2 * own.dim), prove=False)
    with pytest.raises(ValueError, match="disable is for"):
        attach(model, own, disable=["norm"])
    with pytest.raises(ValueError, match="causal"):
        attach(modernbert, RotaryEncoding(8, causal=True))
    assert same(before, state(model))


def test_attention_without_the_models_cosines_is_refused(model):
    attach(model, RotaryEncoding.from_model(model))
    attention, hidden = model.model.layers[0].self_attn, torch.randn(1, 4, model.config.hidden_size)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(ValueError, match="got no cosines and sines"):
        attention(hidden, position_embeddings=(cos.clone(), sin.clone()), attention_mask=None)
