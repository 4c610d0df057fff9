"""rotary_bands against sums over the queries and keys that the model itself multiplies."""

import pytest
import torch
import transformers as hf

from pelocality.models import positional_logits, rotary_bands
from tests.families import small, spread, tiny, tokens
from tests.test_models_rotary import batch, build

N = 10
HEADS, BANDS = 2, 4


def by_hand(model, ids):
    """Return norms, squares and the variance share of the first layer, text by text, from hooks on the projections."""
    attention, taken = model.layers[0].self_attn, []
    hooks = [
        each.register_forward_hook(lambda m, a, out: taken.append(out)) for each in (attention.q_norm, attention.k_norm)
    ]
    with torch.no_grad():
        for text in ids:
            model(text[None])
    for hook in hooks:
        hook.remove()
    frequency = model.rotary_emb.inv_freq.double()
    norms = torch.zeros(2, HEADS, BANDS).double()
    squares = torch.zeros(2, HEADS, 2 * BANDS).double()
    shares, total = torch.zeros(HEADS, BANDS).double(), torch.zeros(HEADS, 1).double()
    for query, key in zip(taken[::2], taken[1::2], strict=True):
        query, key = query[0].transpose(0, 1), key[0].transpose(0, 1).expand(HEADS, -1, -1)  # (head, n, d_head)
        for which, states in enumerate((query, key)):
            squares[which] += states.square().sum(1)
            norms[which] += (states[..., :BANDS] ** 2 + states[..., BANDS:] ** 2).sqrt().sum(1)
        for head in range(HEADS):
            for i in range(N):
                added = torch.zeros(N, BANDS).double()
                for j in range(N):
                    for band in range(BANDS):
                        turn = torch.polar(torch.ones(()).double(), frequency[band] * (j - i))
                        one = torch.complex(query[head, i, band], query[head, i, band + BANDS])
                        other = torch.complex(key[head, j, band], key[head, j, band + BANDS])
                        added[j, band] = (one.conj() * turn * other).real
                logits = added.sum(1)
                shares[head] += ((added - added.mean(0)) * (logits - logits.mean())[:, None]).mean(0)
                total[head] += logits.var(correction=0)
    return norms / ids.numel(), squares, shares / total


