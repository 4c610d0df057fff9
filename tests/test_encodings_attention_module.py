"""Positional self-attention against loops written from its equations, and against nn.MultiheadAttention."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from pelocality.encodings import (
    ALiBi,
    AttenuatedEncoding,
    FixedWindow,
    NoEncoding,
)
from pelocality.encodings.attention_module import PositionalSelfAttention
from pelocality.metrics import locality

MODES = pytest.mark.parametrize("mode", ["add", "concat", "sequence"])
ENCODINGS = {
    "weights": lambda: AttenuatedEncoding(heads=2, decay=[0.1, 0.8], symmetry=[0.5, 2.0], scale=3.0),
    "logits": lambda: AttenuatedEncoding(heads=2, decay=[0.1, 0.8], form="logits", learnable=True),
    "one head for all": lambda: AttenuatedEncoding(decay=0.3, symmetry=3.0),
    "causal": lambda: ALiBi(heads=2, causal=True),
    "window": lambda: FixedWindow(width=1),
    "none": lambda: None,
}
EVERY = pytest.mark.parametrize("name", ENCODINGS)


def layer_of(name, mode="add", **options):
    torch.manual_seed(0)
    layer = PositionalSelfAttention(6, 2, ENCODINGS[name](), mode, **options).double()
    for parameter in layer.parameters():  # biases too, which start at zero
        nn.init.normal_(parameter)
    return layer


def sequences(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend(logits, values, hidden):
    """Return the softmax over visible keys times the values, as a loop over keys."""
    weights = [0.0 if masked else math.exp(logit) for logit, masked in zip(logits, hidden, strict=True)]
    total = sum(weights) or 1.0
    return sum(w / total * v for w, v in zip(weights, values, strict=True))


def loop(layer, x, hidden):
    """Return the equation of the layer for one sequence (n, d); hidden[i][j]: query i does not see key j."""
    n, H, e = len(x), layer.num_heads, layer.head_dim
    bias = layer.encoding(n).detach()
    bias = bias.expand(H, n, n)
    logits_by_distance = layer.encoding.relative(n).detach().expand(H, -1)
    causal = layer.encoding.causal
    hidden = [[hidden[i][j] or (causal and j > i) for j in range(n)] for i in range(n)]
    normalised = isinstance(layer.encoding, AttenuatedEncoding) and layer.encoding.form == "weights"

    def heads(matrix, offset):
        return [x_ @ matrix.T + offset for x_ in x]

    def mixed(values, h):  # P V, with P normalised over the visible keys
        return [
            attend([logits_by_distance[h, j - i + n - 1].item() for j in range(n)], values, hidden[i]) for i in range(n)
        ]

    if layer.mode == "sequence":
        columns = heads(layer.mix_proj.weight, layer.mix_proj.bias)
        parts = [mixed([c[h * e : (h + 1) * e] for c in columns], h) for h in range(H)]
        x = [torch.cat([part[i] for part in parts]) for i in range(n)]
    W_q, W_k, W_v = layer.in_proj_weight.chunk(3)
    b_q, b_k, b_v = layer.in_proj_bias.chunk(3)
    Q, K, V = heads(W_q, b_q), heads(W_k, b_k), heads(W_v, b_v)
    positional, contextual = [[] for _ in range(n)], [[] for _ in range(n)]
    for h in range(H):
        part = slice(h * e, (h + 1) * e)
        V_h = [v[part] for v in V]
        for i in range(n):
            logits = [(Q[i][part] @ K[j][part] / math.sqrt(e)).item() for j in range(n)]
            if layer.mode == "add" and normalised:
                e_i = [0.0 if hidden[i][j] else math.exp(logits_by_distance[h, j - i + n - 1]) for j in range(n)]
                scale = layer.encoding.scale.expand(H)[h].item()
                logits = [a + scale * one / (sum(e_i) or 1.0) for a, one in zip(logits, e_i, strict=True)]
            elif layer.mode == "add":
                logits = [a + bias[h, i, j].item() for j, a in enumerate(logits)]
            contextual[i].append(attend(logits, V_h, hidden[i]) + torch.zeros(e, dtype=x[0].dtype))
        for i, row in enumerate(mixed(V_h, h)):
            positional[i].append(row + torch.zeros(e, dtype=x[0].dtype))
    rows = []
    for i in range(n):
        row = torch.cat(positional[i] + contextual[i] if layer.mode == "concat" else contextual[i])
        rows.append(row @ layer.out_proj.weight.T + layer.out_proj.bias)
    return torch.stack(rows)


@MODES
@EVERY
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_mode_equals_its_equation(name, mode, padded, is_causal):
    layer = layer_of(name, mode).eval()
    x = sequences(2, 5, 6)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    hidden = [
        [[bool(padded and padding[b, j]) or (is_causal and j > i) for j in range(5)] for i in range(5)]
        for b in range(2)
    ]
    expected = torch.stack([loop(layer, x[b], hidden[b]) for b in range(2)])
    options = {"key_padding_mask": padding if padded else None, "is_causal": is_causal}
    for need_weights in (False, True):
        torch.testing.assert_close(layer(x, need_weights=need_weights, **options)[0], expected)


@MODES
@EVERY
def test_padding_does_not_change_the_real_tokens(name, mode):
    layer = layer_of(name, mode).eval()
    x = sequences(1, 6, 6)
    alone = layer(x)[0]
    for left, right in ((0, 3), (2, 1)):
        noise = 100 * sequences(1, left + 6 + right, 6, seed=1)
        noise[:, left : left + 6] = x
        padding = torch.ones(1, left + 6 + right, dtype=torch.bool)
        padding[:, left : left + 6] = False
        for need_weights in (False, True):
            output = layer(noise, key_padding_mask=padding, need_weights=need_weights)[0]
            torch.testing.assert_close(output[:, left : left + 6], alone)


MASK_VALUES = pytest.mark.parametrize(
    ("mask_value", "dtype"),
    [
        (-math.inf, torch.float64),
        (-1e3, torch.float64),
        (-1e4, torch.float64),
        (-1e4, torch.bfloat16),  # rounded to -9984
        (-1e9, torch.float32),
        *[(torch.finfo(dtype).min, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)],
    ],
)


@MODES
@MASK_VALUES
@pytest.mark.parametrize("name", ["weights", "logits"])
def test_a_float_mask_equals_the_boolean_mask(name, mode, mask_value, dtype):
    layer = layer_of(name, mode).eval()
    x = sequences(2, 5, 6)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[True, True, False, False, False], [False] * 4 + [True]])  # also fully masked queries
    for masks in (
        {"attn_mask": future},
        {"key_padding_mask": padding},
        {"attn_mask": future, "key_padding_mask": padding},
    ):
        floats = {
            key: torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, mask_value) for key, mask in masks.items()
        }
        for need_weights in (False, True):
            expected, attention = layer(x, need_weights=need_weights, **masks)
            output, weights = layer(x, need_weights=need_weights, **floats)
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(weights, attention)


@MODES
def test_a_float_mask_above_the_limit_hides_no_key(mode):
    layer = layer_of("weights", mode).eval()
    x = sequences(1, 5, 6)
    lowered = torch.zeros(1, 5, dtype=torch.float64)
    lowered[0, 4] = -900.0
    _, attention = layer(x, key_padding_mask=lowered, average_attn_weights=False)
    if mode == "concat":
        torch.testing.assert_close(attention[:, :2], layer.encoding.weights(5)[None].double())
    assert not attention[:, -2:, :, 4].any()


@MODES
@pytest.mark.parametrize("how", ["is_causal", "attn_mask", "float mask", "encoding"])
def test_a_causal_layer_never_sees_the_future(mode, how):
    encoding = AttenuatedEncoding(heads=2, decay=0.1, causal=how == "encoding")
    layer = PositionalSelfAttention(6, 2, encoding, mode).double().eval()
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    options = {
        "is_causal": {"is_causal": True},
        "attn_mask": {"attn_mask": future},
        "float mask": {"attn_mask": torch.zeros(7, 7, dtype=torch.float64).masked_fill(future, -torch.inf)},
        "encoding": {},
    }[how]
    x, changed = sequences(1, 7, 6), sequences(1, 7, 6)
    changed[:, 4:] += 10
    for need_weights in (False, True):
        before = layer(x, need_weights=need_weights, **options)[0]
        after = layer(changed, need_weights=need_weights, **options)[0]
        torch.testing.assert_close(after[:, :4], before[:, :4])
        assert not torch.allclose(after[:, 4:], before[:, 4:])


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    n=st.integers(1, 9),
    bias=st.booleans(),
    padding=st.integers(0, 3),
    mask=st.sampled_from([None, "bool", "float", "heads"]),
    average=st.booleans(),
)
def test_without_an_encoding_it_equals_multihead_attention(batch, n, bias, padding, mask, average):
    theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True).double().eval()
    ours = PositionalSelfAttention(8, 2, bias=bias).double().eval()
    assert ours.load_state_dict(theirs.state_dict(), strict=False).unexpected_keys == []
    x = sequences(batch, n, 8)
    options = {"average_attn_weights": average}
    options["key_padding_mask"] = (torch.arange(n) >= max(1, n - padding)).expand(batch, n)
    if mask:
        shape = (2 * batch, n, n) if mask == "heads" else (n, n)
        drawn = sequences(*shape, seed=1)
        options["attn_mask"] = drawn if mask == "float" else (drawn > 1) & (torch.arange(n) > 0)
        if mask == "float":
            options["key_padding_mask"] = torch.zeros(batch, n, dtype=torch.float64).masked_fill(
                options["key_padding_mask"], -torch.inf
            )
    expected, attention = theirs(x, x, x, **options)
    output, weights = ours(x, x, x, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, attention)
    torch.testing.assert_close(ours(x, x, x, **{**options, "need_weights": False})[0], expected)


def test_a_single_sequence_needs_no_batch():
    layer = layer_of("weights").eval()
    x = sequences(5, 6)
    padding = torch.tensor([False, False, False, False, True])
    output, attention = layer(x, key_padding_mask=padding)
    expected, weights = layer(x[None], key_padding_mask=padding[None])
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(attention, weights[0])


@MODES
def test_the_returned_attention_is_a_distribution_over_visible_keys(mode):
    layer = layer_of("weights", mode, dropout=0.5).train()
    padding = torch.tensor([[False, False, False, True], [False] * 4])
    _, attention = layer(sequences(2, 4, 6), key_padding_mask=padding, average_attn_weights=False)
    assert attention.shape == (2, 4 if mode == "concat" else 2, 4, 4)
    torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]))
    assert not attention[0, ..., 3].any()
    assert locality(attention).shape == attention.shape[:2]


def test_concat_returns_the_positional_heads_first():
    layer = layer_of("logits", "concat").eval()
    _, attention = layer(sequences(1, 5, 6), average_attn_weights=False)
    torch.testing.assert_close(attention[0, :2], layer.encoding.weights(5))


@MODES
def test_a_fully_masked_query_outputs_the_bias_and_has_finite_gradients(mode):
    layer = layer_of("logits", mode)
    x = sequences(2, 4, 6).requires_grad_()
    padding = torch.tensor([[True] * 4, [False] * 4])
    for need_weights in (False, True):
        output, _ = layer(x, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(output[0], layer.out_proj.bias.expand(4, 6))
        gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()], allow_unused=True)
        assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


@MODES
@EVERY
@pytest.mark.parametrize("need_weights", [False, True])
def test_per_sample_gradients_equal_single_ones(name, mode, need_weights):
    layer = layer_of(name, mode)
    x = sequences(3, 5, 6)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [0]])  # the last is fully masked
    numbers = {key: number.detach() for key, number in layer.named_parameters()}

    def loss(numbers, x, padding):
        options = {"key_padding_mask": padding, "need_weights": need_weights}
        return torch.func.functional_call(layer, numbers, (x,), options)[0].square().sum()

    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(numbers, x, padding)
    for i in range(3):
        expected = torch.autograd.grad(loss(dict(layer.named_parameters()), x[i], padding[i]), list(layer.parameters()))
        torch.testing.assert_close([each[i] for each in of_each.values()], list(expected))
    tangents = {key: torch.randn_like(number) for key, number in numbers.items()}
    _, along = torch.func.jvp(lambda numbers: loss(numbers, x[0], padding[0]), (numbers,), (tangents,))
    torch.testing.assert_close(along, sum((tangents[key] * of_each[key][0]).sum() for key in numbers))


def test_dropout_applies_in_training_only():
    layer = layer_of("logits", dropout=0.5)
    x = sequences(2, 5, 6)
    for need_weights in (False, True):
        layer.train()
        torch.manual_seed(0)
        one = layer(x, need_weights=need_weights)[0]
        assert not torch.allclose(one, layer(x, need_weights=need_weights)[0])
        layer.eval()
        torch.testing.assert_close(*(layer(x, need_weights=need_weights)[0] for _ in range(2)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_it_works_in_torchs_encoder_without_the_fused_path(nested):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    block.self_attn = PositionalSelfAttention(8, 2, AttenuatedEncoding(heads=2, form="logits"))
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=nested)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    trained = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), trained)
        torch.testing.assert_close(encoder(x[1:, :3]), trained[1:, :3])
        encoder.layers[0].self_attn.encoding = NoEncoding()
        assert not torch.allclose(encoder(x, src_key_padding_mask=padding), trained)
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        assert encoder(x, mask=causal, is_causal=True).shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_raises_an_error_with_the_solution():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = PositionalSelfAttention(8, 2, ALiBi(2))  # after the encoder chose nested tensors
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        encoder(torch.randn(2, 5, 8), src_key_padding_mask=padding)


def test_a_layer_with_a_device_or_dtype_does_not_change_the_given_encoding():
    encoding = AttenuatedEncoding(2, learnable=True)
    one, other = (PositionalSelfAttention(8, 2, encoding) for _ in range(2))
    assert one.encoding is other.encoding is encoding  # layers given one encoding share it
    double = PositionalSelfAttention(8, 2, encoding, dtype=torch.float64)
    on_meta = PositionalSelfAttention(8, 2, encoding, device="meta")
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    assert {(p.dtype, p.device.type) for p in encoding.parameters()} == {(torch.float32, "cpu")}


@MODES
def test_half_precision_and_autocast_are_close_to_float32(mode):
    torch.manual_seed(0)
    layer = PositionalSelfAttention(16, 2, AttenuatedEncoding(heads=2, decay=0.05, learnable=True), mode).eval()
    x = torch.randn(2, 9, 16)
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (False, True):
            cast = layer(x, need_weights=need_weights)[0]
            assert cast.dtype == torch.bfloat16
            torch.testing.assert_close(cast.float(), expected, atol=3e-2, rtol=3e-2)
    half = layer.bfloat16()(x.bfloat16(), need_weights=False)[0]
    torch.testing.assert_close(half.float(), expected, atol=3e-2, rtol=3e-2)


@MODES
def test_it_can_be_copied_pickled_saved_and_compiled(mode):
    layer = layer_of("logits", mode).eval()
    x = sequences(2, 5, 6)
    expected = layer(x)[0]
    other = layer_of("logits", mode)
    nn.init.zeros_(other.out_proj.weight)
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other.eval()):
        torch.testing.assert_close(twin(x)[0], expected)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    torch.testing.assert_close(compiled(x)[0], expected)
    torch.testing.assert_close(
        compiled(x, key_padding_mask=padding, need_weights=False)[0], layer(x, key_padding_mask=padding)[0]
    )


def layer(**options):
    return PositionalSelfAttention(**({"embed_dim": 8, "num_heads": 2} | options))


WRONG_LAYERS = [
    ({"embed_dim": 7}, AssertionError, "divisible by num_heads"),
    ({"embed_dim": 8.0}, TypeError, "int"),
    ({"num_heads": 0}, ValueError, "num_heads"),
    ({"mode": "multiply"}, ValueError, "mode"),
    ({"encoding": ALiBi(heads=4)}, ValueError, "1 or 2 heads"),
    ({"encoding": nn.Identity()}, TypeError, "Identity"),
]
X = torch.ones(1, 3, 8)
WRONG_INPUTS = [
    (([[1.0] * 8],), {}, TypeError, "query"),
    ((torch.ones(1, 3, 6),), {}, RuntimeError, "shapes"),
    ((torch.ones(1, 0, 8),), {}, ValueError, "length"),
    ((X, torch.ones(1, 3, 8)), {}, ValueError, "self-attention"),
    ((X,), {"key_padding_mask": [[False, True, True]]}, TypeError, "key_padding_mask"),
    ((X,), {"key_padding_mask": torch.ones(1, 4).bool()}, ValueError, "key_padding_mask"),
    ((X,), {"key_padding_mask": torch.ones(1, 3).long()}, TypeError, "booleans"),
    ((X,), {"attn_mask": [[False]]}, TypeError, "attn_mask"),
    ((X,), {"attn_mask": torch.ones(3, 4)}, ValueError, "attn_mask"),
]


def test_arguments_that_do_not_fit_are_named():
    for options, error, words in WRONG_LAYERS:
        with pytest.raises(error, match=words):
            layer(**options)
    for inputs, options, error, words in WRONG_INPUTS:
        with pytest.raises(error, match=words):
            layer()(*inputs, **options)
