"""Texts of models whose rotations depend on the longest text of a batch: a text is measured as it is alone."""

import copy

import pytest
import torch
import transformers as hf

from pelocality.evaluation import log_likelihood, pseudo_log_likelihood
from pelocality.evaluation._predict import Classifier
from pelocality.models import audit, decompose, positional_attention, positional_logits, reflection_gap, text_average
from tests.families import same, small, spread, state, tokens

_GROUPED = {"num_key_value_heads": 1, "pad_token_id": 0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "dynamic": lambda: hf.LlamaModel(
        small(hf.LlamaConfig, max_position_embeddings=16, rope_parameters=DYNAMIC, **_GROUPED)
    ),
    "longrope": lambda: hf.Phi3Model(
        small(hf.Phi3Config, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG,
              **_GROUPED)
    ),
    "dynamic in some layers": lambda: hf.Gemma3TextModel(
        small(hf.Gemma3TextConfig, head_dim=8, max_position_embeddings=16,
              layer_types=["sliding_attention", "full_attention"],
              rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DEFAULT}, **_GROUPED)
    ),
}  # fmt: skip
LENGTHS = [10, 24, 20, 20, 12]


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spread(MODELS[name]())


def texts():
    return [tokens(1, n, seed)[0] for seed, n in enumerate(LENGTHS)]


