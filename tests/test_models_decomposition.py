"""decompose against each family's attention, and against split embeddings."""

import pytest
import torch
import transformers as hf
from torch import nn

from pelocality import locality
from pelocality.models import decompose, positional_logits
from tests.families import EVERY, FAMILIES, base_of, eagerly, family_of, offloaded, quantised, tiny, tokens

N = 13
TABLE_ONLY = [
    "bert", "roberta", "distilbert", "electra", "albert", "gpt2", "bert as decoder", "xlm-roberta", "camembert",
    "albert with inner layers", "gpt2 scaled by layer",
]  # fmt: skip
RELATIVE = [
    "t5",
    "mt5",
    "t5 decoder",
    "bloom",
    "xlnet",
    "xlnet one way",
    "deberta",
    "deberta-v2",
    "deberta-v2 c2p only",
]
ROTARY = ["llama", "modernbert", "mistral", "qwen2"]
TOLERANCE = 5e-7  # several families pass through float32 inside


def models_attention(model, ids, **inputs):
    base = base_of(model)
    with eagerly(model):
        return base(ids, output_attentions=True, **inputs).attentions


@pytest.mark.parametrize("name", EVERY)
def test_the_four_terms_add_up_to_the_models_attention(name):
    model, ids = tiny(name), tokens(2, N)
    parts = decompose(model, ids)
    own = models_attention(model, ids)
    for index, layer in enumerate(parts.layers):
        assert (parts.attention[index] - own[layer]).abs().max() < TOLERANCE
        assert own[layer].std() > 0.01
    mine = torch.stack([own[layer] for layer in parts.layers]).clamp(min=0)
    assert (locality(parts) - locality(mine)).abs().max() < TOLERANCE  # the metrics accept the result


def test_what_xlnet_hides_with_same_length_is_hidden():
    sizes = {"vocab_size": 9, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 8}
    xlnet = hf.XLNetModel(hf.XLNetConfig(**sizes, attn_type="uni", same_length=True)).eval()
    own = torch.stack(models_attention(xlnet, torch.tensor([[1, 2, 3, 4]])))[:, 0]
    torch.testing.assert_close(decompose(xlnet, [1, 2, 3, 4]).attention, own)
    assert torch.equal(positional_logits(xlnet, length=4).visible[0], own[0, 0] > 0)


def test_attention_that_is_no_softmax_of_logits_is_refused():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    deberta = hf.DebertaModel(
        hf.DebertaConfig(vocab_size=9, talking_head=True, relative_attention=True, pos_att_type=["c2p"], **sizes)
    )
    for function in (lambda: decompose(deberta, [1, 2, 3]), lambda: positional_logits(deberta, length=4, words=[1])):
        with pytest.raises(ValueError, match="talking_head"):
            function()


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_the_right_leaves_the_real_rows_exact(name):
    # float32: in float64 transformers' ModernBERT gives NaN for a padded query whose window holds no token
    model, ids = tiny(name).float(), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    parts = decompose(model, ids, attention_mask=mask)
    own = models_attention(model, ids, attention_mask=mask)
    for index, layer in enumerate(parts.layers):
        assert (parts.attention[index, 0] - own[layer][0]).abs().max() < 1e-5
        assert (parts.attention[index, 1, :, :9] - own[layer][1, :, :9]).abs().max() < 1e-5


@pytest.mark.parametrize(("names", "layers", "split"), [
    (TABLE_ONLY, (0,), ("table",)),
    (RELATIVE, (0, 1, 2), ("relative",) * 3),
    (ROTARY, (0, 1, 2), ("mean content",) * 3),
    (["mpnet", "deberta with absolute positions"], (0, 1, 2), ("table", "relative", "relative")),
])  # fmt: skip
def test_splits_hold_how_each_layer_is_split(names, layers, split):
    for name in names:
        parts = decompose(tiny(name), tokens(1, 5))
        assert (parts.layers, parts.splits) == (layers, split), name


