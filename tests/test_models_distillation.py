"""The distance between the hidden states of two models."""

import copy

import pytest
import torch
from transformers import BertConfig, BertModel, ConvBertConfig, ConvBertModel

from pelocality.encodings import AttenuatedEncoding, NoEncoding
from pelocality.models import attach, distillation_loss, relocate
from tests.test_models_relocation import FAMILIES, TEXTS, WORDS, make_tokenizer


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
        assert (found.token_loss, found.mean_loss) == found
    assert distillation_loss(model, model, tokenizer, texts, length=12) == pytest.approx((0, 0), abs=1e-6)


def test_no_convolution_mixes_padding_into_the_tokens():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ConvBertConfig(**sizes, embedding_size=16, head_ratio=1, conv_kernel_size=3, initializer_range=0.5)
    (one, other), tokenizer = (ConvBertModel(config) for _ in range(2)), make_tokenizer(True)
    texts = [text for text in TEXTS if len(text.split()) <= 10][:30]  # one piece each
    losses = [distillation_loss(one, other, tokenizer, texts, length=12, batch_size=size) for size in (1, 9)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    options = {"length": 12, "tokens": 300, "batch_size": 4, "held_out": 9, "every": 9, "progress": False}
    encoding = AttenuatedEncoding(2, 0.3, form="logits")
    found = relocate(one, encoding, tokenizer, texts, position_embeddings="keep", **options)
    held_out = distillation_loss(found.model, one, tokenizer, texts[-9:], length=12, batch_size=1)
    assert found.curve.iloc[-1, 1:].tolist() == pytest.approx(held_out, abs=1e-5)


def test_tuples_are_no_different():
    make, tokenizer = FAMILIES["bert"]
    one, other = make(), make()
    other.base_model.config.return_dict = False
    assert distillation_loss(one, other, tokenizer, TEXTS, length=12) == pytest.approx((0, 0), abs=1e-6)


def test_models_that_cannot_be_compared_are_refused():
    tokenizer, sizes = make_tokenizer(True), {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model, small = (BertModel(BertConfig(hidden_size=8, vocab_size=words, **sizes)) for words in (32, 9))
    with pytest.raises(ValueError, match=r"ids must be in 0\.\.8"):
        distillation_loss(model, small, tokenizer, TEXTS, length=12)


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
