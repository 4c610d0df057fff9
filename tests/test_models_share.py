"""position_share on attention with a known share, and on models."""

import math

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality.encodings import ALiBi
from pelocality.models import attach, position_share, positional_attention
from pelocality.models.measuring.text import TextSums
from tests.families import FAMILIES, UNKNOWN, base_of, same, state, tiny, tokens
from tests.test_models_words import byte_level, wordpiece

N = 9


def batches(count, size=4, length=N, seed=0):
    return [{"input_ids": tokens(size, length, seed + i)} for i in range(count)]


def share_of(matrices, causal=False):
    """Return the share of attention matrices (sentence, n, n) over all tokens."""
    n = matrices.shape[-1]
    sums = TextSums((0,), {}, 1)
    pairs = torch.ones(len(matrices), n, n, dtype=torch.bool)
    sums.add(0, matrices[:, None], pairs.tril() if causal else pairs)
    return float(sums.share())


def slow_share(matrices, masks):
    """Compute the definition: predict every sentence from the others, one entry at a time."""
    error = squares = 0.0
    n = matrices.shape[-1]
    deviations = []
    for matrix, mask in zip(matrices, masks, strict=True):
        seen = {}
        for i in range(n):
            keys = [j for j in range(n) if mask[i, j]]
            total = sum(float(matrix[i, j]) for j in keys)
            for j in keys:
                seen[i, j] = float(matrix[i, j]) / total - 1 / len(keys)
        deviations.append(seen)
    for i in range(n):
        for j in range(n):
            values = [seen[i, j] for seen in deviations if (i, j) in seen]
            if len(values) < 2:
                continue
            for index, value in enumerate(values):
                others = values[:index] + values[index + 1 :]
                error += (value - sum(others) / len(others)) ** 2
                squares += value**2
    return 1 - error / squares


def test_attention_by_position_alone_has_share_one():
    matrix = torch.randn(N, N, dtype=torch.float64).softmax(-1)
    assert share_of(matrix.expand(5, N, N)) == pytest.approx(1)


def test_attention_that_ignores_position_has_share_minus_one_over_the_others():
    torch.manual_seed(0)
    for sentences in (3, 10, 100):
        content = torch.randn(sentences, 40, 40, dtype=torch.float64).softmax(-1)
        assert share_of(content) == pytest.approx(-1 / (sentences - 1), abs=0.01)


def test_a_mixture_has_the_share_of_its_variance():
    """D = position + independent noise of the same variance: half of the sum of squares is position."""
    torch.manual_seed(0)
    sentences, n = 400, 30
    position = torch.randn(n, n, dtype=torch.float64)
    noise = torch.randn(sentences, n, n, dtype=torch.float64)
    position, noise = (x - x.mean(-1, keepdim=True) for x in (position, noise))
    deviation = 0.1 / n * (position / position.std() + noise / noise.std())
    assert share_of(1 / n + deviation) == pytest.approx(0.5, abs=0.02)


