"""Probes evaluated with classifiers whose predictions are known."""

import dataclasses
import math
import re
from collections import Counter
from functools import partial

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from hypothesis import assume, given, settings, strategies as st
from tokenizers import processors

from pelocality.corpora import plain_sentence, read_pairs, read_snli
from pelocality.encodings import AttenuatedEncoding
from pelocality.evaluation import evaluate, paper_table
from pelocality.evaluation._columns import joined_groups
from pelocality.evaluation._labels import is_correct
from pelocality.models import attach
from pelocality.probes import constituency_shuffling, random_shuffling, semantic_role_swap
from pelocality.statistics import mean_over_groups
from tests.data import corpora
from tests.families import offloaded, same, state, tiny
from tests.test_models_words import byte_level, wordpiece

THREE = ("entailment", "neutral", "contradiction")
WORDS = ["cats", "river", "a", "dogsing", "42", "dog"]


def rows(count=12, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "premise": " ".join(rng.permutation(WORDS)[: int(rng.integers(3, 6))]),
            "hypothesis": " ".join(rng.choice(WORDS, 3)),
            "label": THREE[i % 3],
        }
        for i in range(count)
    ]


def shuffled(count=12, seed=0):
    return random_shuffling(read_pairs(rows(count, seed)), seed=seed)


def made(originals, perturbed, **columns):
    """A probe whose hypotheses are the predictions of `echo`."""
    names = columns.get("uid", range(len(originals)))
    texts = {f"{side}premise": [f"{side}{name}" for name in names] for side in ("original_", "")}
    texts |= {"original_hypothesis": originals, "hypothesis": perturbed}
    if "label" in columns:
        texts["original_label"] = columns["label"]
    return datasets.Dataset.from_dict(texts | columns)


def echo(premises, hypotheses):
    """Predict the class that the hypothesis names."""
    return hypotheses


def classifier(names=THREE, seed=2, **config):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = hf.BertForSequenceClassification(
            hf.BertConfig(
                vocab_size=len(wordpiece()), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=16, max_position_embeddings=24, id2label=dict(enumerate(names)),
                label2id={name: i for i, name in enumerate(names)}, **config,
            )
        )  # fmt: skip
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    model = model.double().eval()
    some = wordpiece()([row["premise"] for row in rows(40)], padding=True, return_tensors="pt")
    with torch.no_grad():  # else every prediction is the same class
        model.classifier.bias -= model(**some).logits.mean(0)
    return model


def test_an_encoder_decoder_reads_the_class_off_the_last_end_of_a_text():
    tokenizer, probe = wordpiece(), shuffled()
    end = tokenizer.sep_token_id
    ended = {"single": "$A [SEP]", "pair": "$A [SEP] $B:1 [SEP]:1", "special_tokens": [("[SEP]", end)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**ended)
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 24}
    sizes |= {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    ends = {"eos_token_id": end, "bos_token_id": tokenizer.cls_token_id, "pad_token_id": tokenizer.pad_token_id}
    names = {"id2label": dict(enumerate(THREE)), "label2id": {name: i for i, name in enumerate(THREE)}}
    config = hf.BartConfig(
        vocab_size=len(tokenizer), init_std=0.5, decoder_start_token_id=end, **sizes, **ends, **names
    )
    model = hf.BartForSequenceClassification(config).eval()
    found = evaluate(model, tokenizer, probe, batch_size=5).examples
    for row, predicted in zip(probe, found["prediction"], strict=True):
        with torch.no_grad():
            one = model(**tokenizer(row["premise"], row["hypothesis"], return_tensors="pt")).logits[0]
        assert predicted == THREE[one.argmax()]


def test_predictions_equal_those_of_the_model_called_on_one_text_at_a_time():
    model, tokenizer, probe = classifier(), wordpiece(), shuffled()
    found = evaluate(model, tokenizer, probe, batch_size=5)
    for row, example in zip(probe, found.examples.to_dict("records"), strict=True):
        for prefix in ("", "original_"):
            ids = tokenizer(row[f"{prefix}premise"], row[f"{prefix}hypothesis"], return_tensors="pt")
            logits = model(**ids).logits[0].detach()
            assert example[f"{prefix}prediction"] == THREE[int(logits.argmax())]
            assert example[f"{prefix}probability"] == pytest.approx(float(logits.softmax(-1).max()))
            assert example[f"{prefix}correct"] == (example[f"{prefix}prediction"] == row[f"{prefix}label"])
        assert example["agrees"] == (example["prediction"] == example["original_prediction"])
    assert found.examples["uid"].tolist() == probe["uid"]
    assert found.examples["prediction"].nunique() > 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "xlnet"])
