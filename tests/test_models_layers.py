"""Attention written by hand in many layouts, each measured and given a bias beside a witness in float64."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import positional_attention, text_average
from pelocality.models import SequenceModel, identical_patches, periodic_series, steady_sound
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


def by_hand(model, ids):
    """The attention (layer, batch, head, n, n) and the output, text by text and head by head in float64."""
    weights, maps = {name: each.double() for name, each in model.state_dict().items()}, []
    n = ids.shape[1]
    states = weights["words.weight"][ids] + weights["positions.weight"][:n]
    visible = torch.ones(n, n).tril().bool() if model.causal else torch.ones(n, n).bool()
    for layer in range(2):
        query, key, value = (
            states @ weights[f"projections.{layer}.weight"].T + weights[f"projections.{layer}.bias"]
        ).split(WIDTH, -1)
        found, attended = torch.zeros(len(ids), HEADS, n, n).double(), torch.zeros_like(states)
        for text in range(len(ids)):
            for head in range(HEADS):
                part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
                logits = query[text, :, part] @ key[text, :, part].T * SCALE
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
    with pytest.raises(ValueError, match=r"the texts of a batch|no attention over all its tokens"):
        measured(attend, causal=False)


def heads_before_texts(query, key, value, visible):
    query, key, value = (split(each).transpose(0, 1) for each in (query, key, value))
    return join((weights_of(query, key, visible) @ value).transpose(0, 1))


def heads_before_texts_in_the_kernel(query, key, value, visible):
    query, key, value = (split(each).transpose(0, 1) for each in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    return join(attended.transpose(0, 1))


def heads_and_texts_in_one_axis(query, key, value, visible):
    query, key, value = (torch.cat(each.chunk(HEADS, -1)) for each in (query, key, value))  # (head * batch, n, d)
    return torch.cat((weights_of(query, key, visible) @ value).chunk(HEADS), -1)


def heads_and_texts_in_one_axis_of_the_kernel(query, key, value, visible):
    query, key, value = (torch.cat(each.chunk(HEADS, -1)) for each in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    return torch.cat(attended.chunk(HEADS), -1)


def texts_and_heads_in_one_axis(query, key, value, visible):
    query, key, value = (split(each).flatten(0, 1) for each in (query, key, value))  # (batch * head, n, d)
    return join(torch.bmm(weights_of(query, key, visible), value).unflatten(0, (-1, HEADS)))


HEADS_LEAD = [
    heads_before_texts,
    heads_before_texts_in_the_kernel,
    heads_and_texts_in_one_axis,
    heads_and_texts_in_one_axis_of_the_kernel,
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [*HEADS_LEAD, texts_and_heads_in_one_axis])
def test_heads_and_texts_are_told_apart_in_any_layout(attend, causal):
    result, expected = measured(attend, causal)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)
    assert result.source.causal is causal


def test_heads_before_texts_are_told_from_channels_without_token_ids():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, states):
            return heads_before_texts(*self.project(states).split(WIDTH, -1), torch.ones(N, N).bool())

    model = seeded(Attention)
    states = torch.randn(1, N, WIDTH, generator=torch.Generator().manual_seed(0))
    result = positional_attention(SequenceModel(model, inputs=lambda sample, n: states), length=N, words=1)
    query, key, _ = model.project(states).split(WIDTH, -1)
    expected = weights_of(split(query), split(key), torch.ones(N, N).bool())
    torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)


def heads_between_queries_and_keys(query, key, value, visible):
    query, key, value = (each.unflatten(-1, (HEADS, -1)) for each in (query, key, value))
    logits = torch.einsum("bihd,bjhd->bihj", query, key) * SCALE
    weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bihj,bjhd->bihd", weights, value).flatten(2)


def test_as_many_heads_as_tokens_are_told_from_tokens():
    with pytest.raises(ValueError, match="cannot be probed"):
        measured(heads_between_queries_and_keys, causal=False, length=HEADS)
    result, expected = measured(heads_before_texts, causal=False, length=HEADS)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)


def softmax_over_keys_first(query, key, value, visible):
    query, key, value = (split(each) for each in (query, key, value))
    logits = (key @ query.mT * SCALE).masked_fill(~visible.mT, -torch.inf)  # (batch, head, key, query)
    return join(logits.softmax(-2).mT @ value)


def softmax_over_keys_first_in_einsum(query, key, value, visible):
    query, key, value = (split(each) for each in (query, key, value))
    logits = torch.einsum("bhjd,bhid->bhji", key * SCALE, query).masked_fill(~visible.mT, -torch.inf)
    return join(torch.einsum("bhji, bhjd -> bhid", logits.softmax(2), value))


def values_before_weights(query, key, value, visible):
    weights = weights_of(split(query), split(key), visible)
    return join((split(value).mT @ weights.mT).mT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "attend",
    [softmax_over_keys_first, softmax_over_keys_first_in_einsum, values_before_weights],
    ids=lambda f: f.__name__,
)
def test_transposed_weights_are_turned_with_their_mask(attend, causal):
    result, expected = measured(attend, causal)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)
    assert result.source.causal is causal
    assert result.visible is None or torch.equal(result.visible[0], torch.ones(N, N).tril().bool())


def logits_overwritten(query, key, value, visible):
    logits = (split(query) @ split(key).mT * SCALE).masked_fill(~visible, -torch.inf)
    weights = logits.softmax(-1)
    logits.zero_()
    return join(weights @ split(value))


def logits_overwritten_by_weights(query, key, value, visible):
    logits = (split(query) @ split(key).mT * SCALE).masked_fill(~visible, -torch.inf)
    return join(torch.softmax(logits, -1, out=logits) @ split(value))


@pytest.mark.parametrize("attend", [logits_overwritten, logits_overwritten_by_weights], ids=lambda f: f.__name__)
def test_the_mask_is_read_before_logits_are_overwritten(attend):
    assert measured(attend, causal=True)[0].source.causal
    assert not measured(attend, causal=False)[0].source.causal


def over_queries(query, key, value, visible):
    weights = weights_of(split(query), split(key), visible)
    return join(torch.einsum("bhij,bhid->bhjd", weights, split(value)))


def heads_mixed_after_the_softmax(query, key, value, visible):
    weights = weights_of(split(query), split(key), visible)
    mixed = torch.einsum("bhij,hg->bgij", weights, torch.full((HEADS, HEADS), 1 / HEADS, dtype=weights.dtype))
    return join(mixed @ split(value))


@pytest.mark.parametrize("attend", [over_queries, heads_mixed_after_the_softmax], ids=lambda f: f.__name__)
def test_a_product_that_does_not_sum_over_keys_is_not_attention(attend):
    with pytest.raises(ValueError, match="no attention over all its tokens was seen"):
        measured(attend, causal=False)


# ---- softmax without a function of that name, in parts, and under torch.vmap


def logits_of(query, key, visible):
    return (split(query) @ split(key).mT * SCALE).masked_fill(~visible, -torch.inf)


def exponentials_in_place(logits):
    weights = logits.exp_()
    weights /= weights.sum(-1, keepdim=True)
    return weights


def exponentials_masked_later(logits):
    visible, logits = logits > -torch.inf, logits.nan_to_num(neginf=0)
    weights = (logits - logits.amax(-1, keepdim=True)).exp() * visible
    return weights / weights.sum(-1, keepdim=True)


SOFTMAXES = {
    "exponentials by their sum": lambda logits: logits.exp() / logits.exp().sum(-1, keepdim=True),
    "in place": exponentials_in_place,
    "masked later": exponentials_masked_later,
    "minus the logarithm of the sum": lambda logits: (logits - logits.logsumexp(-1, keepdim=True)).exp(),
    "normalised": lambda logits: nn.functional.normalize(logits.exp(), p=1, dim=-1),
    "log_softmax": lambda logits: logits.log_softmax(-1).exp(),
    "special": lambda logits: torch.special.softmax(logits, -1),
    "softmin": lambda logits: nn.functional.softmin(-logits, dim=-1),
    "operator": lambda logits: torch.ops.aten.softmax(logits, -1),
}


def by(softmax):
    return lambda query, key, value, visible: join(softmax(logits_of(query, key, visible)) @ split(value))


def in_chunks(size):
    def attend(query, key, value, visible):
        parts = zip(logits_of(query, key, visible).split(size, 2), strict=True)
        return join(torch.cat([logits.softmax(-1) @ split(value) for (logits,) in parts], 2))

    return attend


def in_chunks_of_the_kernel(query, key, value, visible):
    kernel, (query, key, value) = nn.functional.scaled_dot_product_attention, map(split, (query, key, value))
    chunks = zip(query.split(4, 2), visible.split(4), strict=True)
    return join(torch.cat([kernel(part, key, value, attn_mask=mask) for part, mask in chunks], 2))


def one_head_of_a_text(query, key, value, visible):
    return weights_of(query, key, visible) @ value


def each_text_and_head_by_vmap(query, key, value, visible):
    attend = torch.vmap(torch.vmap(lambda *states: one_head_of_a_text(*states, visible)))
    return join(attend(split(query), split(key), split(value)))


def each_head_by_vmap_in_the_kernel(query, key, value, visible):
    kernel = nn.functional.scaled_dot_product_attention
    attend = torch.vmap(lambda *states: kernel(*states, attn_mask=visible), in_dims=1, out_dims=1)
    return join(attend(split(query), split(key), split(value)))


IN_PARTS = {
    "chunks": in_chunks(4),
    "halves": in_chunks(N // 2),
    "one query": in_chunks(1),
    "kernel": in_chunks_of_the_kernel,
    "vmap": each_text_and_head_by_vmap,
    "vmap of the kernel": each_head_by_vmap_in_the_kernel,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*SOFTMAXES, *IN_PARTS])
def test_any_way_to_compute_softmax_attention_is_measured(name, causal):
    attend = IN_PARTS.get(name) or by(SOFTMAXES[name])
    result, expected = measured(attend, causal)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)
    assert result.source.causal is causal
    own = SequenceModel(seeded(lambda: Written(attend, causal)).eval(), vocabulary_size=VOCABULARY)
    text = text_average(own, [{"input_ids": IDS}], special_tokens=True)
    torch.testing.assert_close(text.attention.double(), by_hand(own.module, IDS)[0].mean(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "softmax",
    [lambda logits: logits.exp() / (1 + logits.exp().sum(-1, keepdim=True)), torch.sigmoid, torch.exp],
    ids=["one more", "sigmoid", "no sum"],
)
def test_what_is_no_softmax_is_refused_with_what_to_write(softmax):
    with pytest.raises(
        ValueError, match=r"AttentionFunction\(lambda ids: \[weights_of_layer, \.\.\.\], vocabulary_size"
    ):
        measured(by(softmax), causal=False)


class OneByOne(Written):
    """Computes attention (head, n, n) of one text after the other, or of the first one alone."""

    def __init__(self, attend, texts=None):
        super().__init__(attend)
        self.texts = texts

    def forward(self, ids):
        return torch.stack([super(OneByOne, self).forward(text[None])[0] for text in ids[: self.texts]])


@pytest.mark.parametrize("texts", [None, 1])
def test_texts_that_a_module_computes_one_by_one_are_all_measured(texts):
    def of_one_text(query, key, value, visible):
        query, key, value = (split(each)[0] for each in (query, key, value))
        return join((weights_of(query, key, visible) @ value)[None])

    model = own(OneByOne(of_one_text, texts))
    result = positional_attention(model, length=N, words=WORDS)
    expected = by_hand(model.module, torch.tensor(WORDS)[:, None].expand(-1, N))[0].mean(1)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)


def test_several_threads_measure_one_model_as_one_does():
    model = own(Written(texts_and_heads_in_one_axis, True))
    model.module.train()

    def attention(seed):
        return positional_attention(model, length=N, words=8, seed=seed, batch_size=2).attention

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(attention, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert all(map(torch.equal, together, map(attention, range(4))))
    assert model.module.training
    assert torch.backends.mha.get_fastpath_enabled()


class Stages(nn.Module):
    """Patches of an image through two stages of global attention; the second one has a quarter of the tokens."""

    def __init__(self):
        super().__init__()
        self.patches, self.pool = nn.Conv2d(3, WIDTH, 4, 4), nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2)
        self.positions = nn.ParameterList([nn.Parameter(torch.zeros(n, size)) for n, size in ((64, 1), (16, 2))])
        blocks = [[nn.Linear(size, 3 * size) for _ in range(2)] for size in (WIDTH, 2 * WIDTH)]
        self.stages = nn.ModuleList([nn.ModuleList(each) for each in blocks])
        self.weights = []

    def forward(self, pixel_values):
        grid, self.weights = self.patches(pixel_values), []
        for number, stage in enumerate(self.stages):
            grid = self.pool(grid) if number else grid
            states = grid.flatten(2).mT + self.positions[number].repeat(1, WIDTH)
            for project in stage:
                query, key, value = (split(each) for each in project(states).chunk(3, -1))
                self.weights.append((query @ key.mT * SCALE).softmax(-1))
                states = states + join(self.weights[-1] @ value)
            grid = states.mT.unflatten(-1, grid.shape[2:])
        return states


def test_stages_with_fewer_tokens_are_measured_by_their_layers():
    model = seeded(Stages).eval()
    for layers, length, size in (([0, 1], 64, 4), ([2, 3], 16, 8)):
        content = identical_patches(size)
        result = positional_attention(SequenceModel(model, inputs=content), length=length, words=1, layers=layers)
        model(**content(0, length))
        expected = torch.cat([model.weights[layer] for layer in layers])
        torch.testing.assert_close(result.attention, expected, rtol=0, atol=1e-5)
        assert result.positions.shape == (length, length)
        with pytest.raises(ValueError, match=r"stages, of which layers= names one"):
            positional_attention(SequenceModel(model, inputs=content), length=length, words=1)


# ---- heads one by one


def heads_one_by_one(query, key, value, visible):
    parts = zip(*(each.chunk(HEADS, -1) for each in (query, key, value)), strict=True)
    return torch.cat([weights_of(q, k, visible) @ v for q, k, v in parts], -1)


def all_softmaxes_before_all_products(query, key, value, visible):
    query, key, value = (each.chunk(HEADS, -1) for each in (query, key, value))
    weights = [weights_of(q, k, visible) for q, k in zip(query, key, strict=True)]
    return torch.cat([w @ v for w, v in zip(weights, value, strict=True)], -1)


def all_softmaxes_before_all_products_in_reverse(query, key, value, visible):
    query, key, value = (each.chunk(HEADS, -1) for each in (query, key, value))
    weights = [weights_of(q, k, visible) for q, k in zip(query, key, strict=True)]
    products = [weights[head] @ value[head] for head in reversed(range(HEADS))]
    return torch.cat(products[::-1], -1)


class Stack(nn.Module):
    """Words and positions, through blocks one after the other."""

    def __init__(self, blocks, words=None, positions=None):
        super().__init__()
        self.words, self.positions = words or nn.Embedding(VOCABULARY, WIDTH), positions or nn.Embedding(32, WIDTH)
        self.blocks = blocks

    def forward(self, ids):
        states = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            states = block(states)
        return states


class Block(nn.Module):
    """A layer of `Written`."""

    def __init__(self, project, attend, causal):
        super().__init__()
        self.project, self.attend, self.causal = project, attend, causal

    def forward(self, states):
        n = states.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool)
        return states + self.attend(*self.project(states).split(WIDTH, -1), visible.tril() if self.causal else visible)


def own(module):
    """A module that reads token ids, with large weights, to be measured."""
    return SequenceModel(seeded(lambda: module).eval(), vocabulary_size=VOCABULARY)


ONE_BY_ONE = [heads_one_by_one, all_softmaxes_before_all_products, all_softmaxes_before_all_products_in_reverse]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("attend", ONE_BY_ONE, ids=lambda f: f.__name__)
def test_heads_that_a_block_computes_one_by_one_are_the_heads_of_its_layer(attend, sequence):
    written = Written(attend)
    blocks = [Block(project, attend, True) for project in written.projections]
    stack = Stack(nn.Sequential(*blocks) if sequence else nn.ModuleList(blocks), written.words, written.positions)
    result = positional_attention(own(stack), length=N, words=WORDS)
    expected = by_hand(written, torch.tensor(WORDS)[:, None].expand(-1, N))[0]
    expected = expected.flip(2) if attend is all_softmaxes_before_all_products_in_reverse else expected
    assert result.layers == (0, 1)
    assert result.source.causal
    torch.testing.assert_close(result.attention.double(), expected.mean(1), rtol=0, atol=1e-5)


def test_heads_that_are_modules_of_one_list_are_the_heads_of_their_layer():
    """As in the nanoGPT lecture: a list of heads in each block, which all read the same states."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

        def forward(self, states):
            weights = weights_of(self.query(states), self.key(states), torch.ones(N, N).tril().bool())
            self.weights = nn.functional.dropout(weights, 0.1, self.training)
            return self.weights @ self.value(states)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([Head() for _ in range(HEADS)])

        def forward(self, states):
            return states + torch.cat([head(states) for head in self.heads], -1)

    for depth in (1, 2):
        model = own(Stack(nn.Sequential(*[Heads() for _ in range(depth)])))
        result = positional_attention(model, length=N, words=WORDS)
        model.module(torch.tensor(WORDS)[:, None].expand(-1, N))
        expected = torch.stack([torch.stack([head.weights for head in each.heads]) for each in model.module.blocks])
        assert result.layers == tuple(range(depth))
        assert result.other_layers == {}
        torch.testing.assert_close(result.attention, expected.mean(2), rtol=0, atol=1e-5)


