"""The effect of a part's place on its score."""

from itertools import permutations

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from pelocality import NoEncoding, attach
from pelocality.evaluation import similarity_to_parts, slot_effect

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
GROUPS = [[" ".join(drawn[i : i + 2]) for i in (0, 2, 4)] for drawn in list(permutations(WORDS))[:20000:1700]]


def test_what_a_part_says_cancels():
    place = np.array([0.5, -0.2, 0.0])

    def score(rows):
        return [[place[slot] + sum(map(ord, part)) % 97 for slot, part in enumerate(row)] for row in rows]

    effect = slot_effect(score, GROUPS)
    np.testing.assert_allclose(effect.effects, np.tile(place - place.mean(), (len(GROUPS), 1)), atol=1e-12)
    assert effect.minus(effect).to_frame()["high"].abs().max() == 0
    assert "12 groups in 3 slots" in repr(effect)


def test_an_embedding_model_has_no_effect_without_positions():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=9, initializer_range=0.5, **sizes)).eval()  # positions matter untrained

    def embed(texts):
        rows = [torch.tensor([[WORDS.index(word) for word in text.split()]]) for text in texts]
        with torch.no_grad():
            return torch.stack([model(row).last_hidden_state[0].mean(0) for row in rows])

    assert slot_effect(similarity_to_parts(embed), GROUPS).to_frame()["effect"].abs().max() > 1e-3
    with attach(model, NoEncoding()):
        assert np.abs(slot_effect(similarity_to_parts(embed), GROUPS).effects).max() < 1e-5


@pytest.mark.parametrize(
    ("score", "groups", "name"),
    [
        (None, GROUPS, "model"),
        (lambda rows: rows, "abc", "groups"),
        (lambda rows: rows, ["abc", "def"], "groups"),
        (lambda rows: [[1.0]], [], "groups"),
        (lambda rows: [[1.0]], [["a"]], "groups"),
        (lambda rows: [[1.0]], [["a", "b"], ["c"]], "groups"),
        (lambda rows: [1.0, 2.0], [["a", "b"]], "score"),
        (lambda rows: np.full((2, 2), np.nan), [["a", "b"]], "score"),
    ],
)
def test_bad_input_is_refused(score, groups, name):
    with pytest.raises((TypeError, ValueError), match=name):
        slot_effect(score, groups)
