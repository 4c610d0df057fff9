"""Scores of language models against a loop over tokens, and minimal pairs with known results."""

import copy
import dataclasses
import functools
import operator

import datasets
import numpy as np
import pytest
import torch
import transformers as hf

from pelocality.corpora import read_pairs
from pelocality.encodings import ALiBi, AttenuatedEncoding
from pelocality.evaluation import (
    evaluate_minimal_pairs,
    likelihood,
    log_likelihood,
    pseudo_log_likelihood,
)
from pelocality.evaluation._words import regions_of
from pelocality.models import SequenceModel, _restore, attach
from pelocality.probes import minimal_pairs, random_shuffling, semantic_role_swap
from tests.families import offloaded, tiny
from tests.test_evaluation import classifier, rows
from tests.test_models_words import byte_level, wordpiece
from tests.test_probes import sentence


def masked_model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = hf.BertConfig(
            vocab_size=15, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=24,
        )  # fmt: skip
        model = hf.BertForMaskedLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def masking():
    tokenizer = wordpiece()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


def causal_model(tokenizer):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=24)
        model = hf.GPT2LMHeadModel(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


SENTENCES = ["a cat", "river dogsing a cats", "42 dog", "cats a river 42 dog dogsing"]


@pytest.mark.parametrize("within_word", ["one", "following"])
def test_pseudo_log_likelihood_agrees_with_masking_one_token_at_a_time(within_word):
    model, tokenizer = masked_model(), masking()
    found = pseudo_log_likelihood(model, tokenizer, SENTENCES, within_word=within_word, batch_size=3)
    for text, value in zip(SENTENCES, found, strict=True):
        encoded = tokenizer(text, return_tensors="pt")
        ids, words, total = encoded["input_ids"][0], encoded.word_ids(), 0.0
        for place in range(1, len(ids) - 1):  # not [CLS] and [SEP]
            masked = ids.clone()
            masked[place] = tokenizer.mask_token_id
            if within_word == "following":
                for later in range(place + 1, len(ids) - 1):
                    if words[later] == words[place]:
                        masked[later] = tokenizer.mask_token_id
            total += float(model(masked[None]).logits[0, place].log_softmax(-1)[ids[place]])
        assert value == pytest.approx(total)
    assert (found < 0).all()
    assert found.dtype == torch.float64


def test_the_last_layer_of_the_head_reads_one_token_of_each_masked_copy():
    model, read = masked_model(), []
    with _restore.hooked([model.get_output_embeddings()], after=lambda *call: read.append(call[-1].shape)):
        pseudo_log_likelihood(model, masking(), ["a cat", "42 dog"])
    sees_both_sides, whole, alone, scored = read  # the first three are checks
    assert [each[:2] for each in (sees_both_sides, whole, alone)] == [(2, 4), (1, 4), (1, 1)]
    assert scored[:2] == (4, 1)
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits - logits.mean(1, keepdim=True),
        lambda logits: logits.roll(1, 1),
        lambda logits: logits.reshape(-1, 2, 2, 15).flip(2).flatten(1, 2),  # an error for the logits of one token
    ],
    ids=["mean", "neighbour", "shape"],
)
def test_logits_that_a_hook_mixes_between_tokens_are_those_of_whole_texts(change):
    model, tokenizer = masked_model(), masking()
    with _restore.hooked([model.cls], after=lambda *call: change(call[-1])):
        found = pseudo_log_likelihood(model, tokenizer, ["a cat"])
        ids = tokenizer("a cat", return_tensors="pt")["input_ids"]
        expected = 0.0
        for place in (1, 2):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            expected += float(model(masked).logits[0, place].log_softmax(-1)[ids[0, place]])
    assert found.item() == pytest.approx(expected)


def test_a_head_that_is_no_layer_computes_the_logits_of_every_token():
    config = hf.MobileBertConfig(vocab_size=15, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=16, embedding_size=8, intra_bottleneck_size=8)  # fmt: skip
    model = SequenceModel(hf.MobileBertForMaskedLM(config).eval())
    ids, places = [[2, 5, 6, 3], [2, 6, 5, 3]], [1, 2]
    whole = likelihood.logits_of(model, None, ids)
    torch.testing.assert_close(likelihood.logits_of(model, None, ids, places)[:, 0], whole[range(2), places])