class Alone(nn.Module):
    """A layer of one head, which may change its states in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, states):
        attended = weights_of(states, states, torch.ones(N, N).bool()) @ states
        return states.add_(attended) if self.in_place else states + attended


class Pair(nn.Module):
    """Two layers that are no list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Alone(False), Alone(False)

    def forward(self, states):
        return self.second(self.first(states))


@pytest.mark.parametrize("stage", [lambda: nn.Sequential(Alone(True), Alone(True)), Pair], ids=["in place", "pair"])
def test_layers_of_one_head_each_are_layers(stage):
    result = positional_attention(own(Stack(nn.ModuleList([stage(), stage()]))), length=N, words=WORDS)
    assert result.layers == (0, 1, 2, 3)
    assert result.attention.shape == (4, 1, N, N)


def test_scripted_parts_of_a_module_run_as_they_are():
    class Scripted(Written):
        def __init__(self):
            super().__init__(texts_and_heads_in_one_axis)
            self.last = torch.jit.trace(nn.ReLU(), torch.ones(1))

        def forward(self, ids):
            return self.last(super().forward(ids))

    model = seeded(Scripted).eval()
    result = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    expected = by_hand(model, torch.tensor(WORDS)[:, None].expand(-1, N))[0].mean(1)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)


def test_attention_behind_the_list_of_blocks_is_a_layer_of_its_own():
    class Pooled(Written):
        def __init__(self):
            super().__init__(texts_and_heads_in_one_axis, causal=False)
            self.blocks = nn.ModuleList([Block(self.projections[0], self.attend, False)])

        def forward(self, ids):
            states = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
            states = self.blocks[0](states)
            visible = torch.ones(N, N, dtype=torch.bool)
            return states + self.attend(*self.projections[1](states).split(WIDTH, -1), visible)

    model = seeded(Pooled).eval()
    known, ids = SequenceModel(model, vocabulary_size=VOCABULARY), torch.tensor(WORDS)[:, None].expand(-1, N)
    blocks = []
    known.watch({"input_ids": ids}, lambda attention: blocks.append(attention.block), N)
    assert blocks == [(model.blocks, 0), None]
    result = positional_attention(known, length=N, words=WORDS)
    torch.testing.assert_close(result.attention.double(), by_hand(model, ids)[0].mean(1), rtol=0, atol=1e-5)


