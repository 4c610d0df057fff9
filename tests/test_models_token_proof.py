"""The proof that attention is over the tokens: modules that attend to them, and modules that do not."""

import pytest
import torch
from torch import nn

from pelocality import AttenuatedEncoding, SequenceModel, attach, positional_attention, text_average
from pelocality.models.layers import AttentionLayers
from pelocality.models.token_proof import TOKENS, UNKNOWN, token_axes
from tests.families import EVERY, tiny

V, D, H, N = 50, 32, 4, 12
kernel = nn.functional.scaled_dot_product_attention


def weights_of(query, key):
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)


def merged(states):
    return states.transpose(1, 2).flatten(2)


# What each does with queries, keys and values (batch, head, n, d), and with its module.


def plain(own, q, k, v):
    return merged(weights_of(q, k) @ v)


def by_kernel(own, q, k, v):
    return merged(kernel(q, k, v))


def synthesised(own, q, k, v):
    n = q.shape[2]
    return merged(own.matrix[:, :n, :n].softmax(-1) @ v)


def keys_are_positions(own, q, k, v):
    return merged(weights_of(q, own.matrix[:, : q.shape[2], : q.shape[3]]) @ v)


def heads_first(own, q, k, v):
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    return merged((weights_of(q, k) @ v).transpose(0, 1))


def heads_and_texts_in_one_axis(own, q, k, v):
    batch = len(q)
    q, k, v = (each.transpose(0, 1).flatten(0, 1) for each in (q, k, v))
    return merged((weights_of(q, k) @ v).unflatten(0, (H, batch)).transpose(0, 1))


def one_head_at_a_time(own, q, k, v):
    return merged(torch.stack([weights_of(q[:, i], k[:, i]) @ v[:, i] for i in range(H)], 1))


def behind_an_empty_key(own, q, k, v):
    k, v = (torch.cat([torch.zeros_like(each[:, :, :1]), each], 2) for each in (k, v))
    return merged(weights_of(q, k) @ v)


def twice_in_one_module(own, q, k, v):
    states = weights_of(q, k) @ v
    return merged(weights_of(states, k) @ states)


def projected_keys(own, q, k, v):
    project = own.matrix[0, :N, : q.shape[2]]
    return merged(weights_of(q, project @ k) @ (project @ v))


def channels(own, q, k, v):
    return merged(((q.mT @ k / q.shape[2] ** 0.5).softmax(-1) @ v.mT).mT)


def texts(own, q, k, v):
    return merged(kernel(*(each.transpose(0, 2) for each in (q, k, v))).transpose(0, 2))


def landmarks(own, q, k, v):
    queries, keys = q[:, :, :N], k[:, :, :N]
    return merged(weights_of(q, keys) @ (weights_of(queries, keys) @ (weights_of(queries, k) @ v)))


def difference(own, q, k, v):
    return merged(kernel(q, k, v) - 0.5 * kernel(q.flip(-1), k, v))


def reversed_keys(own, q, k, v):
    return merged((q @ k.mT).flip(-1).softmax(-1) @ v.flip(-2))


def rolled_keys(own, q, k, v):
    return merged(kernel(q, k.roll(1, -2), v.roll(1, -2)))


def reversed_queries(own, q, k, v):
    return merged((weights_of(q.flip(-2), k) @ v).flip(-2))


def latents(own, q, k, v):
    latent = own.latents.unflatten(-1, (H, -1)).transpose(0, 1)
    return merged(weights_of(q, latent) @ (weights_of(latent, k) @ v))


def codes(own, q, k, v):
    return plain(own, q, k, v) + own.gate(own.states).softmax(-1) @ own.latents