def test_predictions_are_those_of_one_text_at_a_time_whatever_the_padding_side(family, side):
    base, tokenizer = tiny(family), wordpiece()
    tokenizer.padding_side = side
    config = base.config
    config.update({"pad_token_id": 1 if family == "roberta" else 0, "id2label": dict(enumerate(THREE))})
    model = hf.AutoModelForSequenceClassification.from_config(config).double().eval()
    getattr(model, model.base_model_prefix).load_state_dict(base.state_dict(), strict=False)  # without a pooler
    for name in ("classifier", "score", "logits_proj"):
        for parameter in getattr(model, name, torch.nn.Module()).parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    texts = ["a cat", "dog", "cats a river 42 dog dogsing", "river dogsing a cats", "a a dog", "42 cats"]
    probe = datasets.Dataset.from_dict({"original_sentence": texts, "sentence": texts[::-1]})
    found = evaluate(model, tokenizer, probe).examples
    alone = [float(model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1).max().detach()) for text in texts]
    assert len(set(alone)) == len(texts)
    assert found["original_probability"].tolist() == pytest.approx(alone, abs=1e-9)
    assert found["probability"].tolist() == pytest.approx(alone[::-1], abs=1e-9)


def test_the_batch_size_changes_no_prediction_and_the_model_stays_unchanged():
    model, probe = classifier().train(), shuffled()
    before = state(model)
    one, many = (evaluate(model, wordpiece(), probe, batch_size=size).examples for size in (1, 64))
    assert one.drop(columns=["probability", "original_probability"]).equals(
        many.drop(columns=["probability", "original_probability"])
    )
    assert np.allclose(one["probability"], many["probability"])
    assert same(before, state(model))


def test_an_error_during_evaluation_leaves_the_model_in_training_mode():
    model = classifier().train()
    model.bert.pooler.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(model, wordpiece(), shuffled())
    assert model.training


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 999))
def test_shuffling_changes_no_prediction_of_a_bag_of_words_and_all_of_an_order_oracle(seed):
    pairs = rows(9, seed)
    gold = {(row["premise"], row["hypothesis"]): row["label"] for row in pairs}
    bags = {(frozenset(Counter(p.split()).items()), h): label for (p, h), label in gold.items()}

    def bag(premises, hypotheses):
        return [bags[frozenset(Counter(p.split()).items()), h] for p, h in zip(premises, hypotheses, strict=True)]

    def oracle(premises, hypotheses):
        wrong = {"entailment": "neutral", "neutral": "contradiction", "contradiction": "entailment"}
        return [
            gold.get((p, h)) or wrong[bag([p], [h])[0]] for p, h in zip(premises, hypotheses, strict=True)
        ]  # fmt: skip

    assume(len(bags) == len(pairs))  # else two pairs are equal, or have premises with the same words
    probe = random_shuffling(read_pairs(pairs), seed=seed)
    unchanged, changed = evaluate(bag, None, probe), evaluate(oracle, None, probe)
    assert (unchanged.original.value, unchanged.perturbed.value, unchanged.difference.value) == (1, 1, 0)
    assert (unchanged.agreement.value, unchanged.p_value) == (1, 1)
    assert (changed.original.value, changed.difference.value, changed.agreement.value) == (1, -1, 0)


def test_classes_are_matched_by_name_in_any_order_and_spelling():
    names = ("CONTRADICTION", "Entailment", "neutral")
    model = classifier()
    permuted = classifier(names)
    permuted.load_state_dict(model.state_dict())
    order = [THREE.index(name.lower()) for name in names]
    with torch.no_grad():
        permuted.classifier.weight.copy_(model.classifier.weight[order])
        permuted.classifier.bias.copy_(model.classifier.bias[order])
    one, other = (evaluate(m, wordpiece(), shuffled()).examples for m in (model, permuted))
    assert one["prediction"].equals(other["prediction"])
    assert one["correct"].equals(other["correct"])


