"""The result of identical-word probing: tables, intervals, saving and loading."""

import copy
import dataclasses

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from scipy import stats

from pelocality import metrics
from pelocality.encodings import ALiBi, AttenuatedEncoding
from pelocality.models import PositionalAttention, attach, positional_attention
from tests.families import tiny
from tests.test_models_words import wordpiece

METRICS = ("locality", "symmetry", "relative_asymmetry")


@pytest.fixture(scope="module")
def result():
    return positional_attention(tiny("bert"), length=10, words=9)


def test_interval_is_the_t_interval_over_words(result):
    for name in METRICS:
        low, high = result.interval(name, confidence=0.9)
        for layer in range(3):
            for head in range(2):
                values = result.per_sample[name][:, layer, head].numpy()
                expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
                assert float(low[layer, head]) == pytest.approx(expected.low)
                assert float(high[layer, head]) == pytest.approx(expected.high)


def test_the_interval_of_a_single_word_is_nan():
    low, high = positional_attention(tiny("bert"), length=6, words=[7]).interval()
    assert low.isnan().all()
    assert high.isnan().all()


def test_frame_has_one_row_per_layer_and_head(result):
    frame = result.to_frame()
    assert frame[["layer", "head"]].values.tolist() == [[layer, head] for layer in range(3) for head in range(2)]
    row = frame[(frame["layer"] == 2) & (frame["head"] == 1)].iloc[0]
    for name in METRICS:
        low, high = result.interval(name)
        assert row[name] == pytest.approx(float(getattr(result.mean_of_metric, name)[2, 1]))
        assert row[f"{name}_of_mean"] == pytest.approx(float(getattr(result.metric_of_mean, name)[2, 1]))
        assert row[f"{name}_low"] == pytest.approx(float(low[2, 1]))
        assert row[f"{name}_high"] == pytest.approx(float(high[2, 1]))


def test_frame_by_layer_averages_heads_before_the_interval(result):
    frame = result.to_frame("layer")
    assert frame["layer"].tolist() == [0, 1, 2]
    over_heads = result.per_sample["symmetry"].mean(-1)[:, 1].numpy()
    assert frame["symmetry"][1] == pytest.approx(over_heads.mean())
    expected = stats.ttest_1samp(over_heads, 0).confidence_interval(0.95)
    assert frame["symmetry_low"][1] == pytest.approx(expected.low)


def test_saving_and_loading_gives_the_same_result(result, tmp_path):
    result.save(tmp_path / "probe.safetensors")
    loaded = PositionalAttention.load(tmp_path / "probe.safetensors")
    assert torch.equal(loaded.attention, result.attention)
    assert loaded.layers == result.layers
    assert loaded.source == result.source
    for name in METRICS:
        assert torch.equal(loaded.per_sample[name], result.per_sample[name])
    assert loaded.to_frame().equals(result.to_frame())