class Attend(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.project, self.out = function, nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.matrix, self.latents = nn.Parameter(torch.randn(H, 40, 40)), nn.Parameter(torch.randn(N, D))
        self.gate = nn.Linear(D, N)

    def forward(self, states):
        self.states = states
        query, key, value = (each.unflatten(-1, (H, -1)).transpose(1, 2) for each in self.project(states).chunk(3, -1))
        return self.out(self.function(self, query, key, value))


class Own(nn.Module):
    """Two layers of attention; tokens may come in another order from one of them on."""

    def __init__(self, function=plain, order=None, permuted_from=0):
        super().__init__()
        self.words, self.positions = nn.Embedding(V, D), nn.Embedding(40, D)
        self.layers = nn.ModuleList(Attend(function) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.order, self.permuted_from = order, permuted_from

    def forward(self, ids):
        n = ids.shape[1]
        states = self.words(ids) + self.positions.weight[:n]
        order = torch.arange(n) if self.order is None else self.order(torch.arange(n))
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if number == self.permuted_from:
                states = states[:, order]
            states = states + layer(norm(states))
        return states[:, order.argsort()]


def own(*arguments, seed=0):
    torch.manual_seed(seed)
    return SequenceModel(Own(*arguments).eval(), vocabulary_size=V)


OF_TOKENS = [plain, by_kernel, synthesised, keys_are_positions, heads_first, heads_and_texts_in_one_axis]
OF_TOKENS += [one_head_at_a_time, behind_an_empty_key, twice_in_one_module]
OF_OTHERS = {
    projected_keys: "no attention",
    channels: "something else than one key",
    texts: "texts of a batch",
    landmarks: "combines",
    difference: "combines",
    reversed_keys: "another order",
    rolled_keys: "another order",
    reversed_queries: "another order",
    latents: "no attention",
    codes: "another length",
}


@pytest.mark.parametrize("function", OF_TOKENS)
@pytest.mark.parametrize("length", [N, 20])
def test_attention_over_tokens_is_proved_in_every_layer(function, length):
    model = own(function)
    assert {axes.name for axes in token_axes(model)} == {TOKENS}
    notes = positional_attention(model, length=length, words=2).notes
    assert not any("proved" in note or "left out" in note for note in notes)


@pytest.mark.parametrize("function", OF_OTHERS)
def test_attention_over_something_else_is_refused_with_what_it_is(function):
    length = 8 if function is channels else N
    with pytest.raises(ValueError, match=OF_OTHERS[function]):
        positional_attention(own(function), length=length, words=2)
    with pytest.raises(ValueError, match="cannot be probed"):
        text_average(own(function), [{"input_ids": torch.arange(2 * length).view(2, length)}], special_tokens=True)


@pytest.mark.parametrize("order", [lambda i: i.flip(0), lambda i: i.roll(1), lambda i: torch.cat([i[::2], i[1::2]])])
@pytest.mark.parametrize("permuted_from", [0, 1])
def test_tokens_in_another_order_are_refused(order, permuted_from):
    with pytest.raises(ValueError, match="another order"):
        positional_attention(own(plain, order, permuted_from), length=N, words=2)


@pytest.mark.parametrize("function", [texts, channels, reversed_keys, difference])
def test_no_bias_is_attached_to_attention_over_something_else(function):
    model = own(function).module
    with pytest.raises(ValueError, match="cannot be attached"):
        attach(
            model, AttenuatedEncoding(H, decay=0.2), example_inputs=torch.arange(24).view(3, 8),
            position_embeddings="keep",
        )  # fmt: skip


class Routed(Own):
    """Mixes as many experts as there are tokens, in modules beside its attention."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(D, N), nn.Parameter(torch.randn(N, D))

        def forward(self, states):
            return self.gate(states).softmax(-1) @ self.experts

    def __init__(self):
        super().__init__()
        self.router = self.Router()

    def forward(self, ids):
        return super().forward(ids) + self.router(self.words(ids))


def test_experts_are_left_out_with_a_note():
    torch.manual_seed(0)
    model = SequenceModel(Routed().eval(), vocabulary_size=V)
    results = [positional_attention(model, length=length, words=2) for length in (N, N + 1)]
    assert [result.attention.shape[:2] for result in results] == [(2, H)] * 2
    assert [any("Router" in note for note in result.notes) for result in results] == [True, False]


@pytest.mark.parametrize("mask", [-100.0, -1000.0, -4000.0, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_future_without_weight_is_hidden_by_any_mask(mask, dtype):
    def masked(own, q, k, v):
        n = q.shape[2]
        return merged(((q @ k.mT) + torch.full((n, n), mask, dtype=dtype).triu(1)).softmax(-1) @ v)

    model = own(masked)
    model.module.to(dtype)
    assert positional_attention(model, length=N, words=2).source.causal
    encoding, ids = AttenuatedEncoding(H, decay=0.2, symmetry=0.5), torch.arange(24).view(2, N)
    with pytest.raises(ValueError, match="symmetry"):
        attach(model.module, encoding, example_inputs=ids, position_embeddings="keep")


def test_a_weak_mask_or_a_head_without_a_future_is_no_causal_model():
    def previous(own, q, k, v):
        n = q.shape[2]
        masks = torch.tensor([-20.0, 0, 0, -1e9])
        return merged(((q @ k.mT) + masks[:, None, None] * torch.ones(n, n).triu(1)).softmax(-1) @ v)

    assert not positional_attention(own(previous), length=N, words=2).source.causal


def test_what_cannot_be_changed_alone_is_measured_with_a_note():
    class OneLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.layer, self.norm = nn.Parameter(torch.randn(D, D)), Attend(plain), nn.LayerNorm(D)

        def forward(self, states):
            return self.layer(self.norm(states + self.positions))

    model = SequenceModel(OneLength().eval(), inputs=lambda sample, n: torch.full((1, n, D), sample + 1.0))
    result = positional_attention(model, length=D, words=2)
    assert {axes.name for axes in model.axes} == {UNKNOWN}
    assert any("not proved" in note for note in result.notes)


def test_a_model_is_proved_once():
    model, runs = own(), []
    model.module.register_forward_hook(lambda *call: runs.append(call))
    ids = {"input_ids": torch.arange(N)[None]}
    first, second = (AttentionLayers(model, ids) and len(runs) for _ in range(2))
    assert first - (second - first) == 3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_family_is_proved(name, dtype):
    assert {axes.name for axes in token_axes(SequenceModel(tiny(name).to(dtype)))} == {TOKENS}


@pytest.mark.parametrize("seed", range(4))
def test_saturated_attention_is_proved(seed):
    model = tiny("bert").float()
    signs = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=signs).sign() * 4)
    assert {axes.name for axes in token_axes(SequenceModel(model))} == {TOKENS}