def test_the_batch_size_does_not_matter_where_padding_is_not_inert():
    config = hf.ConvBertConfig(vocab_size=15, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                               intermediate_size=16, max_position_embeddings=24, initializer_range=0.5)  # fmt: skip
    torch.manual_seed(0)
    model = hf.ConvBertForMaskedLM(config).eval()
    one, several = (pseudo_log_likelihood(model, masking(), SENTENCES, batch_size=size) for size in (1, 64))
    torch.testing.assert_close(several, one, rtol=1e-4, atol=0)
    assert len({len(masking()(text)["input_ids"]) for text in SENTENCES}) > 1


def test_a_float64_window_scores_short_texts_beside_long_ones():
    config = hf.MistralConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                              num_key_value_heads=1, intermediate_size=16, sliding_window=2)  # fmt: skip
    model = hf.MistralForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    assert not log_likelihood(model, wordpiece(), SENTENCES, beginning=False).isnan().any()


def test_within_word_masking_matters_only_for_words_of_several_tokens():
    model, tokenizer = masked_model(), masking()
    one, following = (pseudo_log_likelihood(model, tokenizer, SENTENCES, within_word=w) for w in ("one", "following"))
    several = [len(tokenizer.tokenize(text)) > len(text.split()) for text in SENTENCES]
    assert ((one - following).abs() > 1e-9).tolist() == several
    mean = pseudo_log_likelihood(model, tokenizer, SENTENCES, reduction="mean")
    lengths = torch.tensor([len(tokenizer.tokenize(text)) for text in SENTENCES])
    assert torch.allclose(mean * lengths, one)


def test_log_likelihood_agrees_with_the_models_own_loss():
    tokenizer = byte_level()
    tokenizer.bos_token = "<|end|>"
    model = causal_model(tokenizer)
    found = log_likelihood(model, tokenizer, ["a cat sat", "the dogs ran"], batch_size=2)
    bare = log_likelihood(model, tokenizer, ["a cat sat", "the dogs ran"], beginning=False, batch_size=1)
    for text, with_first, without in zip(["a cat sat", "the dogs ran"], found, bare, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        first = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1)
        assert with_first == pytest.approx(-float(model(first, labels=first).loss) * ids.shape[1])
        assert without == pytest.approx(-float(model(ids, labels=ids).loss) * (ids.shape[1] - 1))


def test_a_text_with_nothing_to_score_is_nan_and_does_not_disturb_the_others():
    tokenizer = byte_level()
    tokenizer.bos_token = "<|end|>"
    model = causal_model(tokenizer)
    [empty, score] = log_likelihood(model, tokenizer, ["", "a cat sat"], reduction="mean")
    assert empty.isnan()
    assert score == pytest.approx(float(log_likelihood(model, tokenizer, ["a cat sat"], reduction="mean")[0]))
    assert log_likelihood(model, tokenizer, ["a", "a cat"], beginning=False, reduction="mean")[0].isnan()


def test_the_beginning_token_is_added_once_also_where_the_tokenizer_adds_it():
    tokenizer = wordpiece()
    tokenizer.bos_token = "[CLS]"  # the tokenizer adds it first, and [SEP] last
    model = causal_model(tokenizer)
    [found] = log_likelihood(model, tokenizer, ["a cat dog"])
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(["[CLS]", "a", "cat", "dog"])])
    assert found == pytest.approx(-3 * float(model(ids, labels=ids).loss))


def test_a_text_that_begins_with_the_beginning_token_has_it_once():
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    model, texts = causal_model(tokenizer), ["[CLS] a cat", "[CLS]", "[CLS] [CLS] a"]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(["[CLS]", "[CLS]", "a"])])
    found = log_likelihood(model, tokenizer, texts)
    assert found[0] == pytest.approx(float(log_likelihood(model, tokenizer, ["a cat"])))
    assert found[1].isnan()
    assert found[2] == pytest.approx(-2 * float(model(ids, labels=ids).loss))
    texts = ["a cat", "[CLS] a cat [SEP]", "[CLS]a cat", "a cat [SEP]"]
    assert len(set(pseudo_log_likelihood(masked_model(), tokenizer, texts).tolist())) == 1