def test_placeholder_names_of_classes_are_replaced_by_the_labels_that_are_given():
    named = evaluate(classifier(("LABEL_0", "LABEL_1", "LABEL_2")), wordpiece(), shuffled(), label_names=THREE)
    assert named.examples["prediction"].equals(evaluate(classifier(), wordpiece(), shuffled()).examples["prediction"])


def test_a_model_without_a_classification_head_is_refused_with_the_class_that_has_one():
    class Silent(hf.BertModel):
        pass

    base = tiny("bert")
    base.config.num_labels = 3
    for model, labels in ((base, THREE), (hf.BertForMaskedLM(base.config), THREE), (Silent(classifier().config), None)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} .*AutoModelForSequenceClassification"):
            evaluate(model, wordpiece(), shuffled(), label_names=labels)


def test_labels_that_contradict_the_models_config_are_used_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        evaluate(classifier(), wordpiece(), shuffled(), label_names=THREE[::-1])
    assert "label_names= orders the classes" in caplog.text


@pytest.mark.parametrize(("names", "labels", "message"), [
    (("positive", "negative"), None, r"labels \['contradiction', 'entailment', 'neutral'\] match none.*'negative'"),
    (("entailment", "neutral", "other"), None, r"labels \['contradiction'\] match none of the classes"),
    (("neutral", "Neutral", "entailment"), None, "label_names must be a list of different class names"),
    (("LABEL_0",), None, r"must have at least 2 classes with names, got \['LABEL_0'\]"),
    (THREE, ("entailment", "neutral"), "label_names must name the model's 3 classes, got 2"),
])  # fmt: skip
def test_classes_that_cannot_be_matched_are_refused(names, labels, message):
    with pytest.raises(ValueError, match=message):
        evaluate(classifier(names), wordpiece(), shuffled(), label_names=labels)


@pytest.mark.parametrize(("label", "prediction", "correct"), [
    ("not entailment", "neutral", True), ("not entailment", "contradiction", True),
    ("not entailment", "entailment", False), ("neutral", "not entailment", True),
    ("contradiction", "not entailment", True), ("entailment", "not entailment", False),
    ("neutral", "contradiction", False),
])  # fmt: skip
def test_not_entailment_covers_neutral_and_contradiction_on_either_side(label, prediction, correct):
    assert is_correct(label, prediction) is correct


def test_a_model_of_two_classes_is_evaluated_on_three_labels_and_the_reverse():
    two = evaluate(classifier(("entailment", "not_entailment")), wordpiece(), shuffled())
    gold = two.examples["label"] == "entailment"
    assert ((two.examples["prediction"] == "entailment") == gold).equals(two.examples["correct"].astype(bool))
    probe = made(["entailment"] * 3, list(THREE), original_label=["entailment"] * 3, label=["non-entailment"] * 3)
    assert evaluate(echo, None, probe).examples["correct"].tolist() == [False, True, True]


def test_the_difference_its_interval_and_its_p_value_are_paired():
    before = ["neutral"] * 60 + ["entailment"] * 40
    after = ["neutral"] * 45 + ["entailment"] * 50 + ["neutral"] * 5
    probe = made(
        before, after, original_label=["neutral"] * 100, label=["neutral"] * 100, uid=list(map(str, range(100)))
    )
    found = evaluate(echo, None, probe)
    assert (found.original.value, found.perturbed.value) == (0.6, 0.5)
    assert found.difference.value == pytest.approx(-0.1)
    assert found.agreement.value == 0.8
    # 15 lost, 5 gained: twice the tail of 20 tosses of a fair coin
    assert found.p_value == pytest.approx(2 * sum(math.comb(20, k) for k in range(6)) / 2**20)
    error = math.sqrt((6 / 102 + 16 / 102 - (10 / 102) ** 2) / 102)  # Bonett and Price (2012)
    wanted = (-10 / 102 - 1.96 * error, -10 / 102 + 1.96 * error)
    assert (found.difference.low, found.difference.high) == pytest.approx(wanted, abs=1e-4)
    row = found.to_frame().iloc[0]
    assert (row["n"], row["difference_low"], row["p"]) == (100, found.difference.low, found.p_value)
    assert re.search(r"^ *difference +-0\.100 \[", repr(found), re.MULTILINE)
    assert re.search(r"<td>agreement</td>\s*<td>0\.800 \[", found._repr_html_())