# ---- keys that are no tokens


class WithKeys(Written):
    """A module with learned keys and values before or after those of the tokens, in every layer."""

    def __init__(self, before, after, causal, cut):
        super().__init__(self.attend_to_more, causal)
        self.sizes, self.cut = (before, after), cut
        self.keys, self.extra = (nn.Parameter(torch.zeros(before + after, WIDTH)) for _ in range(2))

    def attend_to_more(self, query, key, value, visible):
        before, after = self.sizes
        around = [
            torch.cat([each[:before].expand(len(key), -1, -1), one, each[before:].expand(len(key), -1, -1)], 1)
            for each, one in ((self.keys, key), (self.extra, value))
        ]
        visible = nn.functional.pad(visible, (before, after), value=True)
        self.weights = weights_of(split(query), split(around[0]), visible)
        n = query.shape[1]
        if self.cut:  # before the product
            return join(self.weights[..., before : before + n] @ split(value))
        return join(self.weights @ split(around[1]))


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_a_key_that_is_no_token_is_a_sink_on_either_side(before, after, causal, cut):
    model = seeded(lambda: WithKeys(before, after, causal, cut)).eval()
    result = positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)
    first = model.words.weight[WORDS][:, None] + model.positions.weight[:N]
    model.attend_to_more(
        *model.projections[0](first).split(WIDTH, -1),
        torch.ones(N, N).tril().bool() if causal else torch.ones(N, N).bool(),
    )
    tokens = model.weights[..., before : before + N]
    torch.testing.assert_close(result.attention[0], (tokens / tokens.sum(-1, keepdim=True)).mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.per_sample["learned_sink"][:, 0], 1 - tokens.sum(-1).mean(-1), rtol=0, atol=1e-5)
    assert result.source.causal is causal
    text = text_average(SequenceModel(model, vocabulary_size=VOCABULARY), [{"input_ids": IDS}], special_tokens=True)
    model.eval()(IDS)
    tokens = model.weights[..., before : before + N]  # of the last layer
    torch.testing.assert_close(
        text.attention[1].float(), (tokens / tokens.sum(-1, keepdim=True)).mean(0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 0), (0, 2)])