def padded(side):
    ids, mask = torch.zeros(len(LENGTHS), 24, dtype=torch.long), torch.zeros(len(LENGTHS), 24, dtype=torch.long)
    for row, text in enumerate(texts()):
        where = slice(24 - len(text), 24) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = text, 1
    return [{"input_ids": ids, "attention_mask": mask}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_does_not_depend_on_the_texts_of_its_batch(name, side):
    model = build(name)
    before = state(model)
    alone = [text_average(model, [{"input_ids": text}], special_tokens=True) for text in texts()]
    together = text_average(model, padded(side), special_tokens=True)
    assert same(before, state(model))
    for metric, values in together.per_sample.items():
        torch.testing.assert_close(values, torch.cat([each.per_sample[metric] for each in alone]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        together.attention[..., -1, :], alone[1].attention[..., -1, :], rtol=0, atol=1e-6
    )  # the only text of 24 tokens
    gaps = torch.cat([reflection_gap(model, text) for text in texts()])
    torch.testing.assert_close(reflection_gap(model, **padded(side)[0]), gaps)
    share = text_average(model, [{"input_ids": text} for text in texts()], special_tokens=True).share
    torch.testing.assert_close(together.share, share)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_does_not_depend_on_what_the_model_read_before(name):
    model, used = build(name), build(name)
    with torch.no_grad():
        used(tokens(1, 60))
    cached = {key: value for key, value in vars(used.rotary_emb).items() if "seq_len_cached" in key}
    frequencies = {key: value.clone() for key, value in used.rotary_emb.named_buffers()}
    text = [{"input_ids": tokens(2, 30)}]
    expected = text_average(model, text, special_tokens=True)
    torch.testing.assert_close(text_average(used, text, special_tokens=True).attention, expected.attention)
    words = {"length": 30, "words": [7, 8], "progress": False}
    torch.testing.assert_close(
        positional_attention(used, **words).attention, positional_attention(model, **words).attention
    )
    assert cached == {key: value for key, value in vars(used.rotary_emb).items() if "seq_len_cached" in key}
    if name != "longrope":  # whose frequencies are chosen anew in every call
        for key, value in used.rotary_emb.named_buffers():
            assert torch.equal(value, frequencies[key])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_texts_of_equal_length_are_still_run_together(name, monkeypatch):
    model, sizes = build(name), []
    forward = model.forward

    def record(*arguments, **inputs):
        sizes.append(tuple(inputs["input_ids"].shape))
        return forward(*arguments, **inputs)

    monkeypatch.setattr(model, "forward", record)
    text_average(model, padded("left"), special_tokens=True)
    assert sizes[-4:] == [(1, 10), (1, 24), (2, 20), (1, 12)]  # after the runs that find the layers


# ---- after a long text


CAUSAL = {
    "dynamic": lambda: hf.LlamaForCausalLM(
        small(hf.LlamaConfig, max_position_embeddings=16, rope_parameters=DYNAMIC, **_GROUPED)
    ),
    "longrope": lambda: hf.MistralForCausalLM(
        small(hf.MistralConfig, max_position_embeddings=64, rope_parameters=LONG, **_GROUPED)
    ),
    "dynamic in some layers": lambda: hf.Gemma3ForCausalLM(MODELS["dynamic in some layers"]().config),
}
MASKED = {
    name: lambda kind=kind: hf.ModernBertForMaskedLM(
        small(
            hf.ModernBertConfig,
            pad_token_id=0,
            max_position_embeddings=16,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={"full_attention": kind, "sliding_attention": DEFAULT},
        )
    )
    for name, kind in (("dynamic", DYNAMIC), ("longrope", LONG))
}


def pair_of(make):
    """Return two equal models, of which the second has read a long text."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = spread(make()).eval()
    used = copy.deepcopy(model)
    with torch.no_grad():
        used(tokens(1, 60))
    return model, used


class Words:
    """A tokenizer of words that are numbers."""

    bos_token_id, mask_token_id, all_special_ids, model_max_length = 1, 2, (1, 2), 99

    def __len__(self):
        return 99

    def __call__(self, texts, **options):
        if not isinstance(texts, str):
            return {"input_ids": [self(text)["input_ids"] for text in texts]}
        ids = [int(word) for word in texts.split()]
        return {"input_ids": ids, "special_tokens_mask": [0] * len(ids)}

    def convert_ids_to_tokens(self, ids):
        return list(map(str, ids))


SENTENCES = [" ".join(map(str, text.tolist())) for text in texts()]


@pytest.mark.parametrize(
    ("score", "make"),
    [
        (log_likelihood, CAUSAL["dynamic"]),
        (log_likelihood, CAUSAL["longrope"]),
        (pseudo_log_likelihood, MASKED["dynamic"]),
    ],
)
def test_the_likelihood_of_a_text_does_not_depend_on_what_the_model_read_before(score, make):
    model, used = pair_of(make)
    alone = torch.cat([score(model, Words(), [sentence], progress=False) for sentence in SENTENCES])
    before = state(used)
    torch.testing.assert_close(score(used, Words(), SENTENCES, progress=False), alone, rtol=0, atol=1e-6)
    assert same(before, state(used))
    torch.testing.assert_close(score(used, Words(), SENTENCES[3:4], progress=False), alone[3:4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [CAUSAL["dynamic"], CAUSAL["longrope"], MASKED["dynamic"]])
@pytest.mark.parametrize("n", [10, 30])
def test_the_parts_of_logits_do_not_depend_on_what_the_model_read_before(make, n):
    model, used = pair_of(make)
    before = state(used)
    one, other = (decompose(each, tokens(1, n, 3)[0]) for each in (model, used))
    for name in ("content", "content_to_position", "position_to_content", "position"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=1e-6)
    one, other = (positional_logits(each, length=n, words=[7, 8], progress=False) for each in (model, used))
    torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=1e-6)
    assert same(before, state(used))


def test_an_audit_does_not_depend_on_what_the_model_read_before():
    model, used = pair_of(CAUSAL["dynamic"])
    before = state(used)
    one, other = (audit(each, input_ids=tokens(1, 30, 3)) for each in (model, used))
    assert same(before, state(used))
    assert one.mismatches == other.mismatches
    assert [row.first_key for row in one.layers] == pytest.approx([row.first_key for row in other.layers], abs=1e-7)


def test_the_class_of_a_text_does_not_depend_on_what_the_model_read_before():
    config = CAUSAL["dynamic"]().config
    config.id2label = {0: "entailment", 1: "contradiction"}
    found = []
    for model in pair_of(lambda: hf.LlamaForSequenceClassification(config)):
        predicted = Classifier(model, Words(), None, 8, None)([(sentence,) for sentence in SENTENCES[2:4]])
        found.append([probability for _, probability in predicted])
    assert found[0] == pytest.approx(found[1], abs=1e-7)