def test_a_model_without_positions_gives_every_order_the_same_score():
    model, tokenizer = masked_model(), masking()
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.zero_()
    probe = random_shuffling(read_pairs(rows(9)))
    found = evaluate_minimal_pairs(model, tokenizer, minimal_pairs(probe))
    assert found.examples["difference"].abs().max() < 1e-9
    with_positions = evaluate_minimal_pairs(masked_model(), tokenizer, minimal_pairs(probe))
    assert with_positions.examples["difference"].abs().min() > 1e-6


def pairs_of(good, bad, **columns):
    return datasets.Dataset.from_dict({"sentence_good": good, "sentence_bad": bad, **columns})


def test_only_a_strictly_larger_score_is_correct_and_ties_are_counted():
    pairs = pairs_of(["aaa", "a", "aa", "a"], ["a", "aaa", "aa", ""], size=[3, 3, 4, 4])
    found = evaluate_minimal_pairs(lambda texts: [len(text) for text in texts], None, pairs)
    assert found.examples["correct"].tolist() == [True, False, False, True]
    assert found.accuracy.value == 0.5
    assert found.ties == 1
    assert found.by("size")[["size", "n", "accuracy", "difference"]].to_numpy().tolist() == [
        [3, 2, 0.5, 0],
        [4, 2, 0.5, 0.5],
    ]
    assert "accuracy 0.500 [0.082, 0.918] on 4 pairs in 3 groups, 1 ties" in repr(found)
    row = found.to_frame().iloc[0]
    assert (row["score"], row["n"], row["difference"]) == (found.score, 4, 0.25)
    assert (row["accuracy"], row["low"], row["high"]) == dataclasses.astuple(found.accuracy)
    for read in (found.to_frame, functools.partial(found.by, "size")):
        narrow, wide = read(confidence=0.5), read(confidence=0.99)
        assert (wide["low"] < narrow["low"]).all()
        assert (wide["high"] > narrow["high"]).all()
        with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
            read(confidence=95)
    assert "1 ties" in found._repr_html_()


def test_the_score_is_determined_by_the_head_or_given():
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    pairs = pairs_of(["a cat", "a dog"], ["cat a", "dog a"])
    assert evaluate_minimal_pairs(masked_model(), tokenizer, pairs).score == "pseudo_log_likelihood"
    assert evaluate_minimal_pairs(causal_model(tokenizer), tokenizer, pairs).score == "log_likelihood"
    both_ways = hf.BertLMHeadModel(masked_model().config).double()
    chosen = evaluate_minimal_pairs(both_ways, tokenizer, pairs, score=pseudo_log_likelihood)
    assert chosen.score == "pseudo_log_likelihood"
    with pytest.raises(ValueError, match="that fits one score; load it with AutoModelForMaskedLM or AutoModelForC"):
        evaluate_minimal_pairs(classifier(), tokenizer, pairs)


def test_the_batch_size_of_minimal_pairs_is_that_of_the_score_unless_a_partial_sets_its_own(monkeypatch):
    sizes, passes = set(), likelihood.logits_of
    monkeypatch.setattr(likelihood, "logits_of", lambda *args: sizes.add(len(args[2])) or passes(*args))
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    model, pairs = causal_model(tokenizer), pairs_of(["a cat", "a dog"], ["cat a", "dog a"])
    whole = evaluate_minimal_pairs(model, tokenizer, pairs, batch_size=4, progress=False)
    assert sizes == {2, 4}  # 2 that show whether the model sees later tokens
    sizes.clear()
    single = evaluate_minimal_pairs(
        model, tokenizer, pairs, batch_size=4, score=functools.partial(log_likelihood, batch_size=1)
    )
    assert sizes == {1, 2}
    assert whole.examples["good"].tolist() == pytest.approx(single.examples["good"].tolist())
    own = evaluate_minimal_pairs(model, tokenizer, pairs, score=lambda model, tokenizer, texts: [1.0] * len(texts))
    assert own.ties == 2