def test_several_keys_that_are_no_tokens_are_refused(before, after):
    model = seeded(lambda: WithKeys(before, after, True, False)).eval()
    with pytest.raises(ValueError, match="no attention over all its tokens was seen"):
        positional_attention(SequenceModel(model, vocabulary_size=VOCABULARY), length=N, words=WORDS)


def test_cross_attention_to_one_key_more_is_refused():
    class Crossed(Written):
        def forward(self, ids):
            states, more = self.words(ids), self.words(torch.cat([ids, ids[:, :1]], 1))
            weights = (split(states) @ split(more).mT).softmax(-1)
            return super().forward(ids) + join(weights @ split(more))

    model = SequenceModel(seeded(lambda: Crossed(texts_and_heads_in_one_axis, False)), vocabulary_size=VOCABULARY)
    with pytest.raises(ValueError, match="another order"):
        positional_attention(model, length=N, words=WORDS)


def test_a_token_and_a_key_that_a_module_adds_are_both_cut():
    class Both(WithKeys):
        def forward(self, ids):
            return super().forward(torch.cat([ids, torch.full_like(ids[:, :1], 45)], 1))

    model = seeded(lambda: Both(1, 0, False, False)).eval()
    result = positional_attention(SequenceModel(model, vocabulary_size=40), length=N, words=[7])
    ids = torch.tensor([[7] * N + [45]])
    states = model.words(ids) + model.positions.weight[: N + 1]
    model.attend_to_more(*model.projections[0](states).split(WIDTH, -1), torch.ones(N + 1, N + 1).bool())
    tokens = model.weights[0, :, :N, 1 : N + 1]
    torch.testing.assert_close(result.attention[0], tokens / tokens.sum(-1, keepdim=True), rtol=0, atol=1e-5)


