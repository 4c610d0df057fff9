"""The distance between the hidden states of two models."""

import copy

import pytest
import torch

from pelocality.encodings import AttenuatedEncoding, NoEncoding
from pelocality.models import attach, distillation_loss
from tests.test_models_relocation import FAMILIES, TEXTS, WORDS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_half_precision_states_is_computed_in_float32(dtype):
    make, tokenizer = FAMILIES["bert"]
    model = make().to(dtype)
    assert distillation_loss(model, model, tokenizer, TEXTS, length=12) == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_that_of_texts_one_by_one_without_padding(name):
    make, tokenizer = FAMILIES[name]
    model = make()
    other = copy.deepcopy(model)
    attach(other, AttenuatedEncoding(2, 0.3, form="logits"))
    texts = [text for text in TEXTS if len(text.split()) <= 10][:9]
    of_tokens, of_means = [], []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            h, r = (each.eval().base_model(ids).last_hidden_state[0].double() for each in (other, model))
        of_tokens.append(sum(1 - float(a @ b / a.norm() / b.norm()) for a, b in zip(h, r, strict=True)) / len(h))
        a, b = h.mean(0), r.mean(0)
        of_means.append(1 - float(a @ b / a.norm() / b.norm()))
    wanted = (sum(of_tokens) / 9, sum(of_means) / 9)
    for batch_size in (1, 4):
        found = distillation_loss(other, model, tokenizer, texts, length=12, batch_size=batch_size)
        assert found == pytest.approx(wanted, abs=1e-5)
    assert distillation_loss(model, model, tokenizer, texts, length=12) == pytest.approx((0, 0), abs=1e-6)


def test_long_texts_are_cut_into_pieces():
    make, tokenizer = FAMILIES["bert"]
    model = make()
    other = copy.deepcopy(model)
    attach(other, NoEncoding(2))
    words = " ".join(WORDS).split()
    whole = distillation_loss(other, model, tokenizer, [" ".join(words[:12])], length=8)
    parts = distillation_loss(other, model, tokenizer, [" ".join(words[:6]), " ".join(words[6:12])], length=8)
    assert whole == pytest.approx(parts, abs=1e-6)


def test_the_loss_of_empty_texts_is_refused():
    make, tokenizer = FAMILIES["bert"]
    with pytest.raises(ValueError, match="texts must hold some text"):
        distillation_loss(make(), make(), tokenizer, ["", " "], length=12)