def test_scores_refuse_models_that_see_too_much_or_too_little():
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    pairs, texts = pairs_of(["a cat"], ["cat a"]), ["a", "a cat"]
    config = masked_model().config
    xlnet = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=15, d_model=16, n_layer=1, n_head=2, d_inner=16))
    for parameter in xlnet.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(0))
    for model in (hf.BertLMHeadModel(config), xlnet, hf.BertForMaskedLM(config), copy.deepcopy(xlnet).bfloat16()):
        with pytest.raises(ValueError, match=r"attend to the left only, .*; use pseudo_log_likelihood, or set"):
            log_likelihood(model, tokenizer, texts)
        for equal in ("a a a", "[PAD] [PAD]"):
            with pytest.raises(ValueError, match="attend to the left only"):
                log_likelihood(model, tokenizer, ["a", equal], beginning=False)
    for model in (hf.BertLMHeadModel(config), xlnet):
        with pytest.raises(ValueError, match="attend to the left only"):
            evaluate_minimal_pairs(model, tokenizer, pairs)
    decoder = hf.BertLMHeadModel(hf.BertConfig(**{**config.to_dict(), "is_decoder": True}))
    for model in (causal_model(tokenizer), decoder):
        with pytest.raises(ValueError, match=r"see both sides of a token, but .* is causal; use log_likelihood"):
            pseudo_log_likelihood(model, tokenizer, texts)
        for dtype in (torch.float32, torch.bfloat16):
            assert (log_likelihood(model.to(dtype), tokenizer, texts) < 0).all()
    masked = masked_model()
    with attach(masked, ALiBi(heads=2, causal=True)):  # predicts the masked token, not the next one
        assert (pseudo_log_likelihood(masked, tokenizer, texts) < 0).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"sentences": "a cat"}, TypeError, "in a list"),
        ({"sentences": ["a", "cats " * 30]}, ValueError, "length=62 is beyond the 24 positions"),
        ({"tokenizer": byte_level()}, ValueError, "no mask token; .*log_likelihood"),
        ({"tokenizer": "bert"}, TypeError, "tokenizer"),
        ({"model": hf.T5ForConditionalGeneration(tiny("t5").config)}, ValueError, "an encoder and a decoder"),
        ({"model": classifier()}, ValueError, "AutoModelForMaskedLM or AutoModelForCausalLM .*BertForSequence"),
        ({"model": masking(), "tokenizer": masked_model()}, TypeError, "model first"),
        ({"within_word": "all"}, ValueError, "within_word"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_invalid_arguments_of_the_scores_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        pseudo_log_likelihood(**({"model": masked_model(), "tokenizer": masking(), "sentences": ["a"]} | change))


def test_a_text_without_tokens_has_no_score():
    assert pseudo_log_likelihood(masked_model(), masking(), ["", "a"]).isnan().tolist() == [True, False]


def test_both_remedies_for_a_tokenizer_without_a_beginning_token_work():
    tokenizer = wordpiece()
    model, pairs = causal_model(tokenizer), pairs_of(["a cat"], ["cat a"])
    with pytest.raises(ValueError, match=r"functools\.partial\(log_likelihood, beginning=False\)") as raised:
        evaluate_minimal_pairs(model, tokenizer, pairs)
    assert "bos_token" in str(raised.value)
    found = evaluate_minimal_pairs(
        model, tokenizer, pairs, score=functools.partial(log_likelihood, beginning=False)
    ).examples
    wanted = log_likelihood(model, tokenizer, ["a cat", "cat a"], beginning=False).tolist()
    assert found[["good", "bad"]].to_numpy().ravel().tolist() == pytest.approx(wanted)
    tokenizer.bos_token = tokenizer.cls_token
    assert evaluate_minimal_pairs(model, tokenizer, pairs).score == "log_likelihood"


def test_two_texts_of_probability_zero_are_a_tie():
    found = evaluate_minimal_pairs(lambda texts: [float("-inf")] * len(texts), None, pairs_of(["a"], ["b"]))
    assert (found.ties, found.accuracy.value, found.examples["difference"].item()) == (1, 0, 0)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda values: torch.tensor(values).bfloat16()])
