"""Needles: models whose answers are known, and likelihoods against a run of the whole prompt."""

import re

import datasets
import pandas as pd
import pytest
import torch
import transformers as hf

from pelocality import NoEncoding, RotaryEncoding, attach
from pelocality.evaluation import bag_of_words, evaluate_needles
from pelocality.probes import needle_items
from pelocality.statistics import mean_over_groups, proportion_over_groups
from tests.families import tiny
from tests.test_probes_needles import STORY, word_level

TOKENIZER = word_level("<s>")
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": len(TOKENIZER), "initializer_range": 0.5}


@pytest.fixture(scope="module")
def items():
    return needle_items(TOKENIZER, lengths=[64, 96], contexts=3)


def llama(**options):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **options)).double().eval()


def gpt2(positions=96):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": positions, "vocab_size": len(TOKENIZER)}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, initializer_range=0.5)).double().eval()


def copies(context, question, answers):
    """Find the question in the context, and answer with the word after it."""
    found = re.search(re.escape(question) + r" (\w+)\.", context)
    return [float(found is not None and answer == found[1]) for answer in answers]


def shares(result):
    """The share of right answers by kind."""
    return result.by("kind").set_index("kind")["accuracy"].to_dict()


def test_a_model_that_copies_the_answer_finds_every_needle(items):
    result = evaluate_needles(copies, None, items)
    assert result.accuracy.value == 1
    assert shares(result) == {"needle": 1, "unique answer": 1, "no needle": pytest.approx(0.2)}


@pytest.mark.parametrize("haystack", [None, STORY])
def test_a_bag_of_words_is_at_chance_and_solves_the_control(haystack):
    found = needle_items(TOKENIZER, lengths=[80], contexts=4, haystack=haystack)
    result = evaluate_needles(bag_of_words, None, found)
    assert shares(result) == {"needle": pytest.approx(0.2), "unique answer": 1, "no needle": pytest.approx(0.2)}
    assert result.ties == 40


def test_any_choice_that_does_not_read_the_question_is_exactly_at_chance(items):
    def last(context, question, answers):
        return torch.tensor([context.index(f"is {answer}.") if answer in context else -1 for answer in answers])

    def longest(context, question, answers):
        return [len(answer) for answer in answers]

    for model in (last, longest, lambda context, question, answers: [0] * 5):
        assert evaluate_needles(model, None, items).accuracy.value == pytest.approx(0.2)
    by_depth = evaluate_needles(last, None, items).by("kind", "depth").set_index(["kind", "depth"])["accuracy"]
    assert by_depth["needle"].tolist() == by_depth["no needle"].tolist() == [0, 0, 0, 0, 1]


def score_of_whole_prompts(model, items):
    """The log-likelihood of each right answer, and how much larger it is than the best wrong one."""
    rows = []
    for row in items:
        ids = torch.tensor([TOKENIZER(f"{row['context']} {row['question']}")["input_ids"]])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
        answers = [float(scores[TOKENIZER.convert_tokens_to_ids(answer)]) for answer in row["answers"]]
        right = answers.pop(row["label"])
        rows.append({"score": right, "margin": right - max(answers)})
    return pd.DataFrame(rows)


MODELS = {
    "GPT-2": gpt2,
    "Llama": llama,
    "dynamic rotations": lambda: llama(
        max_position_embeddings=48, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    ),
    "window": lambda: (
        hf.MistralForCausalLM(hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)).double().eval()
    ),
    "Mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=2, initializer_range=0.5)
    ).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_whole_prompt(name, items):
    model, some = MODELS[name](), items.select(range(15, 45))
    result = evaluate_needles(model, TOKENIZER, some)
    fresh = MODELS[name]().eval()  # dynamic rotations remember the longest input
    fresh.load_state_dict(model.state_dict())
    expected = score_of_whole_prompts(fresh, some)
    pd.testing.assert_frame_equal(result.examples[["score", "margin"]], expected, rtol=1e-3)
    assert (result.examples["correct"] == (expected["margin"] > 0)).all()
    assert result.ties == 0


@pytest.mark.parametrize("encoding", [NoEncoding(), "scaled"])
def test_scores_of_attached_encodings_are_those_of_the_whole_prompt(encoding, items):
    model, some = llama(), items.select(range(15))
    before = evaluate_needles(model, TOKENIZER, some)
    with attach(model, RotaryEncoding.from_model(model).scaled(0.5) if encoding == "scaled" else encoding):
        result, expected = evaluate_needles(model, TOKENIZER, some), score_of_whole_prompts(model, some)
    pd.testing.assert_frame_equal(result.examples[["score", "margin"]], expected, rtol=1e-5)
    assert "attached" in result.model
    assert (before.examples["score"] - result.examples["score"]).abs().max() > 1e-3


def test_a_context_begins_with_the_token_that_the_tokenizer_adds(items):
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_level("<s>")
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    row, model = items[0], llama()
    assert tokenizer("The")["input_ids"][0] == 1
    ids = tokenizer(f"{row['context']} {row['question']}", return_tensors="pt")["input_ids"]
    scores = model(input_ids=ids).logits[0, -1].log_softmax(-1)
    right = tokenizer.convert_tokens_to_ids(row["answers"][row["label"]])
    found = evaluate_needles(model, tokenizer, items.select([0])).examples["score"][0]
    assert found == pytest.approx(float(scores[right].detach()))


