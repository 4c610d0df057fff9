"""Functions from token ids to attention, measured like models."""

import numpy as np
import pytest
import torch
from torch import nn

from pelocality.encodings import ALiBi
from pelocality.metrics import locality
from pelocality.models import AttentionFunction, positional_attention, text_average
from tests.families import tiny, tokens

N = 9


def recorded(ids):
    """Attention of a tiny model as arrays, as another framework would return it."""
    model = tiny("gpt2")
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return [weights.numpy() for weights in model(torch.as_tensor(ids), output_attentions=True).attentions]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(50, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids):
        states = self.dropout(self.embeddings(ids))
        return [(states @ states.mT).softmax(-1)[:, None]]


def test_a_function_gives_what_the_model_behind_it_gives():
    function, model = AttentionFunction(recorded, vocabulary_size=97, name="recorded"), tiny("gpt2")
    found = positional_attention(function, length=N, words=[7, 9])
    expected = positional_attention(model, length=N, words=[7, 9])
    torch.testing.assert_close(found.attention, expected.attention)
    assert torch.equal(found.visible, expected.visible)
    assert repr(found).startswith("PositionalAttention of recorded: 3 layers x 2 heads")
    text = [{"input_ids": tokens(3, N)}]
    found, expected = (text_average(each, text, special_tokens=True) for each in (function, model))
    torch.testing.assert_close(found.share, expected.share)


def test_a_module_is_run_in_evaluation_mode_and_restored():
    module = Own().train()
    result = positional_attention(AttentionFunction(module, 50), length=N, words=[3])
    torch.testing.assert_close(result.attention, torch.full((1, 1, N, N), 1 / N))
    assert module.training
    assert module.dropout.training
    assert repr(result).startswith("PositionalAttention of Own")


def test_one_array_of_all_layers_is_enough():
    weights = np.random.default_rng(0).dirichlet(np.ones(N), (2, 3, N)).astype("float32")  # (layer, head, n, n)

    def function(ids):
        return np.broadcast_to(weights[:, None], (2, len(ids), 3, N, N))

    result = positional_attention(AttentionFunction(function, 50), length=N, words=4)
    torch.testing.assert_close(locality(result), locality(torch.from_numpy(weights)))


def test_a_softmax_without_a_batch_axis_has_as_many_heads_for_one_text_as_for_several():
    weights = ALiBi(8).weights(N)
    function = AttentionFunction(lambda ids: [ALiBi(8)(ids.shape[1]).softmax(-1).expand(len(ids), -1, -1, -1)], 50)
    for words in (1, 3, 4, 8):
        result = positional_attention(function, length=N, words=words)
        torch.testing.assert_close(result.attention[0], weights)
        torch.testing.assert_close(result.per_sample["locality"], locality(weights).expand(words, 1, -1))
    text = [{"input_ids": tokens(4, N, seed) % 50} for seed in range(2)]
    mean = text_average(function, text, special_tokens=True)
    torch.testing.assert_close(mean.mean_of_metric.locality[0], locality(weights), check_dtype=False)
    torch.testing.assert_close(mean.share, torch.ones(1, 8).double())


def test_a_softmax_of_other_heads_than_before_is_refused():
    function = AttentionFunction(lambda ids: [torch.zeros(len(ids), 2 + len(ids), N, N).softmax(-1)], 50)
    with pytest.raises(ValueError, match="the attention of layer 0 is not one of 3 heads for each text"):
        positional_attention(function, length=N, words=4)


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        (lambda ids: [torch.ones(len(ids), 1, N, N)], ValueError, "do not sum to 1"),
        (lambda ids: [torch.ones(len(ids), N, 8)], ValueError, r"\(1, heads, 9, 9\)"),
        (lambda ids: [torch.eye(N, dtype=torch.int64)[None, None]], TypeError, "float"),
        (lambda ids: [np.eye(N, dtype=bool)[None, None]], TypeError, "astype"),
        (lambda ids: 1 / 0, ValueError, "on 1 x 9 tokens it fails with ZeroDivisionError"),
        (3, ValueError, "fails with TypeError: 'int' object is not callable"),
    ],
)
def test_what_is_not_attention_or_cannot_be_run_is_refused(function, error, reason):
    with pytest.raises(error, match=reason):
        positional_attention(AttentionFunction(function, 50), length=N, words=[3])


def test_padding_is_refused():
    padded = {"input_ids": tokens(2, N), "attention_mask": torch.tensor([[1] * N, [1] * 4 + [0] * 5])}
    with pytest.raises(ValueError, match="padding"):
        text_average(AttentionFunction(recorded, 97), [padded], special_tokens=True)


def test_a_random_function_is_refused():
    torch.manual_seed(0)
    embed, attend, drop = nn.Embedding(30, 8), nn.MultiheadAttention(8, 2, batch_first=True), nn.Dropout(0.5)

    def function(ids):
        hidden = drop(embed(ids))
        return [attend(hidden, hidden, hidden, average_attn_weights=False)[1]]

    model = AttentionFunction(function, vocabulary_size=30)
    with pytest.raises(ValueError, match=r"\.eval\(\)"):
        positional_attention(model, length=6, words=3)
    drop.eval()
    once, again = (positional_attention(model, length=6, words=3).attention for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