def test_scores_of_a_callable_may_be_booleans_or_a_tensor_of_any_type(kind):
    pairs = pairs_of(["abc", "a", "abc"], ["a", "abc", "dcb"])
    found = evaluate_minimal_pairs(lambda texts: kind([len(text) > 2 for text in texts]), None, pairs)
    assert found.examples["difference"].tolist() == [1, -1, 0]
    assert found.examples["correct"].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"pairs": datasets.DatasetDict({"test": pairs_of(["a"], ["b"])})}, TypeError, r"pairs\['test'\]"),
        ({"pairs": datasets.Dataset.from_dict({"text": ["a"]})}, ValueError, r"sentence_good .*\['text'\]"),
        ({"pairs": pairs_of(["a"], ["b"]).select([])}, ValueError, "0 rows"),
        ({"pairs": pairs_of(["a"], ["b"], correct=["yes"])}, ValueError, "'correct', a name that the result uses"),
        ({"model": lambda texts: [float("nan")] * 2}, ValueError, "NaN for .'a', 'b'.; remove"),
        ({"model": lambda texts: ["a"] * len(texts)}, TypeError, "scores must be real numbers"),
        ({"score": log_likelihood}, TypeError, "without score="),
        ({"model": masking(), "tokenizer": masked_model()}, TypeError, "model first"),
        ({"model": "bert"}, TypeError, "AutoModelForMaskedLM or AutoModelForCausalLM"),
        ({"model": hf.T5ForConditionalGeneration(tiny("t5").config)}, ValueError, "an encoder and a decoder"),
        ({"model": masked_model(), "pairs": pairs_of(["a", ""], ["cat", "dog"])}, ValueError, "NaN for .''.; remove"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_invalid_arguments_of_minimal_pairs_are_refused(change, error, says):
    arguments = {"model": lambda texts: [1] * len(texts), "tokenizer": masking(), "pairs": pairs_of(["a"], ["b"])}
    with pytest.raises(error, match=says):
        evaluate_minimal_pairs(**(arguments | change))


def test_a_model_whose_positions_are_replaced_scores_texts_of_any_length():
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    for model, score in ((masked_model(), pseudo_log_likelihood), (causal_model(tokenizer), log_likelihood)):
        with pytest.raises(ValueError, match="beyond the 24 positions"):
            score(model, tokenizer, ["a cat " * 20])
        with attach(model, AttenuatedEncoding(heads=2)):
            assert (score(model, tokenizer, ["a cat " * 20]) < 0).all()


def test_offloaded_and_wrapped_models_give_the_same_scores():
    plain = pseudo_log_likelihood(masked_model(), masking(), SENTENCES)
    for model in (offloaded(masked_model()), torch.nn.DataParallel(masked_model())):
        torch.testing.assert_close(pseudo_log_likelihood(model, masking(), SENTENCES), plain)


def test_the_tokenizer_of_another_model_is_refused():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"mask_token": "<mask>", "bos_token": "<bos>"})
    for score in (pseudo_log_likelihood, log_likelihood):
        with pytest.raises(ValueError, match=r"input_ids must be in 0\.\.14, .* is this the model's tokenizer"):
            score(masked_model(), tokenizer, ["a cat and a dog"])