def test_loading_another_file_raises(tmp_path):
    save_file({"attention": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(SafetensorError):
        PositionalAttention.load(tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="is not a saved PositionalAttention"):
        PositionalAttention.load(tmp_path / "other.safetensors")


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        PositionalAttention.load(tmp_path / "absent.safetensors")


def test_the_repr_is_a_table_by_layer(result):
    lines = repr(result).splitlines()
    assert lines[0] == (
        "PositionalAttention of BertModel: 3 layers x 2 heads, n = 10, mean over 9 words, no special tokens"
    )
    assert lines[1].split() == ["layer", "locality", "symmetry", "symmetry_of_mean", "relative_asymmetry"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "mean"]
    mean = result.to_frame("layer")["locality"].mean()
    assert lines[-1].split()[1] == f"{mean:.3f}"


def test_the_html_repr_has_the_same_numbers(result):
    html = result._repr_html_()
    assert "n = 10" in html
    assert f"<td>{result.to_frame('layer')['locality'][1]:.3f}</td>" in html
    named = dataclasses.replace(result, source=dataclasses.replace(result.source, model="<script>"))
    assert "<script>" not in named._repr_html_()


@pytest.mark.parametrize("name", ["llama", "t5", "deberta"])
def test_relative_positions_alone_are_noted(name):
    for model in (tiny(name), tiny(name).float(), tiny(name).to(torch.bfloat16)):
        result = positional_attention(model, length=12, words=4)
        assert result.source.equal_states
        assert "relative positions alone" in repr(result)
        assert "relative positions alone" in result._repr_html_()


@pytest.mark.parametrize("name", ["bert", "gpt2", "deberta with absolute positions"])
def test_absolute_positions_make_states_differ(name):
    for model in (tiny(name), tiny(name).float(), tiny(name).to(torch.bfloat16)):
        assert not positional_attention(model, length=12, words=4).source.equal_states


def test_a_few_huge_dimensions_do_not_hide_that_states_differ():
    model = tiny("gpt2").float()
    with torch.no_grad():
        model.wte.weight[:, 0] = 1e6
    assert not positional_attention(model, length=12, words=4).source.equal_states


def test_a_first_token_that_differs_makes_states_differ():
    tokenizer = wordpiece()
    result = positional_attention(tiny("llama"), tokenizer, length=8, words=[7], special_tokens=True)
    assert not result.source.equal_states


def test_uniform_layers_with_equal_states_are_noted():
    model = tiny("llama")
    with torch.no_grad():
        for layer in (1, 2):
            model.layers[layer].self_attn.q_proj.weight.zero_()
    text = repr(positional_attention(model, length=8, words=4))
    assert "uniform (within 5%), on text maybe not: layers 1, 2" in text


def test_an_attached_encoding_is_part_of_the_source(tmp_path):
    model = tiny("bert")
    with attach(model, ALiBi(2), position_embeddings="keep"):
        result = positional_attention(model, length=8, words=4)
    assert result.source.encoding.startswith("ALiBi(heads=2, slopes=[")
    assert result.source.encoding.endswith("position_embeddings='keep'")
    assert repr(result).startswith("PositionalAttention of BertModel with ALiBi attached: 3 layers")
    result.save(tmp_path / "probe.safetensors")
    assert PositionalAttention.load(tmp_path / "probe.safetensors").source == result.source
    assert positional_attention(model, length=8, words=4).source.encoding is None


def test_encodings_that_differ_between_layers_are_all_in_the_source():
    model = tiny("bert")
    with attach(model, [AttenuatedEncoding(decay=decay) for decay in (0.1, 0.2, 0.1)]):
        encoding = positional_attention(model, length=8, words=4).source.encoding
    assert encoding.count("decay=0.1") == encoding.count("decay=0.2") == 1


def test_the_source_holds_model_words_and_versions(result):
    source = result.source
    assert (source.model_class, source.model_type, source.dtype) == ("BertModel", "bert", "float64")
    assert len(source.words) == len(source.word_ids) == 9
    assert set(source.versions) == {"pelocality", "torch", "transformers"}
    assert result.length == 10


def test_wrong_names_are_refused_with_those_that_are_right(result):
    for call, reason in [
        (lambda: result.interval("entropy"), "metric must be 'locality', "),
        (lambda: result.interval(metrics.locality), "metric must be 'locality', "),
        (lambda: result.interval(confidence=95), "confidence"),
        (lambda: result.to_frame(by="word"), "by must be 'head' or 'layer'"),
        (lambda: result.to_frame(metrics="nearness"), "metrics .*'nearness'"),
        (lambda: result.to_frame(metrics=["monotonicity"]), "metrics .*monotonicity"),
        (lambda: result.to_frame(metrics={"one": lambda _: 1.0}), "metrics .*one"),
        (lambda: result.to_frame(metrics="measure"), "metrics .*measure"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
    assert repr(copy.deepcopy(result)) == repr(result)


def test_causal_results_show_metrics_that_mean_something_there():
    result = positional_attention(tiny("gpt2"), length=8, words=4)
    shown = ["past_locality", "adjusted_locality", "mean_distance", "sink_rate", "window"]
    frame = result.to_frame("layer")
    assert [column for column in frame if not column.endswith(("_low", "_high", "_of_mean"))] == [
        "layer", *shown, "visible_keys"
    ]  # fmt: skip
    assert repr(result).splitlines()[1].split() == ["layer", *shown]
    for name in shown:
        of_mean = getattr(metrics, name)(result)
        torch.testing.assert_close(torch.tensor(frame[f"{name}_of_mean"]), of_mean.mean(-1))
    matrices = [positional_attention(tiny("gpt2"), length=8, words=[word]) for word in result.source.word_ids]
    by_word = torch.stack([metrics.past_locality(each) for each in matrices])
    torch.testing.assert_close(result.per_sample["past_locality"], by_word)


def test_a_frame_holds_any_metric(result):
    frame = result.to_frame(metrics=["entropy", "symmetry"])
    assert frame.columns.tolist() == [
        "layer", "head", "entropy_of_mean", "symmetry", "symmetry_low", "symmetry_high", "symmetry_of_mean",
        "visible_keys",
    ]  # fmt: skip
    torch.testing.assert_close(torch.tensor(frame["entropy_of_mean"]), metrics.entropy(result).flatten())
    own = result.to_frame("layer", metrics={"two sinks": lambda one: metrics.sink_rate(one, 2)})
    torch.testing.assert_close(torch.tensor(own["two sinks_of_mean"]), metrics.sink_rate(result, 2).mean(-1))
