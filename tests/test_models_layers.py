"""Attention written by hand in many layouts, each measured and given a bias beside a witness in float64."""

import math

import pytest
import torch
from torch import nn

from pelocality import positional_attention
from pelocality.models import SequenceModel, attach
from tests.test_models_attachment_modules import table
from tests.test_models_sequence_model import HEADS, VOCABULARY, WIDTH, N, seeded

WORDS = [7, 9, 30]
SCALE = 1 / math.sqrt(WIDTH // HEADS)
IDS = torch.randint(VOCABULARY, (3, N), generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """Two layers whose attention is a function of queries, keys and values (batch, n, d) and a mask."""

    def __init__(self, attend, causal=True):
        super().__init__()
        self.attend, self.causal = attend, causal
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.projections = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])

    def forward(self, ids):
        n = ids.shape[1]
        states = self.words(ids) + self.positions(torch.arange(n))
        visible = torch.ones(n, n, dtype=torch.bool)
        visible = visible.tril() if self.causal else visible
        for project in self.projections:
            states = states + self.attend(*project(states).split(WIDTH, -1), visible)
        return states


def by_hand(model, ids, bias=0.0):
    """The attention (layer, batch, head, n, n) and the output, text by text and head by head in float64."""
    weights, maps = {name: each.double() for name, each in model.state_dict().items()}, []
    n = ids.shape[1]
    states, bias = weights["words.weight"][ids] + weights["positions.weight"][:n], torch.zeros(HEADS, n, n) + bias
    visible = torch.ones(n, n).tril().bool() if model.causal else torch.ones(n, n).bool()
    for layer in range(2):
        query, key, value = (
            states @ weights[f"projections.{layer}.weight"].T + weights[f"projections.{layer}.bias"]
        ).split(WIDTH, -1)
        found, attended = torch.zeros(len(ids), HEADS, n, n).double(), torch.zeros_like(states)
        for text in range(len(ids)):
            for head in range(HEADS):
                part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                logits = query[text, :, part] @ key[text, :, part].T * SCALE + bias[head]
                found[text, head] = logits.masked_fill(~visible, -torch.inf).softmax(-1)
                attended[text, :, part] = found[text, head] @ value[text, :, part]
        maps.append(found)
        states = states + attended
    return torch.stack(maps), states


def split(states):
    """(batch, n, d) as (batch, head, n, d)."""
    return states.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def join(states):
    """(batch, head, n, d) as (batch, n, d)."""
    return states.transpose(1, 2).flatten(2)


def weights_of(query, key, visible):
    """The softmax of scaled logits."""
    return (query @ key.mT * SCALE).masked_fill(~visible, -torch.inf).softmax(-1)


def measured(attend, causal, length=N):
    """The result for a module with this attention, and the mean attention by hand."""
    model = seeded(lambda: Written(attend, causal)).train()
    ids = torch.tensor(WORDS)[:, None].expand(-1, length)
    expected = by_hand(model, ids)[0].mean(1)
    return positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=length, words=WORDS), expected


def one_text_at_a_time(query, key, value, visible):
    weights, values = weights_of(split(query), split(key), visible), split(value)
    return join(torch.stack([weights[text] @ values[text] for text in range(len(weights))]))


def one_head_at_a_time(query, key, value, visible):
    weights, values = weights_of(split(query), split(key), visible), split(value)
    return join(torch.stack([weights[:, head] @ values[:, head] for head in range(HEADS)], 1))


@pytest.mark.parametrize("attend", [one_text_at_a_time, one_head_at_a_time])
def test_weights_that_multiply_part_by_part_are_refused(attend):
    with pytest.raises(ValueError, match="no attention over all its tokens was seen|its attention differs between inputs"):
        measured(attend, causal=False)