def test_one_evaluation_is_read_at_any_confidence():
    after = ["neutral", "entailment", "neutral"] * 30
    probe = made(["neutral", "neutral", "entailment"] * 30, after, label=["neutral"] * 90, half=[0, 1] * 45)
    found = evaluate(echo, None, probe)
    change = [0, -1, 1] * 30
    expected = mean_over_groups(change, found.examples["group"], 0.5)
    assert found.estimate("difference", confidence=0.5) == expected
    for read in (found.to_frame, partial(found.by, "half")):
        pd.testing.assert_frame_equal(read(), read(confidence=0.95))
        narrow, usual = read(confidence=0.5), read()
        for name in ("original", "perturbed", "difference", "agreement"):
            assert (narrow[f"{name}_low"] > usual[f"{name}_low"]).all()
            assert (narrow[f"{name}_high"] < usual[f"{name}_high"]).all()
        with pytest.raises(TypeError, match="confidence must be a number"):
            read(confidence="95")
    with pytest.raises(ValueError, match=r"name must be 'original'.*, got 'p'"):
        found.estimate("p")
    row = found.to_frame(confidence=0.5).iloc[0]
    table = paper_table({"m": {"Random": found}}, confidence=0.5).values.set_index("column")
    assert table.loc["original", ["low", "high"]].tolist() == [100 * row["original_low"], 100 * row["original_high"]]
    assert table.loc["Random", ["low", "high"]].tolist() == [100 * expected.low, 100 * expected.high]


def test_labelled_sentences_are_evaluated():
    probe = random_shuffling([plain_sentence(f"one two three {k}", uid=str(k)) for k in range(3)])
    probe = probe.map(lambda row: dict.fromkeys(("label", "original_label"), "positive"))
    names = ["negative", "positive"]
    found = evaluate(lambda texts: [[0, int(t.startswith("one"))] for t in texts], None, probe, label_names=names)
    assert found.original.value == 1
    assert found.perturbed.value == np.mean([text.startswith("one") for text in probe["sentence"]])


def test_copies_of_a_pair_change_neither_intervals_nor_the_p_value():
    before = ["neutral"] * 30 + ["entailment"] * 20
    after = ["entailment"] * 12 + ["neutral"] * 38
    once, copied = (
        evaluate(
            echo,
            None,
            made(
                before * k,
                after * k,
                original_label=["neutral"] * 50 * k,
                label=["neutral"] * 50 * k,
                number=[*range(50)] * k,
            ),
            groups="number",
        )
        for k in (1, 5)
    )
    assert copied.p_value == pytest.approx(once.p_value)
    for name in ("original", "perturbed", "difference", "agreement"):
        assert dataclasses.astuple(getattr(copied, name)) == pytest.approx(
            dataclasses.astuple(getattr(once, name)), abs=0.008
        ), name