def test_bands_are_those_of_a_slow_loop():
    config = small(hf.Qwen3Config, head_dim=8, num_key_value_heads=1, pad_token_id=0, max_position_embeddings=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = spread(hf.Qwen3Model(config))
        with torch.no_grad():
            model.layers[0].self_attn.q_norm.weight[3] = 30.0  # a massive value
    ids = tokens(2, N)
    norms, squares, shares = by_hand(model, ids)
    ids = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], 1)
    found = rotary_bands(model, None, batch(ids, attention_mask=(ids > 0).long()), special_tokens=True)
    assert repr(found) == "RotaryBands(2 layers x 2 heads x 4 bands, 2 texts)"
    torch.testing.assert_close(found.query_norm[0], norms[0])
    torch.testing.assert_close(found.key_norm[0], norms[1])
    product = norms.prod(0)
    torch.testing.assert_close(found.use[0], product / product.sum(-1, keepdim=True))
    torch.testing.assert_close(found.variance[0], shares, rtol=1e-5, atol=1e-6)
    sizes = squares.sqrt()
    massive = (sizes > 5 * sizes.mean(-1, keepdim=True)).view(2, HEADS, 2, BANDS).any(2)
    assert found.massive_queries[0].tolist() == massive[0].tolist() == [[False] * 3 + [True]] * 2
    assert found.massive_keys[0].tolist() == massive[1].tolist()
    torch.testing.assert_close(found.wavelength[0], 2 * torch.pi / model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_the_table_has_a_row_for_each_band():
    model = build("norm of all heads")
    found = rotary_bands(model, None, batch(tokens(3, N)), special_tokens=True, layers=[-1])
    frame = found.to_frame()
    assert list(frame.columns[:4]) == ["layer", "head", "band", "wavelength"]
    assert len(frame) == found.use.numel() == HEADS * BANDS
    assert frame["layer"].unique().tolist() == [1]
    torch.testing.assert_close(torch.tensor(frame.groupby("head")[["use", "variance"]].sum().to_numpy()).double(),
                               torch.ones(HEADS, 2).double())  # fmt: skip


@pytest.mark.parametrize(
    ("name", "still"), [("a quarter of the dimensions", [6, 6]), ("layers without rotations", [0, 4]), ("yarn", [0, 0])]
)
def test_dimensions_that_do_not_rotate_are_bands_of_infinite_wavelength(name, still):
    found = rotary_bands(build(name), None, batch(tokens(2, N)), special_tokens=True)
    assert found.wavelength.isinf().sum(-1).tolist() == still
    finite = found.wavelength[0][~found.wavelength[0].isinf()]
    assert bool((finite.diff() > 0).all())


def test_wavelengths_are_those_at_whole_positions():
    model, frequencies = build("linear"), torch.tensor([-0.5, 5.0, 0.25, 0.0])
    model.rotary_emb.inv_freq = frequencies
    found = rotary_bands(model, None, batch(tokens(2, N)), special_tokens=True).wavelength[0] / torch.pi
    expected = [4, 2 / (2 * torch.pi - 5), 8, torch.inf]
    torch.testing.assert_close(found, torch.tensor(expected).to(found))


def test_one_token_has_no_variance():
    found = rotary_bands(build("linear"), None, batch(tokens(1, 1)), special_tokens=True)
    assert found.variance.isnan().all()
    assert found.use.isfinite().all()


def test_the_first_tokens_are_left_out():
    model, ids = build("linear"), tokens(2, N)
    found = rotary_bands(model, None, batch(ids), special_tokens=True, without_first=N - 1, layers=[0])
    with torch.no_grad():
        attention = model.layers[0].self_attn
        query = attention.q_proj(model.layers[0].input_layernorm(model.embed_tokens(ids[:, -1])))
    pairs = query.view(2, HEADS, 2, BANDS)  # of the last token of each text
    torch.testing.assert_close(found.query_norm[0], pairs.norm(dim=2).mean(0))
    assert found.texts == 2


def of_images():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = small(hf.Qwen2VLTextConfig, num_key_value_heads=1, pad_token_id=0, rope_parameters=rope)
    return spread(hf.Qwen2VLTextModel(config))


def test_bands_of_images_and_text_have_the_axis_that_turns_them():
    found = rotary_bands(of_images(), None, batch(tokens(2, N)), special_tokens=True)
    assert found.axis.tolist() == [[0, 0, 1, 2]] * len(found.layers)
    assert sorted(set(found.to_frame()["axis"])) == [0, 1, 2]
    torch.testing.assert_close(found.wavelength[0].float(), 2 * torch.pi * 1e4 ** (torch.arange(4) / 4))


@pytest.mark.parametrize("source", [{"texts": batch(tokens(3, N)), "special_tokens": True}, {"words": [7, 9]}])
def test_logits_at_displacements_of_images_are_sums_over_the_bands_of_each_axis(source):
    logits = positional_logits(of_images(), length=N, progress=False, **source)
    text = torch.arange(1 - N, N)[:, None].expand(-1, 3)
    torch.testing.assert_close(logits.at(text), logits.relative, atol=1e-6, rtol=1e-6)
    steps, content = torch.randn(5, 3).double(), logits.content.mean() if "texts" in source else logits.content
    query, key = (torch.complex(*each.double().chunk(2, -1)) for each in (content.queries, content.keys))
    angle = steps[:, [0, 0, 1, 2]] * 1e4 ** (-torch.arange(4).double() / 4)
    bands = torch.einsum("slhf,slhf,mf->slhm", query.conj(), key, torch.polar(torch.ones(()).double(), angle))
    torch.testing.assert_close(logits.at(steps), bands.real.mean(0) / 8**0.5, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="displacements"):
        logits.at(steps[:, :2])
    with pytest.raises(ValueError, match="coordinate"):
        positional_logits(build("linear"), length=N, words=[7], progress=False).at(steps)


def test_bands_that_do_not_rotate_have_no_axis():
    found = rotary_bands(build("a quarter of the dimensions"), None, batch(tokens(2, N)), special_tokens=True)
    rotating = found.wavelength.isfinite()
    assert torch.equal(found.axis >= 0, rotating)
    assert rotating.any()
    assert not rotating.all()
    assert (
        rotary_bands(build("layers without rotations"), None, batch(tokens(2, N)), special_tokens=True).axis[1] < 0
    ).all()


def test_models_without_rotations_are_refused():
    with pytest.raises(ValueError, match="does not rotate"):
        rotary_bands(tiny("bert"), None, batch(tokens(1, N)), special_tokens=True)
    with pytest.raises(ValueError, match="layers"):
        rotary_bands(build("linear"), None, batch(tokens(1, N)), special_tokens=True, layers=[5])
    with pytest.raises(ValueError, match="texts"):
        rotary_bands(build("linear"), None, [])