def test_an_own_module_is_measured_at_length_one():
    result, expected = measured(texts_and_heads_in_one_axis, causal=True, length=1)
    torch.testing.assert_close(result.attention.double(), expected)


# ---- tokens that a model adds


class Surrounded(Written):
    """A module that puts tokens of its own around those of its input."""

    def __init__(self, before, after, repeats=1, causal=False):
        super().__init__(texts_and_heads_in_one_axis, causal)
        self.before, self.after, self.repeats = before, after, repeats

    def forward(self, ids):
        first, last = (torch.arange(40, 40 + number).expand(len(ids), -1) for number in (self.before, self.after))
        return super().forward(torch.cat([first, ids.repeat_interleave(self.repeats, 1), last], 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 3), (1, 2)])
def test_tokens_that_a_module_adds_are_cut_on_either_side(before, after, causal):
    model = seeded(lambda: Surrounded(before, after, causal=causal))
    result = positional_attention(SequenceModel(model, vocabulary_size=40), length=N, words=WORDS)
    ids = torch.tensor(WORDS)[:, None].expand(-1, N)
    own = [torch.arange(40, 40 + number).expand(3, -1) for number in (before, after)]
    maps = by_hand(model, torch.cat([own[0], ids, own[1]], 1))[0][..., before : before + N, before : before + N]
    expected = (maps / maps.sum(-1, keepdim=True)).mean(1)
    torch.testing.assert_close(result.attention.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_that_reads_its_input_backwards_is_refused(causal):
    class Backwards(Written):
        def forward(self, ids):
            return super().forward(ids.flip(1)).flip(1)

    model = SequenceModel(seeded(lambda: Backwards(texts_and_heads_in_one_axis, causal)), vocabulary_size=VOCABULARY)
    with pytest.raises(ValueError, match="another order"):
        positional_attention(model, length=N, words=WORDS)


def test_positions_that_are_not_those_of_the_input_are_refused():
    model = SequenceModel(seeded(lambda: Surrounded(0, 0, repeats=2)), vocabulary_size=40)
    with pytest.raises(ValueError, match="something else than one key for each token"):
        positional_attention(model, length=12, words=WORDS)


def test_detection_tokens_after_patches_are_cut():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.YolosConfig(**sizes, image_size=[16, 16], patch_size=4, num_detection_tokens=3)
    model, content = seeded(lambda: hf.YolosModel(config)).eval(), identical_patches(4)
    result = positional_attention(SequenceModel(model, inputs=content), length=16, words=1)
    model.set_attn_implementation("eager")
    maps = torch.stack(model(**content(0, 16), output_attentions=True).attentions)[:, 0, :, 1:17, 1:17]
    torch.testing.assert_close(result.attention, maps / maps.sum(-1, keepdim=True), rtol=0, atol=1e-5)
    dinov2 = hf.Dinov2Model(hf.Dinov2Config(**sizes, image_size=32, patch_size=4))
    with pytest.raises(ValueError, match="positions for an input of 16"):
        positional_attention(SequenceModel(dinov2, inputs=identical_patches(8)), length=16, words=1)
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sound = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**sizes, **convolutions, num_conv_pos_embedding_groups=4))
    with pytest.raises(ValueError, match="positions for an input of 16"):
        positional_attention(SequenceModel(sound, inputs=steady_sound(20, 20)), length=16, words=1)


def test_a_class_token_is_found_where_the_whole_input_is_scaled():
    config = hf.PatchTSTConfig(
        num_input_channels=3, context_length=64, patch_length=4, patch_stride=4, d_model=16, ffn_dim=16,
        num_attention_heads=2, num_hidden_layers=2, use_cls_token=True,
    )  # fmt: skip
    model, content = seeded(lambda: hf.PatchTSTModel(config)).eval(), periodic_series(4, channels=3)
    result = positional_attention(SequenceModel(model, inputs=content), length=16, words=1)
    model.set_attn_implementation("eager")
    assert "cut_share" in result.per_sample
    expected = torch.stack(model(**content(0, 16), output_attentions=True).attentions).mean(1)[..., 1:, 1:]
    torch.testing.assert_close(result.attention, expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-5)
