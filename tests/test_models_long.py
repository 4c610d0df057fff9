"""Texts and words measured without a matrix, against metrics of the matrices that the model itself returns."""

import copy

import pytest
import torch
import transformers as hf

import pelocality
from pelocality import ALiBi, SequenceModel, attach, metrics, positional_attention, text_average
from pelocality.models import AveragedMetrics, identical_patches, observer
from pelocality.models.measuring import rows
from tests.families import eagerly, tiny, tiny_any, tokens

N = 23
LENGTHS = [23, 9, 4, 23]
TOLERANCE = 5e-6  # some of these models take the softmax in float32
NAMES = ["bert", "t5", "llama", "mistral", "gemma2", "gpt_oss"]  # window, soft-capping and scale, sinks
COMPLEMENTS = ("past_locality", "adjusted_locality", "mean_distance", "sink_rate", "window")


def model_of(name, dtype=torch.float64):
    dtype = torch.float32 if name == "gemma2" else dtype  # in float64 its padding cannot be observed
    return (tiny_any if name in ("gemma2", "gpt_oss") else tiny)(name).to(dtype)


def padded(left=False):
    ids, mask = tokens(len(LENGTHS), N), torch.zeros(len(LENGTHS), N, dtype=torch.long)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[N - length if left else 0 :][:length] = 1
    return ids, mask


def matrices_of(model, ids):
    """Return what the model itself returns of one text, rows renormalised, (layer, head, n, n), and what sinks got."""
    with eagerly(model), torch.no_grad():
        weights = torch.cat(model(input_ids=ids[None], output_attentions=True, use_cache=False).attentions).double()
    total = weights.sum(-1, keepdim=True)
    return weights / total, 1 - total.mean((-2, -1))


@pytest.mark.filterwarnings("ignore:the attention is one-sided")
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_metrics_of_matrices(name, left, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 2000)  # several blocks
    model, (ids, mask) = model_of(name), padded(left)
    result = text_average(model, [{"input_ids": ids, "attention_mask": mask}], special_tokens=True, matrices=False)
    causal = name not in ("bert", "t5")
    assert result.source.causal == causal
    assert result.source.texts == len(LENGTHS)
    mass = pairs = 0
    for text, (row, seen) in enumerate(zip(ids, mask.bool(), strict=True)):
        weights, sink = matrices_of(model, row[seen])
        n = weights.shape[-1]
        visible = (weights > 0).any(1, keepdim=True)
        measured = metrics.measure(weights)
        expected = dict(vars(measured)) | {"cut_share": torch.zeros_like(measured.locality)}
        for each in COMPLEMENTS[0 if causal else 1 :]:
            more = {"visible": visible} if each == "adjusted_locality" else {}
            expected[each] = getattr(metrics, each)(weights, **more)
        if name == "gpt_oss":
            expected["learned_sink"] = sink
            assert set(result.per_sample) - set(expected) == {f"{each}_with_sink" for each in vars(measured)}
        else:
            assert set(result.per_sample) == set(expected)
        for each, values in expected.items():
            torch.testing.assert_close(result.per_sample[each][text], values.double(), rtol=0, atol=TOLERANCE, msg=each)
        distance = torch.arange(n) - torch.arange(n)[:, None]
        of_text = [weights[..., distance == k].sum(-1) for k in range(1 - N, N)]
        mass, pairs = mass + torch.stack(of_text, -1), pairs + (n - torch.arange(1 - N, N).abs()).clamp(min=0)
        if n == N:
            assert result.visible_keys == tuple(visible.sum(-1).amax((-2, -1)).tolist())
    torch.testing.assert_close(result.profile, mass / pairs, rtol=0, atol=1e-6)
    assert result.counts.tolist() == [sum(length > i for length in LENGTHS) for i in range(N)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"prefix": 7}, {"layers": [-1]}])