def test_the_interval_is_over_groups_of_rows():
    before, after = ["neutral"] * 80, [*["entailment"] * 40, *["neutral"] * 40]
    probe = made(before, after, original_label=before, label=before, sentence_id=[i // 10 for i in range(80)])
    together, alone = evaluate(echo, None, probe, groups="sentence_id"), evaluate(echo, None, probe)
    assert together.difference.value == alone.difference.value == -0.5
    assert together.difference.high - together.difference.low > 2 * (alone.difference.high - alone.difference.low)
    assert "80 perturbed examples in 8 groups" in repr(together)
    assert "groups" not in repr(alone).split("difference")[0]


@pytest.mark.parametrize("labels", ["equal", "two"])
@pytest.mark.parametrize("groups", [None, "row", "half"])
def test_rows_with_equal_originals_are_one_group_whatever_is_named(groups, labels):
    before, after = ["neutral"] * 60, [*["entailment"] * 20, *["neutral"] * 40]
    gold = ["neutral", "entailment"] * 30 if labels == "two" else before
    columns = {"original_label": gold, "label": gold, "uid": [str(i // 5) for i in range(60)]}
    found = evaluate(echo, None, made(before, after, **columns, row=[*range(60)], half=[i // 30 for i in range(60)]),
                     groups=groups)  # fmt: skip
    wanted = [i // 30 for i in range(60)] if groups == "half" else [i // 5 for i in range(60)]
    assert pd.factorize(found.examples["group"])[0].tolist() == wanted


def test_groups_that_share_an_original_are_one():
    names, texts = ["a", "a", "b", "b", "c", "d"], ["x", "y", "y", "z", "z", "w"]
    assert joined_groups(names, texts) == ["a"] * 5 + ["d"]
    assert joined_groups([1, "1", 2], ["x", "y", "z"]) == [1, "1", 2]


def test_numbers_by_size_and_label_are_those_of_the_subsets():
    found = evaluate(classifier(), wordpiece(), shuffled(30))
    table = found.by("size", "original_label")
    assert table["n"].sum() == len(found.examples)
    assert (table["n"] * table["perturbed"]).sum() == pytest.approx(found.perturbed.value * len(found.examples))
    one = found.examples[found.examples["label"] == "neutral"]
    assert found.by("label").set_index("label").loc["neutral", "original"] == pytest.approx(
        one["original_correct"].mean()
    )
    with pytest.raises(KeyError, match="colour"):
        found.by("colour")


def test_a_column_with_the_name_of_a_number_is_refused_in_tables():
    probe = made(["a", "b"], ["a", "b"], label=["a", "b"], n=[3, 4])  # such as the number of words
    with pytest.raises(ValueError, match="by cannot name 'n', which is also a number of its table; rename the column"):
        evaluate(echo, None, probe).by("n")
    found = evaluate(echo, None, probe.rename_column("n", "words")).by("words")
    assert found[["words", "n"]].to_numpy().tolist() == [[3, 1], [4, 1]]


def test_without_labels_only_the_agreement_is_computed():
    probe = made(["a", "b", "c"], ["a", "b", "x"])
    found = evaluate(echo, None, probe)
    assert found.agreement.value == pytest.approx(2 / 3)
    assert math.isnan(found.difference.value)
    assert "difference" not in repr(found)
    with pytest.raises(TypeError, match="with labels"):
        paper_table({"m": {"Random": found}})


def test_labels_may_be_numbers_where_the_dataset_has_their_names():
    values = made(["neutral", "entailment"], ["neutral", "neutral"], label=[1, 0])
    names = datasets.ClassLabel(names=["entailment", "neutral"])
    named = values.cast_column("label", names).cast_column("original_label", names)
    assert evaluate(echo, None, named).examples["correct"].tolist() == [True, False]


def test_single_sentences_work_like_pairs():
    probe = datasets.Dataset.from_dict({"original_sentence": ["good", "bad"], "sentence": ["good", "good"]})
    assert evaluate(lambda texts: texts, None, probe).agreement.value == 0.5
    labelled = probe.add_column("label", ["good", "bad"]).add_column("original_label", ["good", "bad"])
    assert evaluate(lambda texts: texts, None, labelled).difference.value == -0.5


def test_texts_longer_than_the_model_are_truncated_counted_and_logged(caplog):
    long = " ".join(["cats"] * 40)
    probe = datasets.Dataset.from_dict({"original_sentence": [long, "a dog"], "sentence": ["dog a", "dog a"]})
    with caplog.at_level("WARNING"):
        assert evaluate(classifier(), wordpiece(), probe).truncated == 1
    assert "1 texts were truncated" in caplog.text
    assert "1 texts truncated" in repr(evaluate(classifier(), wordpiece(), probe))
    assert evaluate(classifier(), wordpiece(), probe, max_length=5).truncated == 1


def test_a_model_whose_positions_are_replaced_receives_whole_texts():
    long = " ".join(["cats"] * 40)
    probe = datasets.Dataset.from_dict({"original_sentence": [long, "a dog"], "sentence": ["dog a", "dog a"]})
    model, tokenizer = classifier(), wordpiece()
    tokenizer.model_max_length = 24  # saved with the tokenizer, for the position table
    with attach(model, AttenuatedEncoding()):
        found = evaluate(model, tokenizer, probe)
        assert found.truncated == 0
        assert evaluate(model, tokenizer, probe, max_length=5).truncated == 1
        with torch.no_grad():
            probabilities = model(**tokenizer(long, return_tensors="pt")).logits.softmax(-1)
    assert found.examples["original_probability"][0] == pytest.approx(float(probabilities.max()))


def test_offloaded_models_are_evaluated_and_the_tokenizer_of_another_model_is_refused():
    plain, moved = (evaluate(model, wordpiece(), shuffled(4)) for model in (classifier(), offloaded(classifier())))
    assert plain.examples["prediction"].tolist() == moved.examples["prediction"].tolist()
    other = byte_level()
    other.pad_token = "<|end|>"
    with pytest.raises(ValueError, match=r"input_ids must be in 0\.\.13, .* is this the model's tokenizer"):
        evaluate(classifier(), other, shuffled(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_callable_may_return_scores_of_the_classes_in_labels(dtype):
    def scores(premises, hypotheses):
        return torch.tensor([[name in text for name in THREE] for text in hypotheses]).to(dtype)

    probe = made(["neutral", "entailment"], ["neutral", "neutral"], label=["neutral", "entailment"])
    assert evaluate(scores, None, probe, label_names=THREE).examples["correct"].tolist() == [True, False]


def constant(scores):
    return lambda premises, hypotheses: np.full((len(premises), len(scores)), scores)


@pytest.mark.parametrize(("function", "names", "error", "says"), [
    (lambda p, h: ["Entails"] * len(p), None, ValueError, "entails.*label_names="),
    (lambda p, h: ["neutral"], None, ValueError, "6 label names"),
    (lambda p, h: [0] * len(p), None, ValueError, r"result\['label'\]"),
    (lambda p, h: pd.DataFrame(np.eye(3)[[0] * len(p)], columns=list(THREE)), None, ValueError, "to_numpy"),
    (lambda p, h: np.ma.masked_array(np.eye(3)[[0] * len(p)], mask=True), THREE, TypeError, "masked array"),
    (constant([0, 0, 1]), ["a", "b"], ValueError, "label_names="),
    (constant([np.nan] * 3), THREE, ValueError, "NaN or infinite"),
    (constant([-np.inf] * 3), THREE, ValueError, "NaN or infinite"),
    (3, None, TypeError, "model must be a transformers model or a callable, got 3"),
    (hf.BertForSequenceClassification, None, TypeError, "load it with AutoModelForSequenceClassification"),
    (hf.TextClassificationPipeline(model=classifier(), tokenizer=wordpiece()), None, TypeError, "of a pipeline"),
])  # fmt: skip
def test_functions_that_give_neither_names_nor_scores_are_refused(function, names, error, says):
    with pytest.raises(error, match=says):
        evaluate(function, None, shuffled(3), label_names=names)


ONE = {"premise": ["a b", "c d"], "hypothesis": ["x", "y"], "original_premise": ["b a", "d c"]}
ONE |= {"original_hypothesis": ["x", "y"]}


def labelled(label, original_label):
    return datasets.Dataset.from_dict(ONE | {"label": label, "original_label": original_label})


def evaluate_as_entailment(probe, **options):
    return evaluate(lambda p, h: ["entailment"] * len(p), None, probe, **options)


ALL = ["entailment"] * 2


@pytest.mark.parametrize(
    ("probe", "advice"),
    [
        (labelled(ALL, ALL).remove_columns("label"), "where both are the same: "),
        (labelled(ALL, ALL).remove_columns("original_label"), "where both are the same: "),
        (labelled(["entailment", None], ALL), "remove them: "),
        (labelled(ALL, ["entailment", "-"]), "remove them: "),
        (labelled([0, 0], ALL), "cast the column: "),
        (labelled(ALL, [0, 0]), "cast the column: "),
    ],
)
def test_the_advice_for_labels_works(probe, advice):
    with pytest.raises(ValueError, match=advice) as raised:
        evaluate_as_entailment(probe)
    code = str(raised.value).partition(advice)[2].replace("...", "'entailment', 'neutral'")
    assert evaluate_as_entailment(eval(code, {"probe": probe, "datasets": datasets})).perturbed.value == 1


def test_both_remedies_for_a_model_without_a_padding_token_work():
    tokenizer, probe = wordpiece(), shuffled(3)
    tokenizer.pad_token = None  # nothing is padded
    config = tiny("gpt2").config
    config.id2label = dict(enumerate(THREE))
    model = hf.GPT2ForSequenceClassification(config).eval()
    with pytest.raises(ValueError, match="padding token"):
        evaluate(model, tokenizer, probe)
    one_by_one = evaluate(model, tokenizer, probe, batch_size=1).examples
    model.config.pad_token_id = 0
    together = evaluate(model, tokenizer, probe).examples
    assert together["probability"].tolist() == pytest.approx(one_by_one["probability"].tolist())


def test_a_single_example_has_wide_intervals():
    found = evaluate_as_entailment(labelled(["entailment"] * 2, ["entailment"] * 2).select([0]))
    assert (found.original.value, found.perturbed.value, found.difference.value, found.p_value) == (1, 1, 0, 1)
    assert found.difference.high == -found.difference.low == pytest.approx(0.924, abs=5e-4)


def test_missing_groups_are_refused():
    probe = labelled(["entailment"] * 2, ["entailment"] * 2)
    for values in (["a", None], [["a"], ["b"]], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="groups must be a column with one value in each row; 'who'"):
            evaluate_as_entailment(probe.add_column("who", values), groups="who")


def broken(number):
    model = classifier()
    torch.nn.init.constant_(model.classifier.bias, number)
    return model


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"probe": datasets.DatasetDict({"test": shuffled()})}, TypeError, r"probe\['test'\]"),
    ({"probe": datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"]})}, ValueError, "original_premise"),
    ({"probe": shuffled().select([])}, ValueError, "0 rows"),
    ({"probe": shuffled().add_column("group", list(range(12)))}, ValueError, "'group'.*rename"),
    ({"label_names": set(THREE)}, ValueError, "label_names"),
    ({"label_names": {name: 2 - i for i, name in enumerate(THREE)}}, ValueError, "label_names"),
    ({"batch_size": 0}, ValueError, "batch_size"),
    ({"max_length": 0}, ValueError, "max_length must be at least 2, got 0"),
    ({"tokenizer": None}, TypeError, "tokenizer"),
    ({"model": broken(np.nan)}, ValueError, "NaN or infinite"),
    ({"model": broken(-np.inf)}, ValueError, "NaN or infinite"),
])  # fmt: skip
def test_invalid_arguments_are_refused(change, error, says):
    arguments = {"model": classifier(), "tokenizer": wordpiece(), "probe": shuffled()} | change
    with pytest.raises(error, match=says):
        evaluate(**arguments)


def test_the_paper_table_has_the_layout_of_the_paper():
    labels = ["neutral"] * 10
    shuffle = made(labels, ["neutral"] * 9 + ["entailment"], label=labels, uid=list("abcdefghij"))
    other = made(labels[:5], ["neutral"] * 5, label=labels[:5], uid=list("vwxyz"))
    wrong_before = made(["entailment"] * 5, ["neutral"] * 5, label=labels[:5], uid=list("lmnop"))
    swap = made(labels, labels, original_label=labels, label=["contradiction"] * 10, uid=list("abcdefghij"))
    probes = {"Sh-3": evaluate(echo, None, shuffle), "Sh-SR": evaluate(echo, None, swap)}
    probes |= {"Sh-4": evaluate(echo, None, other), "Random": evaluate(echo, None, wrong_before)}
    table = paper_table({"my_model": probes}, symmetry={"my_model": 0.879}, locality={"my_model": 0.162})
    assert table.to_markdown(intervals=False).splitlines() == [
        "| model | Sym | Loc | original | Sh-3 | Sh-4 | Random | original (SR) | Sh-SR |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| my_model | 87.9 | 16.2 | 75.0 | -10.0 | 0.0 | +100.0 | 100.0 | -100.0 |",
    ]
    assert r"my\_model & 87.9 & 16.2 & 75.0 & $-$10.0 & 0.0" in table.to_latex(intervals=False)
    assert table.to_latex().splitlines()[0] == r"\begin{tabular}{lrrrrrrrr}"
    assert table.to_frame().loc["my_model", "original"] == "75.0 [53.1, 88.8]"
    assert "my_model" in repr(table)
    assert "my_model" in table._repr_html_()
    named = paper_table({"<b>": {"Sh-3": probes["Sh-3"]}})
    assert "<b>" not in named._repr_html_()


def test_several_runs_give_their_mean_and_t_interval():
    labels = ["neutral"] * 10
    runs = [
        evaluate(echo, None, made(labels, ["entailment"] * k + ["neutral"] * (10 - k), label=labels)) for k in (1, 2, 3)
    ]
    row = paper_table({"m": {"Random": runs}}).values.set_index("column").loc["Random"]
    assert row["value"] == pytest.approx(-20)
    assert row["runs"] == 3
    assert (row["low"], row["high"]) == pytest.approx((-20 - 4.303 * 10 / 3**0.5, -20 + 4.303 * 10 / 3**0.5), abs=0.01)
    half = paper_table({"m": {"Random": runs}}, confidence=0.5).values.set_index("column").loc["Random"]
    assert half["high"] == pytest.approx(-20 + 0.816 * 10 / 3**0.5, abs=0.01)


def test_originals_of_two_corpora_are_distinguished_by_text_and_not_by_uid():
    rows = {"a b c": "neutral", "d e f": "entailment"}
    found = {
        text: evaluate(
            lambda premises, hypotheses: ["neutral"] * len(premises),
            None,
            random_shuffling(read_pairs([{"premise": text, "hypothesis": "x", "label": label}])),
        )
        for text, label in rows.items()
    }
    assert found["a b c"].examples["uid"].tolist() == found["d e f"].examples["uid"].tolist()
    values = paper_table({"m": found}).values.set_index("column")
    assert values.loc["original", "value"] == 50


def test_intervals_over_runs_stay_within_the_range_of_the_number():
    labels = ["neutral"] * 10
    runs = [evaluate(echo, None, made(labels[:k] + ["entailment"] * (10 - k), labels, label=labels)) for k in (0, 10)]
    values = paper_table({"m": {"Random": runs}}).values.set_index("column")
    assert values.loc["original", ["low", "high"]].tolist() == [0, 100]
    assert values.loc["Random", ["low", "high"]].tolist() == [-100, 100]


KEEPS = evaluate_as_entailment(labelled(["entailment"] * 2, ["entailment"] * 2))
CHANGES = evaluate_as_entailment(labelled(["neutral"] * 2, ["entailment"] * 2))


@pytest.mark.parametrize(("models", "options", "error", "says"), [
    ({}, {}, TypeError, "models"),
    ({"m": {"p": KEEPS}, "n": {}}, {}, TypeError, "models"),
    ({"m": {"p": 3}}, {}, TypeError, r"models\['m'\]\['p'\] .*got 3"),
    ({"m": {"p": KEEPS}, "n": {"p": CHANGES}}, {}, ValueError, "'p' .*rename one"),
    ({"m": {"p": [KEEPS, KEEPS], "q": KEEPS}}, {}, ValueError, "zip"),
    ({"m": {"original": KEEPS}}, {}, ValueError, "'original', a reserved column"),
    ({"m": {"p": KEEPS}}, {"locality": {"m": "a"}}, TypeError, "Loc of 'm' must be a number, got 'a'"),
    ({"m": {"p": KEEPS}}, {"confidence": 95}, ValueError, "confidence"),
])  # fmt: skip
def test_invalid_arguments_of_the_paper_table_are_refused(models, options, error, says):
    with pytest.raises(error, match=says):
        paper_table(models, **options)
    assert paper_table({"m": {"p": KEEPS}, "n": {"q": CHANGES}}).columns == ("original", "p", "original (SR)", "q")


@pytest.mark.parametrize("path", corpora("nli_pairs.jsonl"))
def test_a_bag_of_words_ignores_shuffles_and_a_constant_classifier_fails_on_swaps(path):
    corpus = [pair for pair, _ in zip(read_snli(path), range(250), strict=False)]

    def bag(premises, hypotheses):
        return [THREE[sum(map(len, sorted(re.findall(r"\w+", text))[::2])) % 3] for text in premises]

    shuffle = evaluate(bag, None, constituency_shuffling(corpus, range(3, 7)), groups="original_premise")
    assert shuffle.agreement.value == 1
    assert not shuffle.changes_labels
    assert set(shuffle.by("size")["size"]) <= {3, 4, 5, 6}
    swaps = semantic_role_swap(corpus, source="constituents", label_policy="not entailment", labels=("entailment",))
    constant = evaluate(lambda premises, hypotheses: ["entailment"] * len(premises), None, swaps)
    assert (constant.original.value, constant.perturbed.value, constant.difference.value) == (1, 0, -1)
    assert constant.changes_labels
    table = paper_table({"bag": {"Sh": shuffle, "Sh-SR": constant}})
    assert table.columns == ("original", "Sh", "original (SR)", "Sh-SR")