def slow_tokens(model, tokenizer, text, masked):
    """Return the characters of each token and its log-probability, one token after the other."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=masked)
    ids = encoded["input_ids"] if masked else [tokenizer.bos_token_id, *encoded["input_ids"]]
    for place, (start, end) in enumerate(encoded["offset_mapping"]):
        if masked and start == end:
            continue
        seen = [*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]] if masked else ids[: place + 1]
        logits = model(torch.tensor([seen])).logits[0, place]
        yield start, end, float(logits.log_softmax(-1)[ids[place + (not masked)]])


@pytest.mark.parametrize("masked", [False, True])
def test_words_have_the_scores_of_the_tokens_that_begin_in_them(masked):
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    model = masked_model() if masked else causal_model(tokenizer)
    score = pseudo_log_likelihood if masked else log_likelihood
    texts = ["  a cats river\n42 dogsing ", "", "42", " \t"]
    words, tokens, totals = (score(model, tokenizer, texts, by=by, batch_size=2) for by in ("word", "token", "text"))
    assert words["word"].tolist() == ["a", "cats", "river", "42", "dogsing", "", "42", " \t"]
    with torch.no_grad():
        witness = list(slow_tokens(model, tokenizer, texts[0], masked))
    assert tokens.loc[tokens["text"] == 0, ["start", "end"]].to_numpy().tolist() == [[a, b] for a, b, _ in witness]
    for row in words[words["text"] == 0].itertuples():
        own = [value for start, _, value in witness if row.start <= start < row.end]
        assert (row.word, row.tokens) == (texts[0][row.start : row.end], len(own))
        assert row.score == pytest.approx(sum(own))
    for frame in (words, tokens):
        sums = frame.groupby("text")["score"].sum(min_count=1).reindex(range(4))
        np.testing.assert_allclose(sums, totals, rtol=1e-12)
    means = score(model, tokenizer, texts, by="word", reduction="mean")
    np.testing.assert_allclose(means["score"] * means["tokens"], words["score"])


def test_words_keep_their_characters_where_special_tokens_are_written_out_or_the_first_has_no_score():
    tokenizer = masking()
    [before, word, after] = pseudo_log_likelihood(
        masked_model(), tokenizer, ["[CLS] cat [SEP]"], by="word"
    ).itertuples()
    assert (word.word, word.start, word.end, word.tokens, before.tokens, after.tokens) == ("cat", 6, 9, 1, 0, 0)
    bare = log_likelihood(causal_model(tokenizer), tokenizer, ["a cat"], by="word", beginning=False)
    assert bare["score"].isna().tolist() == [True, False]
    spaces = byte_level()
    spaces.bos_token = "<|end|>"
    frame = log_likelihood(causal_model(spaces), spaces, ["é  😀 cat"], by="word")
    assert frame["word"].tolist() == ["é", "😀", "cat"]
    assert frame["tokens"].sum() == len(spaces("é  😀 cat")["input_ids"])
    with pytest.raises(ValueError, match="by"):
        log_likelihood(causal_model(spaces), spaces, ["a"], by="sentence")


TREES = (
    "(S (NP (DT The) (NN cat)) (VP (VBD saw) (NP (PRP him))) (. .))",
    "(S (NP (PRP He)) (VP (VBD was) (VP (VBN seen) (PP (IN by) (NP (DT a) (NN cat))) (NP (NN today)))) (. .))",
)


def test_what_a_swap_costs_is_divided_among_the_regions_of_the_sentence():
    tokenizer = masking()
    tokenizer.bos_token = "[CLS]"
    probe = semantic_role_swap([sentence(tree) for tree in TREES], source="constituents")
    result = evaluate_minimal_pairs(causal_model(tokenizer), tokenizer, minimal_pairs(probe))
    words = result.words
    placed = words.groupby(["pair", "sentence", "region"], observed=True)["word"].agg(" ".join).unstack(fill_value="")
    assert placed.to_numpy().tolist() == [
        ["He", "saw", "the cat", "."], ["The cat", "saw", "him", "."],
        ["A cat", "was seen by", "him", "today."], ["He", "was seen by", "a cat", "today."],
    ]  # fmt: skip
    sums = words.groupby(["pair", "sentence"])["score"].sum().unstack()
    np.testing.assert_allclose(sums[["good", "bad"]], result.examples[["good", "bad"]])
    table = result.by_region("mood")
    assert table["region"].tolist() == ["phrase 1", "between", "phrase 2", "behind"]
    assert table["difference"].sum() == pytest.approx(result.examples["difference"].mean())
    assert table["n"].tolist() == [2] * 4
    for confidence, read in ((0.5, operator.gt), (0.99, operator.lt)):
        assert read(result.by_region(confidence=confidence)["low"], table["low"]).all()


def test_regions_are_those_of_the_spans_even_where_a_word_stands_twice():
    span = {"start": 5, "category": "NP", "original": "a b", "perturbed": "b a"}
    assert ["".join(side) for side in regions_of("x1 a b a b, a", "x1 a b b a, a", [span | {"start": 3}])] == [
        *["before" * 7 + "phrase 1" * 3 + "behind" * 3] * 2
    ]
    assert regions_of("a b c a b", "b a c b a", [span, span | {"start": 0}])[0][3:6] == ["between"] * 3
    verb = span | {"start": 7, "category": "agreement", "original": "sees", "perturbed": "see"}
    again = span | {"start": 9, "original": "b a", "perturbed": "a b"}
    _, bad = regions_of("a b sees b a", "b a see a b", [span, verb, again])
    assert bad == ["phrase 1"] * 3 + ["between"] * 5 + ["phrase 2"] * 3
    with pytest.raises(ValueError, match="spans"):
        regions_of("a b", "a b", [span])


def test_pairs_without_spans_have_words_and_callables_have_none():
    tokenizer = masking()
    pairs = pairs_of(["a cat", "a dog"], ["cat a", "dog a"])
    result = evaluate_minimal_pairs(masked_model(), tokenizer, pairs)
    assert result.words["word"].tolist() == ["a", "cat", "cat", "a", "a", "dog", "dog", "a"]
    with pytest.raises(KeyError, match="region"):
        result.by_region()
    with pytest.raises(ValueError, match="words"):
        evaluate_minimal_pairs(lambda texts: [1.0] * len(texts), None, pairs).words  # noqa: B018
