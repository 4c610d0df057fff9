"""Each baseline against transformers where it has it, or against its formula as a loop."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import BloomConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomModel
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.t5.modeling_t5 import T5Attention

from pelocality.encodings import KERPLE, ALiBi, FixedWindow, NoEncoding, SinusoidalEncoding, T5Buckets
from pelocality.metrics import measure, symmetry
from pelocality.metrics.without_matrix import measure_relative


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 14, 16, 20, 25, 112])
def test_alibi_has_the_softmax_of_blooms_bias(heads):
    bloom = BloomModel(BloomConfig(vocab_size=8, hidden_size=heads, n_layer=1, n_head=heads))
    theirs = bloom.build_alibi_tensor(torch.ones(1, 9), heads, torch.float32)  # (heads, 1, keys)
    past = torch.ones(9, 9).tril() == 0
    theirs = theirs.expand(heads, 9, 9).masked_fill(past, -torch.inf)
    ours = ALiBi(heads=heads, causal=True)
    torch.testing.assert_close(ours(9).softmax(-1), theirs.softmax(-1))
    torch.testing.assert_close(ours.slopes, bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1])


def test_bidirectional_alibi_is_symmetric():
    bias = ALiBi(heads=8)(7)
    for h in range(8):
        for i in range(7):
            for j in range(7):
                assert bias[h, i, j].item() == pytest.approx(-(2.0 ** -(h + 1)) * abs(i - j))
    assert (symmetry(ALiBi(heads=8).weights(40)) == 1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (64, 500)])
def test_t5_buckets_are_those_of_transformers(causal, buckets, furthest):
    config = T5Config(
        d_model=8,
        d_kv=2,
        num_heads=4,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=furthest,
        is_decoder=causal,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    ours = T5Buckets(heads=4, buckets=buckets, max_distance=furthest, causal=causal)
    ours.load_state_dict({"relative_attention_bias.weight": theirs.relative_attention_bias.weight})
    n = 700
    distance = torch.arange(1 - n, n)
    expected = T5Attention._relative_position_bucket(distance, not causal, buckets, furthest)
    seen = distance <= 0 if causal else distance < n
    assert torch.equal(ours.bucket(distance)[seen], expected[seen])
    past = torch.ones(200, 200, dtype=torch.bool).tril() if causal else torch.ones(200, 200, dtype=torch.bool)
    assert torch.equal(ours(200)[:, past], theirs.compute_bias(200, 200)[0][:, past])


@settings(max_examples=40, deadline=None)
@given(r_1=st.floats(0.01, 5), r_2=st.floats(0.01, 1.99), kernel=st.sampled_from(["log", "power"]))
def test_kerple_is_its_formula(r_1, r_2, kernel):
    bias = KERPLE(heads=1, kernel=kernel, strength=r_1, curvature=r_2).double()(6)[0]
    for i in range(6):
        for j in range(6):
            d = abs(i - j)
            expected = -r_1 * (math.log(1 + r_2 * d) if kernel == "log" else d**r_2)
            assert bias[i, j].item() == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_stays_within_its_bounds_for_any_parameters(kernel):
    encoding = KERPLE(heads=2, kernel=kernel)
    for step in (-80.0, 160.0):
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.add_(step)
        assert (encoding.strength > 0).all()
        assert ((encoding.curvature >= 0) & (encoding.curvature <= (2 if kernel == "power" else torch.inf))).all()


def test_a_window_attends_equally_to_its_neighbours():
    weights = FixedWindow(width=2).double().weights(9)[0]
    for i in range(9):
        seen = [j for j in range(9) if abs(i - j) <= 2]
        for j in range(9):
            assert weights[i, j].item() == pytest.approx(1 / len(seen) if j in seen else 0.0)


def test_the_sinusoidal_table_is_the_one_of_distilbert():
    theirs = torch.empty(50, 32)
    create_sinusoidal_embeddings(50, 32, theirs)
    torch.testing.assert_close(SinusoidalEncoding(width=32).table(50), theirs, atol=1e-6, rtol=0)


def test_the_sinusoidal_bias_is_the_product_of_its_table_with_itself():
    encoding = SinusoidalEncoding(width=64).double()
    table = encoding.table(80)
    torch.testing.assert_close(encoding(80)[0], table @ table.T / 8)
    assert measure(encoding.weights(80)).symmetry == 1


def test_the_sinusoidal_bias_is_accurate_at_large_distances():
    far = SinusoidalEncoding(width=64).relative(100_000)
    near = SinusoidalEncoding(width=64).double().relative(100_000)
    assert (far - near).abs().max() < 1e-6


def test_no_encoding_is_uniform_over_the_visible_keys():
    assert torch.equal(NoEncoding().weights(4)[0], torch.full((4, 4), 0.25))
    causal = NoEncoding(causal=True).weights(4)[0]
    torch.testing.assert_close(causal, torch.ones(4, 4).tril() / torch.arange(1.0, 5)[:, None])
    measured = measure_relative(NoEncoding().relative(512)).locality
    assert measured.item() == pytest.approx((3 * 512 - 4 * (1 - 2.0**-512)) / 512**2)