def test_two_models_are_compared_on_the_same_items(items):
    every, none = evaluate_needles(copies, None, items), evaluate_needles(bag_of_words, None, items)
    table = every.minus(none, "kind").set_index("kind")
    assert table["difference"].to_dict() == {"needle": pytest.approx(0.8), "unique answer": 0, "no needle": 0}
    rows = every.examples["kind"] == "needle"
    gain = every.examples["correct"].astype(int) - none.examples["correct"].astype(int)
    expected = mean_over_groups(gain[rows], every.examples["uid"][rows])
    assert table.loc["needle", ["low", "high"]].tolist() == [expected.low, expected.high]
    assert every.minus(none)["n"].tolist() == [3] * 30
    other = evaluate_needles(copies, None, items.select(range(15)))
    with pytest.raises(ValueError, match="same items in the same order"):
        every.minus(other)


def test_the_tables_have_intervals_over_contexts(items):
    result = evaluate_needles(llama(), TOKENIZER, items)
    frame = result.to_frame()
    assert frame[["kind", "length", "depth"]].drop_duplicates().shape[0] == len(frame) == 30
    rows = result.examples[(result.examples["kind"] == "needle") & (result.examples["length"] == 96)]
    expected = proportion_over_groups(rows["correct"], rows["uid"], 0.9)
    table = result.by("kind", "length", confidence=0.9).set_index(["kind", "length"]).loc["needle", 96]
    assert table[["accuracy", "low", "high"]].tolist() == [expected.value, expected.low, expected.high]
    assert "needles found" in repr(result)
    assert "90 items in 6 groups" in repr(result)


def test_the_model_comes_back_in_its_mode(items):
    model = llama().train()
    evaluate_needles(model, TOKENIZER, items.select([0]))
    assert model.training
    with pytest.raises(ValueError, match="must begin with different tokens"):
        evaluate_needles(model, TOKENIZER, with_answers(items, ["king", "king"]))
    assert model.training


def with_answers(items, answers, label=0):
    row = items[0] | {"answers": answers, "label": label}
    return datasets.Dataset.from_list([row])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)).double(), "model must attend to the left only"),
        (
            lambda: hf.T5ForConditionalGeneration(tiny("t5").config),
            "an encoder and a decoder, for which no score is defined",
        ),
        (lambda: gpt2(80), "beyond the 80 positions"),
        (lambda: lambda context, question, answers: [float("nan")] * 5, "one number for each of 5 answers"),
    ],
)
def test_models_that_cannot_answer_are_refused(model, message, items):
    with pytest.raises(ValueError, match=message):
        evaluate_needles(model(), TOKENIZER, items)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"items": lambda items: [items[0]]}, TypeError, r"items must be a datasets\.Dataset"),
        ({"items": lambda items: items.remove_columns("answers")}, KeyError, "answers"),
        ({"items": lambda items: with_answers(items, ["king", "queen"], label=2)}, ValueError, "label=2"),
        ({"items": lambda items: with_answers(items, ["king", "queen"], label=-1)}, ValueError, "label=-1"),
        ({"model": "gpt2"}, TypeError, "a callable"),
    ],
)
def test_other_items_and_models_are_refused(items, change, error, says):
    change = {name: value(items) if name == "items" else value for name, value in change.items()}
    with pytest.raises(error, match=says):
        evaluate_needles(**({"model": copies, "tokenizer": TOKENIZER, "items": items} | change))


def test_a_model_that_does_not_continue_from_its_cache_reads_whole_prompts(items):
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 8}
    model = hf.MiniMaxForCausalLM(hf.MiniMaxConfig(**SIZES, **sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    some = items.select(range(6))
    found = evaluate_needles(model, TOKENIZER, some).examples["score"]
    for row, score in zip(some, found, strict=True):
        prompt = TOKENIZER(f"{row['context']} {row['question']}")["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].double().log_softmax(-1)
        answer = TOKENIZER(row["answers"][row["label"]], add_special_tokens=False)["input_ids"][0]
        assert score == pytest.approx(float(logits[answer]), abs=1e-5)


def test_a_question_without_a_context_is_judged():
    rows = [{"context": "", "question": "The password of the lamp is", "answers": ["tiger", "king"], "label": 0,
             "kind": "needle", "length": 8, "depth": 0.0, "uid": "a"}]  # fmt: skip
    items = datasets.Dataset.from_list(rows)
    assert evaluate_needles(gpt2(), TOKENIZER, items).examples["score"].notna().all()


def test_contexts_of_other_haystacks_are_no_pairs():
    made = [needle_items(TOKENIZER, lengths=[80], contexts=2, haystack=text) for text in (STORY, STORY[::-1])]
    one, other = (evaluate_needles(copies, None, each) for each in made)
    if made[0]["context"] != made[1]["context"]:
        with pytest.raises(ValueError, match="other must be an evaluation of the same items"):
            one.minus(other)
    assert len(set(one.examples["uid"])) == 2


def test_learned_prompts_are_refused():
    peft = pytest.importorskip("peft")
    prompted = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="has a learned prompt"):
        evaluate_needles(prompted, TOKENIZER, needle_items(TOKENIZER, lengths=[64], contexts=1))