def test_the_share_of_uniform_attention_is_nan():
    assert math.isnan(share_of(torch.full((5, N, N), 1 / N)))
    causal = torch.ones(5, N, N).tril()
    assert math.isnan(share_of(causal / causal.sum(-1, keepdim=True), causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_of_uniform_attention_gives_nan_and_larger_deviations_a_share(dtype):
    eps = torch.finfo(dtype).eps
    # the logits of position, far below and far above what one weight is rounded by
    faint, clear = ((scale * torch.randn(N, N).double()).softmax(-1).to(dtype) for scale in (eps / 4, 64 * eps))
    assert math.isnan(share_of(faint.expand(6, N, N)))
    assert share_of(clear.expand(6, N, N)) > 0.99


def test_one_pass_equals_the_definition_with_lengths_that_differ():
    torch.manual_seed(0)
    matrices = torch.randn(6, N, N, dtype=torch.float64).softmax(-1)
    masks = torch.zeros(6, N, N, dtype=torch.bool)
    for sentence, (start, stop) in enumerate([(0, 9), (1, 8), (1, 5), (0, 4), (2, 9), (0, 2)]):
        masks[sentence, start:stop, start:stop] = True
    sums = TextSums((0,), {}, 1)
    for matrix, mask in zip(matrices, masks, strict=True):
        sums.add(0, matrix[None, None], mask[None])
    assert float(sums.share()) == pytest.approx(slow_share(matrices, masks), abs=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_constant_content_are_positional(name):
    """Every word has the same vector, so attention depends on position only."""
    model = tiny(name)
    embedding = base_of(model).get_input_embeddings()
    with torch.no_grad():
        embedding.weight[:] = embedding.weight[7]
    result = position_share(model, batches(3), special_tokens=True)
    assert (result.share - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_a_share_that_is_not_one_on_text(name):
    model = tiny(name).train()
    before = state(model)
    result = position_share(model, batches(5), special_tokens=True)
    assert same(before, state(model))
    assert result.share.shape == (3, result.prediction.shape[1])
    assert result.share[0].min() < 0.9
    assert result.source.texts == 20


def test_prediction_is_the_mean_deviation_from_uniform():
    model = tiny("bert")
    ids = tokens(6, N)
    result = position_share(model, [{"input_ids": ids}], special_tokens=True, length=N)
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        maps = torch.stack(model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(result.prediction, maps.mean(1) - 1 / N)
    assert (result.counts == 6).all()


def test_the_batch_size_does_not_change_the_share():
    model, ids = tiny("gpt2"), tokens(12, N)
    whole = position_share(model, [{"input_ids": ids}], special_tokens=True)
    parts = position_share(model, ({"input_ids": part} for part in ids.split(5)), special_tokens=True)
    rows = position_share(model, [{"input_ids": row.tolist()} for row in ids], special_tokens=True)
    for other in (parts, rows):
        torch.testing.assert_close(other.share, whole.share, equal_nan=True)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "bloom", "xlnet", "deberta", "t5", "llama"])
def test_padding_on_either_side_is_excluded(name):
    model = tiny(name).float()
    lengths = [9, 6, 8, 7]
    texts = [tokens(1, n, seed)[0] for seed, n in enumerate(lengths)]
    alone = position_share(model, [{"input_ids": text} for text in texts], special_tokens=True)
    for side in ("left", "right"):
        ids, mask = torch.ones(4, 9, dtype=torch.long), torch.zeros(4, 9, dtype=torch.long)
        for row, text in enumerate(texts):
            where = slice(9 - len(text), 9) if side == "left" else slice(0, len(text))
            ids[row, where], mask[row, where] = text, 1
        padded = position_share(model, [{"input_ids": ids, "attention_mask": mask}], special_tokens=True)
        torch.testing.assert_close(padded.share, alone.share, atol=1e-4, rtol=0, equal_nan=True)
        assert torch.equal(padded.counts, alone.counts)


def test_special_tokens_are_excluded_by_mask_or_by_tokenizer():
    tokenizer = wordpiece()
    model = hf.BertModel(hf.BertConfig(**tiny("bert").config.to_dict() | {"vocab_size": 97})).eval()
    ids = torch.tensor([[2, 6, 7, 10, 3], [2, 7, 6, 5, 3], [2, 1, 10, 6, 3]])  # [CLS] ... [SEP], one [UNK]
    mask = torch.tensor([[1, 0, 0, 0, 1]] * 3)
    by_mask = position_share(model, [{"input_ids": ids, "special_tokens_mask": mask}])
    by_tokenizer = position_share(model, [{"input_ids": ids}], tokenizer=tokenizer)
    torch.testing.assert_close(by_mask.share, by_tokenizer.share, equal_nan=True)
    assert (by_mask.counts[:, 1:4, 1:4] == 3).all()  # an unknown word is a word
    assert by_mask.counts.sum() == 3 * 9 * 3
    counted = position_share(model, [{"input_ids": ids}], special_tokens=True)
    assert (counted.counts[:, :5, :5] == 3).all()
    assert not torch.allclose(counted.share, by_mask.share)


def test_a_token_that_is_unknown_and_end_of_text_at_once_is_special():
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    ids = torch.tensor([[end, 20, 21, 22], [end, 23, 24, 25]])
    result = position_share(tiny("gpt2"), [{"input_ids": ids}], tokenizer=tokenizer)
    assert result.counts[:, 0].sum() == 0
    assert (result.counts[:, 1:4, 1].flatten() == 2).all()


def test_positions_beyond_the_length_are_read_but_not_measured():
    model = tiny("bert")
    short = position_share(model, batches(3), special_tokens=True, length=4)
    assert short.counts.shape == (3, 4, 4)
    assert (short.counts == 12).all()
    whole = position_share(model, batches(3), special_tokens=True, length=N)
    assert not torch.allclose(short.share, whole.share)


def test_a_length_beyond_every_text_gives_matrices_of_the_longest_text():
    model = tiny("bert")
    long = position_share(model, batches(3), special_tokens=True, length=10**6)
    assert long.prediction.shape == (3, 2, N, N)
    assert long.counts.shape == (3, N, N)
    torch.testing.assert_close(long.share, position_share(model, batches(3), special_tokens=True, length=N).share)


def test_chosen_layers_have_the_share_that_they_have_among_all():
    model = tiny("bert")
    whole = position_share(model, batches(2), special_tokens=True)
    some = position_share(model, batches(2), special_tokens=True, layers=[2, 0])
    assert some.layers == (2, 0)
    torch.testing.assert_close(some.share, whole.share[[2, 0]])
    assert some.to_frame()["layer"].tolist() == [2, 2, 0, 0]
    with pytest.raises(ValueError, match="layers"):
        position_share(model, batches(2), special_tokens=True, layers=[3])


def test_later_batches_may_be_longer():
    model = tiny("gpt2")
    texts = [tokens(2, length, length) for length in (3, 9, 5)]
    found = position_share(model, [{"input_ids": text} for text in texts], special_tokens=True)
    assert found.counts[0, :, 0].tolist() == [6, 6, 6, 4, 4, 2, 2, 2, 2]


def test_empty_batches_are_skipped():
    model = tiny("bert")
    empty = [{"input_ids": torch.empty(0, N, dtype=torch.long)}, {"input_ids": []}]
    found = position_share(model, [*empty, *batches(2), *empty], special_tokens=True)
    torch.testing.assert_close(found.share, position_share(model, batches(2), special_tokens=True).share)
    assert found.source.texts == 8
    with pytest.raises(ValueError, match="texts is empty"):
        position_share(model, empty, special_tokens=True)


def test_an_attached_encoding_is_named():
    model = tiny("bert")
    with attach(model, ALiBi(2)):
        found = position_share(model, batches(2), special_tokens=True)
    assert found.source.encoding.startswith("ALiBi(heads=2")
    assert repr(found).startswith("PositionShare of BertModel with ALiBi attached: 3 layers")
    assert position_share(model, batches(2), special_tokens=True).source.encoding is None


def test_only_visible_keys_are_measured():
    for name in ("llama", "gpt2"):
        found = position_share(tiny(name), batches(2), special_tokens=True)
        counts = found.counts
        assert found.source.causal
        assert counts.triu(1).sum() == 0
        assert (counts[:, :N, :N].tril().sum((1, 2)) == 8 * N * (N + 1) / 2).all()
    local = position_share(tiny("modernbert"), batches(2), special_tokens=True).counts
    assert (local[0, :N, :N] == 8).all()
    assert local[1, 0, 4] == 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_families_without_a_record_are_measured_with_their_causal_mask(name):
    result = position_share(UNKNOWN[name]().eval(), batches(3), special_tokens=True)
    assert (result.counts.triu(1).sum() == 0) == (name == "gpt_neox")


def test_a_positional_head_has_a_higher_share_than_a_contextual_one():
    """One model whose first head attends by position and whose second attends by words."""
    model = tiny("bert")
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        model.embeddings.word_embeddings.weight[:, 8:] = 0
        model.embeddings.position_embeddings.weight[:, :8] = 0
        model.embeddings.position_embeddings.weight[:, 8:].normal_(0, 1)
        model.embeddings.token_type_embeddings.weight.zero_()
        model.embeddings.LayerNorm.weight.fill_(1)
        model.embeddings.LayerNorm.bias.zero_()
        for projection in (attention.query, attention.key):
            projection.bias.zero_()
            projection.weight.zero_()
            projection.weight[:8, 8:].normal_(0, 1)
            projection.weight[8:, :8].normal_(0, 1)
    share = position_share(model, batches(20), special_tokens=True).share[0]
    assert share[0] > 0.8
    assert share[1] < 0.2


def test_repr_and_to_frame_show_the_share_by_layer():
    result = position_share(tiny("bert"), batches(2), special_tokens=True)
    assert repr(result).startswith("PositionShare of BertModel: 3 layers x 2 heads, 8 texts, special tokens counted")
    assert "<table" in result._repr_html_()
    frame = result.to_frame()
    assert frame.columns.tolist() == ["layer", "head", "share"]
    assert frame["share"][3] == pytest.approx(float(result.share[1, 1]))


def test_probing_and_text_agree_without_content():
    model = tiny("gpt2")
    with torch.no_grad():
        model.wte.weight[:] = model.wte.weight[7]
    result = position_share(model, batches(2), special_tokens=True, length=N)
    uniform = torch.ones(N, N).tril().div(torch.arange(1, N + 1)[:, None])
    seen = torch.where(torch.ones(N, N).tril().bool(), result.prediction + uniform, 0.0)
    torch.testing.assert_close(seen, positional_attention(model, length=N, words=[9]).attention)


@pytest.mark.parametrize(
    ("given", "arguments", "error", "message"),
    [
        ({"input_ids": tokens(2, 4)}, {}, TypeError, r"^texts must be .*, got one batch; pass \[batch\]"),
        ([], {"special_tokens": True}, ValueError, "texts is empty"),
        ([[1, 2]], {}, TypeError, "mappings with input_ids, .*, got list"),
        ([{"labels": 1}], {}, TypeError, "mappings with input_ids, .*, got dict"),
        ([{"input_ids": tokens(2, 4)}], {}, ValueError, "special tokens cannot be identified"),
        ([{"input_ids": torch.rand(2, 4)}], {}, TypeError, "must be integers"),
        ([{"input_ids": [[1, 2], [3]]}], {}, ValueError, "different lengths; pad them"),
        ([{"input_ids": tokens(2, 4), "attention_mask": torch.ones(2, 5)}], {}, ValueError, "shape of input_ids"),
        ([{"input_ids": tokens(1, 3), "attention_mask": [[1, 0, 1]]}], {}, ValueError, "holes"),
        ([{"input_ids": tokens(1, 3), "attention_mask": [[0, 0, 0]]}], {}, ValueError, "hides all tokens"),
        ([{"input_ids": tokens(1, 3), "special_tokens_mask": [[1, 2, 0]]}], {}, ValueError, "1 for special tokens"),
        (
            [{"input_ids": torch.tensor([[5, 0], [6, 7]])}],
            {},
            ValueError,
            "padding id 0 but there is no attention_mask",
        ),
        ([{"input_ids": tokens(1, 4)}], {"special_tokens": True}, ValueError, "two texts"),
        ([{"input_ids": tokens(2, 41)}], {"special_tokens": True}, ValueError, "beyond the 40 positions"),
        (
            [{"input_ids": torch.full((2, 4), 97)}],
            {"special_tokens": True},
            ValueError,
            r"in 0\.\.96, .* got 97; is this",
        ),
        ([{"input_ids": tokens(2, 4)}], {"tokenizer": "bert"}, TypeError, "got the string 'bert'; load it with"),
        ([{"input_ids": tokens(2, 4)}], {"length": 1}, ValueError, "length must be at least 2"),
    ],
)
def test_invalid_input_raises_and_does_not_change_the_model(given, arguments, error, message):
    model = tiny("bert").train()
    before = state(model)
    with pytest.raises(error, match=message):
        position_share(model, given, **arguments)
    assert same(before, state(model))


def test_an_object_that_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        position_share(nn.Linear(2, 2), batches(1))
