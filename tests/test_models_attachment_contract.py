"""One contract of `attach`: every tiny model with a bias, a rotation and CoPE gives what attention written out gives.

The witness is an attention function of its own in transformers' interface, in float64, with no code of the library; for
models outside of that interface, a bias that is added to the argument of every softmax.
"""

from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.attaching import _without_positions, off_by
from pelocality.encodings import CoPE, DistanceTable, RotaryEncoding
from pelocality.models import attach
from tests.families import ANY, EVERY, base_of, same, state, tiny, tiny_any, tokens
from tests.test_models_attachment import WITH_CONVOLUTION, ways

N = 9
ENCODINGS = ("bias by head", "bias beside positions", "rotation", "rotation by head", "CoPE")
EAGER_ALONE = ("gpt_oss", "gemma2", "t5gemma", "t5gemma decoder")  # torch's kernel has no sinks and no caps
EAGER_ALONE += ("gptj", "roformer", "rembert", "megatron-bert", "codegen", "xlm", "mpt", "squeezebert")


def build(name):
    return tiny(name) if name in EVERY else tiny_any(name)


# ---- the witness


def turned(states, frequencies):
    """Rotate (batch, heads, n, d) by complex numbers, f with f + half; groups of heads share frequencies."""
    w = frequencies.double()
    w = w.repeat_interleave(states.shape[1] // len(w), 0)[:, None]  # (head, 1, band)
    half = w.shape[-1]
    phase = torch.exp(1j * torch.arange(states.shape[2])[:, None] * w)
    z = torch.complex(states[..., :half].double(), states[..., half : 2 * half].double()) * phase
    return torch.cat([z.real, z.imag, states[..., 2 * half :].double()], -1).to(states)


def counted(query, logits, vectors, hidden):
    """Return CoPE's bias: the sum of gates from each key on, and the vectors of the two nearest whole numbers."""
    gate = logits.sigmoid().masked_fill(hidden, 0)
    place = torch.stack([gate[..., j:].sum(-1) for j in range(gate.shape[-1])], -1).clamp(max=len(vectors) - 1)
    scores, low = query @ vectors.to(query).T, place.floor()
    lower, upper = (scores.gather(-1, each.long()) for each in (low, place.ceil()))
    return lower + (place - low) * (upper - lower)


class Witness:
    """Attention written out, with an encoding."""

    def __init__(self, encoding=None):
        self.encoding, self.shapes = encoding, []

    def __call__(self, module, query, key, value, attention_mask=None, scaling=None, softcap=None, **more):
        (n, d), keys = query.shape[-2:], key.shape[2]
        encoding, groups = self.encoding, query.shape[1] // key.shape[1]
        if keys != n:  # attention to another sequence
            encoding = None
        else:
            self.shapes.append((query.shape[1], key.shape[1], d))
        if isinstance(encoding, RotaryEncoding) and getattr(module, "use_rope", True):
            query, key = (turned(each, encoding.frequencies) for each in (query, key))
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        logits = query @ key.mT * (d**-0.5 if scaling is None else scaling)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        if more.get("position_bias") is not None:  # T5's
            logits = logits + more["position_bias"]
        hidden = torch.zeros(1, 1, n, keys, dtype=torch.bool)
        if attention_mask is not None:
            hidden = attention_mask[..., :keys] < -1e3
        if isinstance(encoding, CoPE):
            hidden = hidden | torch.ones(n, n, dtype=torch.bool).triu(1)
            logits = logits + counted(query, logits, encoding.vectors, hidden)
        elif encoding is not None and not isinstance(encoding, RotaryEncoding):
            logits = logits + encoding(n).to(logits)
        logits = logits.masked_fill(hidden, -1e30)
        if (s_aux := more.get("s_aux")) is not None:
            logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits)], -1)
        weights = logits.double().softmax(-1)[..., :keys].to(value)
        return (weights @ value).transpose(1, 2).contiguous(), weights


@contextmanager
def written_out(model, witness, *, disable):
    """Run a model by the witness, perhaps without its positions."""
    parts = [module for module in model.modules() if isinstance(module, hf.PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    ALL_ATTENTION_FUNCTIONS.register("written_out", witness)
    ALL_MASK_ATTENTION_FUNCTIONS.register("written_out", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    for part in parts:
        part.config._attn_implementation = "written_out"
    try:
        with torch.no_grad(), _without_positions(model, disable):
            yield
    finally:
        for part, implementation in zip(parts, before, strict=True):
            part.config._attn_implementation = implementation


def inputs(name):
    """Return two texts, of which the second is padded where the model takes a mask."""
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, -3:] = 0 if name != "xlnet one way" else 1  # which fails with any mask
    states = {"encoder_hidden_states": torch.linspace(-1, 1, 96).double().view(2, 3, 16)}
    given = {"input_ids": tokens(2, N), "attention_mask": mask} | (states if name == "t5gemma decoder" else {})
    return {key: each for key, each in given.items() if name != "xlnet one way" or key == "input_ids"}


def states(model, given):
    """Return the hidden states of the tokens that are no padding."""
    with torch.no_grad():
        output = model(**given)[0]
    return output[given["attention_mask"].bool()] if "attention_mask" in given else output


def encoding_of(kind, heads, shared, size, own=None):
    """Return an encoding of each sort with random numbers."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind.startswith("bias"):
        table = DistanceTable(heads, length=N + 16, signed=True).double()
        with torch.no_grad():
            table.values.copy_(random(*table.values.shape))
        return table
    if kind == "CoPE":
        cope = CoPE(size, positions=4, heads=heads).double()
        with torch.no_grad():
            cope.vectors.copy_(random(*cope.vectors.shape))
        return cope
    dim = size - size % 2 if own is None else own
    number = shared if "head" in kind else 1
    return RotaryEncoding(dim, heads=number, frequencies=random(number, dim // 2).abs()).double()


@pytest.mark.parametrize("kind", ENCODINGS)
@pytest.mark.parametrize("name", [*EVERY, *ANY])
def test_every_model_with_every_encoding_is_attention_written_out(name, kind):
    model, given, witness, disable = build(name), inputs(name), Witness(), kind != "bias beside positions"
    implementations = ["eager"] if name in EAGER_ALONE else ways(name)
    before = state(model)
    with written_out(model, witness, disable=False):
        expected = states(model, given)
    # attention beside transformers' interface, or, since transformers 5.24, in it with neighbouring dimensions as pairs
    if not witness.shapes or name in ("gptj", "codegen"):
        if kind.startswith("bias") and not (disable and name == WITH_CONVOLUTION):
            for way in implementations:
                assert off_by(model, disable=disable, implementation=way) < 1e-6
        return
    plain = states(model, given)
    torch.testing.assert_close(plain, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    heads, shared, size = witness.shapes[0]
    own = next((2 * len(each) for key, each in model.named_buffers() if key.endswith("inv_freq")), None)
    encoding = encoding_of(kind, heads, shared, size, own)
    with written_out(model, Witness(encoding), disable=disable):
        expected = states(model, given)
    for way in implementations:
        base_of(model).set_attn_implementation(way)
        if kind == "CoPE" and way == "eager":
            with pytest.raises(ValueError, match="CoPE"):
                attach(model, encoding)
            continue
        positions, prove = "disable" if disable else "keep", kind in ("bias by head", "rotation")
        with attach(model, encoding, position_embeddings=positions, prove=prove):
            found = states(model, given)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
        assert not torch.allclose(found, plain, rtol=0, atol=1e-5)
    assert torch.equal(states(model, given), plain) or name in EAGER_ALONE
    assert same(before, state(model))
