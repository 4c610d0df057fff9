"""Encodings at positions that are no line: their biases, in attention, and attached to a vision transformer."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
import transformers as hf

from pelocality import Positions, attach, load, metrics, positional_attention
from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DisplacementTable,
    DistanceTable,
    Encoding,
    FixedWindow,
    NoEncoding,
    PositionalSelfAttention,
    PositionedEncoding,
    T5Buckets,
    biased_attention,
)
from pelocality.models import SequenceModel, identical_patches
from tests.test_encodings import filled

GRID = Positions.grid(4, 4, before=1)
IMAGES = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 16}  # fmt: skip

SYMMETRIC = {
    "alibi": lambda: ALiBi(2),
    "kerple": lambda: KERPLE(2),
    "window": lambda: FixedWindow(2, width=2),
    "attenuated": lambda: AttenuatedEncoding(2, decay=0.3, form="logits"),
    "none": lambda: NoEncoding(2),
}


@pytest.mark.parametrize("make", SYMMETRIC.values(), ids=SYMMETRIC)
@pytest.mark.parametrize("positions", [Positions.grid(3, 4), Positions.grid(2, 2, 3), Positions.grid(3, 3, before=2)])
def test_the_bias_is_that_of_the_distance(make, positions):
    encoding = make()
    bias = PositionedEncoding(encoding, positions)(positions.before + positions.shape[1])
    assert bias.shape == (2, *[positions.before + positions.shape[1]] * 2)
    assert not bias[:, : positions.before].any()
    assert not bias[:, :, : positions.before].any()
    points = positions.keys.tolist()
    for i, x in enumerate(points):
        for j, y in enumerate(points):
            expected = encoding.at(torch.tensor([math.dist(x, y)]))[:, 0]
            torch.testing.assert_close(bias[:, positions.before + i, positions.before + j], expected.expand(2))


@pytest.mark.parametrize("make", SYMMETRIC.values(), ids=SYMMETRIC)
def test_attention_by_distance_is_symmetric_on_its_grid(make):
    grid = Positions.grid(5, 6)
    weights = PositionedEncoding(make(), grid).double().weights(30)
    found = metrics.measure(weights, positions=grid)
    assert (found.symmetry == 1).all()
    assert (found.relative_asymmetry < 1e-12).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda causal: ALiBi(2, causal=causal),
        lambda causal: filled(DistanceTable(2, length=4, signed=True, causal=causal)),
        lambda causal: filled(T5Buckets(2, causal=causal)),
        lambda causal: AttenuatedEncoding(2, symmetry=1.0 if causal else 0.3, form="logits", causal=causal),
    ],
)
def test_on_a_line_the_bias_is_that_of_the_encoding(make, causal):
    encoding = make(causal)
    torch.testing.assert_close(PositionedEncoding(encoding, range(9))(9), encoding(9))
    torch.testing.assert_close(PositionedEncoding(encoding, range(9))(3, 9), encoding(3, 9))


def test_packed_sequences_do_not_see_each_other():
    lengths, encoding = (3, 5, 1), filled(DistanceTable(2, length=6, signed=True))
    packed = PositionedEncoding(encoding, Positions.packed([i for n in lengths for i in range(n)]))
    found = packed.weights(9)
    expected = torch.stack([torch.block_diag(*(encoding.weights(n)[head] for n in lengths)) for head in (0, 1)])
    torch.testing.assert_close(found, expected)


def test_a_displacement_table_has_a_number_per_vector():
    table = filled(DisplacementTable(2, Positions.grid(3, 4)))
    assert table.values.shape == (2, 5 * 7)
    bias = table(12)
    seen = {}
    for i in range(12):
        for j in range(12):
            vector = (j // 4 - i // 4, j % 4 - i % 4)
            assert torch.equal(seen.setdefault(vector, bias[:, i, j]), bias[:, i, j])
    assert len(seen) == 35
    assert len({tuple(each.tolist()) for each in seen.values()}) == 35
    bias.sum().backward()
    assert (table.values.grad > 0).all()
    line = filled(DisplacementTable(1, range(5)))
    torch.testing.assert_close(line(5)[0, 0], line.values[0, 4:].detach())
    graph = DisplacementTable(1, Positions(distances=[[0, 1, 2], [1, 0, math.inf], [2, math.inf, 0]]))
    assert graph.values.shape == (1, 3)
    assert graph(3)[0, 1, 2] == -math.inf


@pytest.mark.parametrize(
    "make",
    [
        lambda: PositionedEncoding(ALiBi(2, causal=True), GRID),
        lambda: PositionedEncoding(DistanceTable(2, length=4), Positions([[0, 0], [0.0, 1.1]], ring=1)),
        lambda: DisplacementTable(2, Positions([0.1, 0.4, 2.0])),
        lambda: DisplacementTable(2, GRID, shared=True, learnable=False),
    ],
)
def test_encodings_are_rebuilt_copied_and_pickled(make):
    encoding = filled(make())
    n = encoding.positions.before + encoding.positions.shape[1]
    again = Encoding.from_configuration(json.loads(json.dumps(encoding.configuration())))
    again.load_state_dict(encoding.state_dict())
    for other in (again, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert torch.equal(other(n), encoding(n))
    torch.testing.assert_close(encoding.double()(n).float(), again(n))
    if encoding.causal:
        assert (encoding(n).isinf() == torch.ones(n, n).triu(1).bool()).all()


def test_attention_layers_take_them():
    encoding = filled(DisplacementTable(2, GRID))
    layer, x = PositionalSelfAttention(8, 2, encoding=encoding).eval(), torch.randn(3, 17, 8)
    assert layer(x)[0].shape == (3, 17, 8)
    query, key, value = torch.randn(3, 1, 2, 17, 4)
    expected = (query @ key.mT / 2 + encoding(17)).softmax(-1) @ value
    torch.testing.assert_close(biased_attention(query, key, value, encoding), expected)
    with pytest.raises(ValueError, match="the positions of the encoding are of 17 tokens, got 16"):
        layer(x[:, 1:])


REFUSED = {
    "encoding must be a function of distance": [
        lambda: PositionedEncoding(NoEncoding, GRID),
        lambda: PositionedEncoding(AttenuatedEncoding(), GRID),
    ],
    "encoding must be symmetric": [
        lambda: PositionedEncoding(AttenuatedEncoding(symmetry=0.5, form="logits"), GRID),
        lambda: PositionedEncoding(AttenuatedEncoding(form="logits", learnable=["symmetry"]), GRID),
        lambda: PositionedEncoding(DistanceTable(signed=True), Positions(GRID.keys, ring=1)),
    ],
    "ring=1": [lambda: PositionedEncoding(DistanceTable(), GRID)],
    "positions must be of tokens": [lambda: DisplacementTable(2, Positions(range(4), queries=range(2)))],
}


@pytest.mark.parametrize("words", REFUSED)
def test_encodings_that_do_not_fit_are_refused(words):
    for make in REFUSED[words]:
        with pytest.raises((TypeError, ValueError), match=words):
            make()


# ---- in a vision transformer


def vit():
    torch.manual_seed(0)
    return hf.ViTModel(hf.ViTConfig(**IMAGES)).eval()


def by_hand(model, pixels, bias):
    """Return the hidden states of a ViT with a bias at its logits, from its weights."""
    x = model.embeddings.patch_embeddings(pixels)
    x = torch.cat([model.embeddings.cls_token.expand(len(x), -1, -1), x], 1)
    for layer in model.layers if hasattr(model, "layers") else model.encoder.layer:
        attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
        names = dict(attention.named_modules())
        part = lambda name, names=names: next(m for key, m in names.items() if key.split(".")[-1] == name)  # noqa: E731
        projections = [next(k for k in ks if any(key.split(".")[-1] == k for key in names)) for ks in
                       (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))]  # fmt: skip
        normed = layer.layernorm_before(x)
        q, k, v = (part(name)(normed).unflatten(-1, (2, -1)).transpose(1, 2) for name in projections)
        mixed = ((q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = next(m for key, m in names.items() if isinstance(m, torch.nn.Linear) and key not in projections
                   and key.split(".")[-1] not in projections)  # fmt: skip
        x = x + out(mixed)
        normed = layer.layernorm_after(x)
        linears = [m for key, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and "attention" not in key]
        x = x + linears[1](torch.nn.functional.gelu(linears[0](normed)))
    return model.layernorm(x)


@pytest.mark.parametrize(
    "encoding", [PositionedEncoding(ALiBi(2), GRID), filled(DisplacementTable(2, GRID))], ids=["ALiBi", "table"]
)
def test_a_vision_transformer_gets_the_bias_of_its_grid(encoding, tmp_path):
    model, pixels = vit(), torch.randn(2, 3, 16, 16)
    inputs = {"pixel_values": pixels}
    before = model(**inputs).last_hidden_state
    known = SequenceModel(model, inputs=identical_patches(4))
    with attach(known, encoding, example_inputs=inputs, disable=["embeddings.position_embeddings"]):
        torch.testing.assert_close(
            model(**inputs).last_hidden_state, by_hand(model, pixels, encoding(17)), rtol=0, atol=1e-5
        )
        result = positional_attention(known, length=16, words=1)
        if isinstance(encoding, PositionedEncoding):  # nothing but distance is in the first layer
            assert (result.metric_of_mean.symmetry[0] == 1).all()
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert torch.equal(loaded(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    assert torch.equal(model(**inputs).last_hidden_state, before)


def test_a_grid_without_the_class_token_is_refused():
    model, inputs = vit(), {"pixel_values": torch.randn(1, 3, 16, 16)}
    before = model(**inputs).last_hidden_state
    encoding = PositionedEncoding(ALiBi(2), Positions.grid(4, 4))
    with pytest.raises(ValueError, match="the positions of the encoding are of 16 tokens, got 17"):
        attach(model, encoding, example_inputs=inputs, disable=["embeddings.position_embeddings"])
    assert torch.equal(model(**inputs).last_hidden_state, before)


def test_the_numbers_of_another_grid_are_not_loaded():
    saved = DisplacementTable(2, Positions.grid(4, 6)).state_dict()
    with pytest.raises(RuntimeError, match="has positions="):
        DisplacementTable(2, Positions.grid(6, 4)).load_state_dict(saved)
    DisplacementTable(2, Positions.grid(4, 6)).load_state_dict(saved)


@pytest.mark.parametrize(
    "make", [lambda: PositionedEncoding(ALiBi(2), GRID), lambda: filled(DisplacementTable(2, GRID))]
)
def test_compiled_encodings_give_the_same_bias(make):
    encoding = make()
    compiled = torch.compile(lambda x: x + encoding(17), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(17, 17)), encoding(17))


def test_many_axes_have_a_number_for_each_displacement():
    places = np.random.default_rng(0).standard_normal((12, 3))
    keys = np.array([(*place, time) for place in places for time in range(3)])
    vectors = {tuple((y - x).round(9)) for x in keys for y in keys}
    assert DisplacementTable(1, keys).values.shape == (1, len(vectors))