def test_absolute_terms_equal_those_of_split_embeddings():
    model, ids = tiny("bert"), tokens(1, N)
    embeddings, attention = model.embeddings, model.encoder.layer[0].attention.self
    norm = embeddings.LayerNorm
    parts = decompose(model, ids)
    with torch.no_grad():
        words = embeddings.word_embeddings(ids[0]) + embeddings.token_type_embeddings.weight[0]
        places = embeddings.position_embeddings.weight[:N]
        total = words + places
        scale = ((total - total.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(norm.eps).sqrt()
        content = norm.weight * (words - words.mean(-1, keepdim=True)) / scale + norm.bias
        position = norm.weight * (places - places.mean(-1, keepdim=True)) / scale
        torch.testing.assert_close(content + position, norm(total))
        q_content, k_content = attention.query(content), attention.key(content)
        q_position, k_position = position @ attention.query.weight.T, position @ attention.key.weight.T
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            for i in range(N):
                for j in range(N):
                    for name, query, key in (
                        ("content", q_content, k_content),
                        ("content_to_position", q_content, k_position),
                        ("position_to_content", q_position, k_content),
                        ("position", q_position, k_position),
                    ):
                        by_hand = query[i, part] @ key[j, part] / 8**0.5
                        assert abs(getattr(parts, name)[0, 0, head, i, j] - by_hand) < 1e-10, name


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2"])
def test_disabled_positions_leave_only_the_content_term(name):
    model = tiny(name)
    record = family_of(model)
    with torch.no_grad():
        record.absolute(base_of(model)).table.weight.zero_()
    parts = decompose(model, tokens(1, N))
    for term in (parts.content_to_position, parts.position_to_content, parts.position):
        assert term.abs().max() < 1e-9
    assert parts.content.std() > 0.01


@pytest.mark.parametrize("name", ["t5", "bloom", "xlnet"])
def test_delta_of_relative_models_is_their_positional_logits_on_any_text(name):
    model = tiny(name)
    delta = positional_logits(model, length=N).logits
    for seed in (0, 1):
        parts = decompose(model, tokens(2, N, seed))
        torch.testing.assert_close(parts.position, delta[:, None].expand_as(parts.position))


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_deberta_has_cross_terms_and_no_delta(name):
    parts = decompose(tiny(name), tokens(2, N))
    assert (parts.position == 0).all()
    assert parts.content_to_position.std() > 0.01
    assert parts.position_to_content.std() > 0.01


def test_logits_of_a_rotary_model_on_a_repeated_word_are_delta_only():
    model = tiny("llama")
    parts = decompose(model, torch.full((1, N), 7))
    torch.testing.assert_close(
        parts.position[:, 0], positional_logits(model, length=N, words=[7]).logits, atol=1e-6, rtol=1e-6
    )
    assert (parts.content.abs() + parts.content_to_position.abs() + parts.position_to_content.abs()).max() < 1e-6


@pytest.mark.parametrize("name", ["bert", "xlnet", "electra"])
def test_token_types_count_as_content(name):
    model, ids = tiny(name), tokens(1, N)
    types = (torch.arange(N) >= 6).long()[None]
    parts = decompose(model, ids, token_type_ids=types)
    own = models_attention(model, ids, token_type_ids=types)
    for index, layer in enumerate(parts.layers):
        assert (parts.attention[index] - own[layer]).abs().max() < TOLERANCE
    without = decompose(model, ids)
    assert (parts.content[0] - without.content[0]).abs().max() > 0.01
    if name == "xlnet":
        torch.testing.assert_close(parts.position, without.position)


def test_one_sentence_has_no_batch_axis():
    model, ids = tiny("t5"), tokens(1, N)
    one, batch = decompose(model, ids[0]), decompose(model, ids)
    assert one.logits.shape == (3, 2, N, N)
    torch.testing.assert_close(one.logits, batch.logits[:, 0])
    torch.testing.assert_close(one.attention, batch.attention[:, 0])
    torch.testing.assert_close(decompose(model, ids[0].tolist()).logits, one.logits)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, ValueError),
        ({"layers": [2]}, ValueError),
        ({"layers": []}, ValueError),
    ],
)
def test_invalid_input_is_refused_by_its_name(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        decompose(tiny("bert"), tokens(1, 4), **arguments)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "deberta"])
def test_offloaded_and_wrapped_models_give_what_the_plain_one_gives(name):
    ids = tokens(2, N)
    expected = decompose(tiny(name), ids)
    model = offloaded(tiny(name))
    for wrapped in (model, nn.DataParallel(tiny(name))):
        found = decompose(wrapped, ids)
        for term in ("content", "content_to_position", "position_to_content", "position"):
            torch.testing.assert_close(getattr(found, term), getattr(expected, term))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_quantised_models_are_refused():
    with pytest.raises(ValueError, match="quantised"):
        decompose(quantised(tiny("llama")), tokens(1, N))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_empty_batch_gives_empty_terms(name):
    model = tiny(name)
    one, none = decompose(model, tokens(1, 5)), decompose(model, tokens(0, 5))
    assert none.logits.shape == (one.logits.shape[0], 0, *one.logits.shape[2:])
    assert none.attention.shape == none.logits.shape
    assert none.visible.shape == (len(none.layers), 0, 5, 5)


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
def test_a_padding_id_in_the_text_has_the_position_that_the_model_looks_up(name):
    model, ids = tiny(name), tokens(1, N)
    padding = model.embeddings.padding_idx
    ids[0, 4] = padding
    before = decompose(model, ids, attention_mask=torch.ones_like(ids))
    # a token at the padding id stands at no place, and what follows it one place earlier
    rows = torch.tensor([*range(4), -1, *range(4, N - 1)]) + padding + 1
    with torch.no_grad():
        table = model.embeddings.position_embeddings.weight
        table[padding + 1 : padding + 1 + N] = table[rows].clone()
    other = ids.clone()
    other[0, 4] = 6
    with torch.no_grad():  # the same words at the same places, by another id
        model.embeddings.word_embeddings.weight[6] = model.embeddings.word_embeddings.weight[padding]
    after = decompose(model, other)
    for term in ("content", "content_to_position", "position_to_content", "position"):
        torch.testing.assert_close(getattr(before, term)[0], getattr(after, term)[0])