def test_words_have_the_metrics_of_their_matrices(name, options, monkeypatch):
    monkeypatch.setattr(rows, "_BLOCK", 500)
    model = model_of(name)
    short, long = (positional_attention(model, length=N, words=5, matrices=each, **options) for each in (True, False))
    for each, values in short.per_sample.items():
        torch.testing.assert_close(long.per_sample[each], values.double(), rtol=0, atol=TOLERANCE, msg=each)
    torch.testing.assert_close(long.profile, short.profile.double(), rtol=0, atol=1e-6)
    same = ("source", "layers", "visible_keys", "length", "heads")
    assert [getattr(long, each) for each in same] == [getattr(short, each) for each in same]
    assert long.to_frame()["layer"].tolist() == short.to_frame()["layer"].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_lower_precision_has_the_numbers_of_its_matrices(name, implementation, dtype):
    model, (ids, mask) = model_of(name, dtype), padded()
    model.config._attn_implementation = implementation
    with attach(model, ALiBi(model.config.num_attention_heads)):
        texts = [{"input_ids": ids, "attention_mask": mask}]
        short, long = (text_average(model, texts, special_tokens=True, matrices=each) for each in (True, False))
    for each, values in short.per_sample.items():
        torch.testing.assert_close(long.per_sample[each], values, rtol=0, atol=1e-5, msg=each)
    assert long.source == short.source
    assert "ALiBi" in long.source.encoding


def test_tokens_that_do_not_count_are_left_out_of_long_texts():
    model, ids = model_of("bert"), tokens(3, N)
    special = torch.zeros_like(ids)
    special[:, 0] = special[:, -1] = 1
    text = [{"input_ids": ids, "special_tokens_mask": special}]
    result = text_average(model, text, length=20, without_first=2, matrices=False)
    cropped = torch.stack([matrices_of(model, row)[0][..., 3:20, 3:20] for row in ids])
    cut = 1 - cropped.sum(-1).mean(-1)
    cropped = cropped / cropped.sum(-1, keepdim=True)
    torch.testing.assert_close(result.per_sample["cut_share"], cut, rtol=0, atol=1e-7)
    torch.testing.assert_close(result.per_sample["locality"], metrics.locality(cropped), rtol=0, atol=1e-7)
    torch.testing.assert_close(result.profile, metrics.distance_profile(cropped.mean(0)), rtol=0, atol=1e-7)
    assert (result.length, result.source.left_out) == (17, 3)


def test_no_square_tensor_is_made_of_long_inputs(monkeypatch):
    n, largest = 1024, []
    compute = observer.kernel_weights

    def weights(call):
        result = compute(call)
        largest.append(result[0].numel())
        return result

    monkeypatch.setattr(observer, "kernel_weights", weights)
    monkeypatch.setattr(rows, "_BLOCK", 2**14)
    model = tiny("t5")
    result = text_average(model, [{"input_ids": tokens(1, n)}], special_tokens=True, length=n, matrices=False)
    assert result.length == n
    assert sum(largest) >= 3 * 2 * n**2
    assert max(largest[3:]) <= 2**14  # the first ones find the layers


def test_what_needs_matrices_names_them(tmp_path):
    result = text_average(tiny("gpt2"), [{"input_ids": tokens(4, 9)}], special_tokens=True, matrices=False)
    for name in ("attention", "visible", "share", "metric_of_mean"):
        with pytest.raises(ValueError, match="matrices=True"):
            getattr(result, name)
    for use in (metrics.locality, pelocality.models.rollout, lambda each: each.to_frame(metrics="entropy")):
        with pytest.raises((ValueError, TypeError)):
            use(result)
    assert not any(name.endswith("_of_mean") for name in result.to_frame())
    assert not hasattr(result, "anything")
    result.save(tmp_path / "long.safetensors")
    loaded = AveragedMetrics.load(tmp_path / "long.safetensors")
    assert repr(copy.deepcopy(loaded)) == repr(result)
    assert loaded.source == result.source
    assert torch.equal(loaded.profile, result.profile)
    low, high = loaded.interval("sink_rate")
    assert bool((low <= high).all())
    assert set(loaded.per_sample) == set(
        text_average(tiny("gpt2"), [{"input_ids": tokens(4, 9)}], special_tokens=True).per_sample
    )


def test_models_without_a_line_of_tokens_are_measured_with_matrices():
    on_grid = SequenceModel(tiny("bert"), positions=lambda n: [[i // 3, i % 3] for i in range(n)])
    vit = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    images = SequenceModel(hf.ViTModel(hf.ViTConfig(**vit, image_size=12, patch_size=4)), inputs=identical_patches(4))
    for model, measure in (
        (on_grid, lambda each: text_average(each, [{"input_ids": tokens(2, 9)}], special_tokens=True, matrices=False)),
        (on_grid, lambda each: positional_attention(each, length=9, words=2, matrices=False)),
        (images, lambda each: positional_attention(each, length=9, words=2, matrices=False)),
    ):
        with pytest.raises(ValueError, match="matrices=True"):
            measure(model)
    with pytest.raises(TypeError, match="matrices"):
        text_average(tiny("bert"), ["a"], matrices=1)
