"""Role swaps: correct text where they are made, and a reason where they are not."""

import inspect
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from pelocality.corpora import (
    Argument,
    Constituents,
    Dependencies,
    Frame,
    Pair,
    Sentence,
    parse_bracketed,
    read_conllu,
    read_frames,
    read_snli,
)
from pelocality.probes import probe_info, semantic_role_swap
from pelocality.probes.role_swap.clauses import Candidate
from pelocality.probes.role_swap.exchange import agrees, inflect, number_of
from pelocality.probes.role_swap.persons import reversible
from tests.data import corpora
from tests.test_probes import sentence


def swapped(bracketed, **settings):
    probe = semantic_role_swap([sentence(bracketed)], source="constituents", **settings)
    return [row["hypothesis"] for row in probe]


def reasons(bracketed, **settings):
    return set(probe_info(semantic_role_swap([sentence(bracketed)], source="constituents", **settings)).skipped)


# noun phrases: bracketed as subject, as object, and whether they take a plural verb
NOUN_PHRASES = [
    ("(NP (DT a) (NN fox))", "(NP (DT a) (NN fox))", False),
    ("(NP (DT the) (JJ old) (NNS owls))", "(NP (DT the) (JJ old) (NNS owls))", True),
    ("(NP (NNP Ada))", "(NP (NNP Ada))", False),
    ("(NP (PRP he))", "(NP (PRP him))", False),
    ("(NP (PRP they))", "(NP (PRP them))", True),
    ("(NP (PRP we))", "(NP (PRP us))", True),
    ("(NP (NP (DT the) (NN judge)) (PP (IN of) (NP (NN town))))",) * 2 + (False,),
    ("(NP (NP (DT a) (NN cook)) (CC and) (NP (DT a) (NN maid)))",) * 2 + (True,),
]
# verb groups for a singular and a plural subject
VERBS = [
    ("(VP (VBD chased) {})", "(VP (VBD chased) {})"),
    ("(VP (VBZ watches) {})", "(VP (VBP watch) {})"),
    ("(VP (VBZ is) (VP (VBG hiding) {}))", "(VP (VBP are) (VP (VBG hiding) {}))"),
    ("(VP (VBD was) (VP (VBG carrying) {}))", "(VP (VBD were) (VP (VBG carrying) {}))"),
    ("(VP (VBZ does) (RB n't) (VP (VB trust) {}))", "(VP (VBP do) (RB n't) (VP (VB trust) {}))"),
    ("(VP (MD might) (VP (VB blame) {}))", "(VP (MD might) (VP (VB blame) {}))"),
    ("(VP (VBZ has) (VP (VBN seen) {}))", "(VP (VBP have) (VP (VBN seen) {}))"),
    ("(VP (VBD was) (VP (VBN seen) (PP (IN by) {})))", "(VP (VBD were) (VP (VBN seen) (PP (IN by) {})))"),
    ("(VP (VBZ is) (VP (VBG being) (VP (VBN advised) (PP (IN by) {}))))",
     "(VP (VBP are) (VP (VBG being) (VP (VBN advised) (PP (IN by) {}))))"),
    ("(VP (VBD had) (VP (VBN been) (VP (VBN paid) (PP (IN by) {}))))",) * 2,
    ("(VP (MD will) (VP (VB be) (VP (VBN stopped) (PP (IN by) {} (NP (NN yesterday))))))",) * 2,
]  # fmt: skip


def clause(subject, verb, patient):
    """Build the tree of a clause from scratch: the expected result of a swap."""
    verb_phrase = VERBS[verb][NOUN_PHRASES[subject][2]].format(NOUN_PHRASES[patient][1])
    words, constituents = parse_bracketed(f"(S {NOUN_PHRASES[subject][0]} {verb_phrase} (. .))", "made up")
    words = (words[0][0].upper() + words[0][1:], *words[1:])
    return Sentence(words, uid="s", language="en", constituents=constituents)


CLAUSES = st.tuples(
    st.integers(0, len(NOUN_PHRASES) - 1), st.integers(0, len(VERBS) - 1), st.integers(0, len(NOUN_PHRASES) - 1)
).filter(lambda c: c[0] != c[2])


@given(CLAUSES)
@settings(max_examples=25, deadline=None)
def test_a_swap_is_the_clause_built_the_other_way_round_and_twice_the_original(parts):
    subject, verb, patient = parts
    there, back = clause(subject, verb, patient), clause(patient, verb, subject)
    [row] = semantic_role_swap([there], source="constituents", agreement="reinflect")
    assert row["hypothesis"] == back.text
    [again] = semantic_role_swap([back], source="constituents", agreement="reinflect")
    assert again["hypothesis"] == there.text == row["original_hypothesis"]


@given(CLAUSES)
@settings(max_examples=20, deadline=None)
def test_skipping_leaves_out_exactly_the_swaps_that_need_reinflection(parts):
    probe = semantic_role_swap([clause(*parts)], source="constituents", agreement="reinflect")
    changes = any(span["category"] == "agreement" for span in probe[0]["spans"])
    skipping = semantic_role_swap([clause(*parts)], source="constituents", agreement="skip")
    assert len(skipping) == (not changes)
    assert bool(probe_info(skipping).skipped) == changes


def test_the_two_objects_of_a_passive_are_not_exchanged():
    tree = "(S (NP (DT The) (NNS winners)) (VP (VBD were) (VP (VBN awarded) (NP (NNS prizes)))) (. .))"
    frame = Frame("award.01", (3, 4), (Argument("ARG2", 0, 2), Argument("ARG1", 4, 5)), "made up")
    item = sentence(tree, frames=(frame,))
    probe = semantic_role_swap([item], ("ARG1", "ARG2"), label_policy="contradiction")
    assert len(probe) == 0
    assert probe_info(probe).skipped == {"the arguments do not stand beside one finite verb": 1}


def test_a_passive_keeps_its_by():
    passive = "(S (NP (DT The) (NN thief)) (VP (VBD was) (VP (VBN seen) (PP (IN by) (NP (DT a) (NN nun))))) (. .))"
    assert swapped(passive) == ["A nun was seen by the thief."]
    [row] = semantic_role_swap([sentence(passive)], source="constituents")
    assert row["category"] == "passive"
    assert [(s["category"], s["original"]) for s in row["spans"]] == [("ARG1", "The thief"), ("ARG0", "a nun")]


def test_a_question_is_swapped_around_its_auxiliary():
    assert swapped("(SQ (VBD Did) (NP (DT the) (NN nun)) (VP (VB see) (NP (PRP me))) (. ?))") == ["Did I see the nun?"]


def test_proper_names_keep_their_capital_and_others_do_not():
    assert swapped("(S (NP (NNP Ada)) (VP (VBD saw) (NP (DT the) (NN nun))))") == ["The nun saw Ada"]
    assert swapped("(S (NP (DT The) (NN nun)) (VP (VBD saw) (NP (NNP Ada))))") == ["Ada saw the nun"]
    assert reasons("(S (NP (JJ Roman) (NNS nuns)) (VP (VBD saw) (NP (NNP Ada))))") == {
        "whether a word keeps its capital is unknown"
    }


def test_a_sentence_without_capital_gets_none():
    assert swapped("(S (NP (PRP he)) (VP (VBD saw) (NP (DT the) (NN nun))))") == ["the nun saw him"]


S = "(S (NP {}) (VP (VBD {}) (NP {})) (. .))"


def test_the_caller_can_choose_the_symmetric_verbs():
    tree = S.format("(DT The) (NN nun)", "met", "(DT a) (NN judge)")
    assert swapped(tree, symmetric_verbs=()) == ["A judge met the nun."]
    assert swapped(tree, symmetric_verbs=None) == []
    assert swapped(S.format("(PRP He)", "saw", "(PRP me)"), symmetric_verbs=("see",)) == []
    assert "frozenset" not in str(inspect.signature(semantic_role_swap))  # which help() would print in hash order


def test_overlapping_arguments_are_skipped():
    item = sentence(S.format("(DT The) (NN nun)", "saw", "(DT a) (NN hat)"))
    probe = semantic_role_swap([item], source=lambda s: [{"ARG0": (0, 2), "ARG1": (1, 3)}], agreement="ignore")
    assert probe_info(probe).skipped == {"the arguments overlap": 1}


def framed(words, deprel, heads, arguments, verb, **layers):
    n = len(words)
    frame = Frame("see.01", (verb, verb + 1), tuple(Argument(*a) for a in arguments), "gold")
    upos = layers.pop("upos", ("NOUN",) * n)
    dependencies = Dependencies(tuple(heads), tuple(deprel), "gold", upos, layers.pop("features", None))
    return Sentence(words, uid="f", frames=(frame,), dependencies=dependencies, **layers)


def test_gold_frames_are_kept_only_where_the_tree_agrees():
    words = ("the", "hat", "we", "saw")
    relative = framed(words, ("det", "root", "nsubj", "acl:relcl"), (2, 0, 4, 2), (("ARG0", 2, 3), ("ARG1", 0, 2)), 3,
                      upos=("DET", "NOUN", "PRON", "VERB"), language="en")  # fmt: skip
    assert probe_info(semantic_role_swap([relative])).skipped == {
        "the arguments are not subject and object, or subject and agent, of one clause": 1
    }


VERB_LAST = {"deprel": ("nsubj", "case", "obj", "case", "root"), "heads": (5, 1, 5, 3, 0)}


def test_order_is_not_assumed_and_particles_keep_their_place():
    # a verb-final language with case particles: exchanging nouns with their particles would change nothing
    item = framed(("inu", "ga", "neko", "o", "miru"), arguments=(("ARG0", 0, 2), ("ARG1", 2, 4)), verb=4,
                  upos=("NOUN", "ADP", "NOUN", "ADP", "VERB"), language="ja", **VERB_LAST)  # fmt: skip
    for source in ("frames", "dependencies"):
        assert [row["hypothesis"] for row in semantic_role_swap([item], source=source, languages=("ja",))] == [
            "neko ga inu o miru"
        ]


@pytest.mark.parametrize(("patient_case", "rows"), [("Acc", 0), ("Nom", 1)])
def test_arguments_of_different_case_are_skipped(patient_case, rows):
    features = ({"Case": "Nom"}, {}, {"Case": patient_case})
    item = framed(("kedi", "gordu", "kopek"), ("nsubj", "root", "obj"), (2, 0, 2), (("ARG0", 0, 1), ("ARG1", 2, 3)), 1,
                  upos=("NOUN", "VERB", "NOUN"), features=features, language="tr")  # fmt: skip
    probe = semantic_role_swap([item], languages=("tr",))
    assert len(probe) == rows
    assert probe_info(probe).skipped == ({} if rows else {"the arguments have different cases": 1})


def test_the_case_of_an_article_counts_for_its_noun():
    features = ({"Case": "Nom"}, {}, {}, {"Case": "Acc"}, {})
    item = framed(("der", "Hund", "sieht", "den", "Mann"), ("det", "nsubj", "root", "det", "obj"), (2, 3, 0, 5, 3),
                  (("ARG0", 0, 2), ("ARG1", 3, 5)), 2, upos=("DET", "NOUN", "VERB", "DET", "NOUN"),
                  features=features, language="de")  # fmt: skip
    assert probe_info(semantic_role_swap([item], languages=("de",))).skipped == {
        "the arguments have different cases": 1
    }


def test_agreement_is_read_off_features_in_other_languages():
    features = ({"Number": "Sing"}, {"Number": "Sing", "VerbForm": "Fin"}, {"Number": "Plur"})
    item = framed(("gato", "ve", "perros"), ("nsubj", "root", "obj"), (2, 0, 2), (("ARG0", 0, 1), ("ARG1", 2, 3)), 1,
                  upos=("NOUN", "VERB", "NOUN"), features=features, language="es")  # fmt: skip
    assert probe_info(semantic_role_swap([item], agreement="reinflect", languages=("es",))).skipped == {
        "the verb would not agree with its new subject": 1
    }


@pytest.mark.parametrize(("agent_gender", "rows"), [("Masc", 0), ("Fem", 1)])
def test_a_participle_of_a_passive_agrees_in_gender_in_other_languages(agent_gender, rows):
    singular = {"Number": "Sing"}
    features = (
        {"Gender": "Fem", **singular},
        {"VerbForm": "Fin", **singular},
        {"VerbForm": "Part", "Gender": "Fem", **singular},
        {},
        {"Gender": agent_gender, **singular},
    )
    item = framed(("Eva", "est", "vue", "par", "Luc"), ("nsubj:pass", "aux:pass", "root", "case", "obl:agent"),
                  (3, 3, 0, 5, 3), (("ARG1", 0, 1), ("ARG0", 4, 5)), 2, upos=("PROPN", "AUX", "VERB", "ADP", "PROPN"),
                  features=features, language="fr")  # fmt: skip
    assert len(semantic_role_swap([item], languages=("fr",))) == rows


@pytest.mark.parametrize(("number", "rows"), [("Sing", 0), ("Plur", 1)])
def test_joined_arguments_are_plural_in_other_languages(number, rows):
    singular = {"Number": "Sing"}
    features = ({"Number": number}, {"VerbForm": "Fin", "Number": number}, singular, {}, singular)
    item = framed(("gato", "ve", "Ana", "y", "Luis"), ("nsubj", "root", "obj", "cc", "conj"), (2, 0, 2, 5, 3),
                  (("ARG0", 0, 1), ("ARG1", 2, 5)), 1, upos=("NOUN", "VERB", "PROPN", "CCONJ", "PROPN"),
                  features=features, language="es")  # fmt: skip
    assert len(semantic_role_swap([item], languages=("es",))) == rows


@pytest.mark.parametrize("first", ["dogs", "dog"])
def test_a_second_verb_must_not_share_the_subject(first):
    plural = {"Number": "Plur"} if first == "dogs" else {"Number": "Sing"}
    past = {"VerbForm": "Fin", "Tense": "Past"}
    item = Sentence(
        ("The", first, "bit", "a", "man", "and", "were" if first == "dogs" else "was", "gone"),
        uid="c", language="en",
        dependencies=Dependencies((2, 3, 0, 5, 3, 8, 8, 3),
                                  ("det", "nsubj", "root", "det", "obj", "cc", "cop", "conj"), "gold",
                                  ("DET", "NOUN", "VERB", "DET", "NOUN", "CCONJ", "AUX", "ADJ"),
                                  ({}, plural, past, {}, {"Number": "Sing"}, {}, past, {})),
    )  # fmt: skip
    probe = semantic_role_swap([item], source="dependencies", agreement="ignore")
    assert probe_info(probe).skipped == {"another verb has the same subject": 1}


@pytest.mark.parametrize(("number", "rows"), [("Plur", 0), ("Sing", 1)])
def test_verbs_that_share_a_subject_are_read_together_in_other_languages(number, rows):
    features = ({"Number": "Sing"}, {"VerbForm": "Fin"}, {"Number": number}, {}, {"Number": "Sing", "VerbForm": "Fin"})
    item = framed(("rex", "vidit", "canes", "et", "fugit"), ("nsubj", "root", "obj", "cc", "conj"), (2, 0, 2, 5, 2),
                  (("ARG0", 0, 1), ("ARG1", 2, 3)), 1, upos=("NOUN", "VERB", "NOUN", "CCONJ", "VERB"),
                  features=features, language="la")  # fmt: skip
    assert len(semantic_role_swap([item], languages=("la",))) == rows


def nli(label="entailment"):
    item = sentence("(S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (DT the) (NN hat))))")
    return Pair(item, item, label, "p")


def test_labels_follow_the_policy_and_the_old_one_is_kept():
    for policy in ("contradiction", "neutral", "not entailment"):
        [row] = semantic_role_swap([nli()], source="constituents", label_policy=policy)
        assert (row["label"], row["original_label"], row["side"]) == (policy, "entailment", "hypothesis")
        assert (row["premise"], row["hypothesis"]) == ("A nun saw the hat", "The hat saw a nun")


def to_contradiction(label):
    return "contradiction" if label == "entailment" else None


def test_a_policy_may_be_a_function_and_leave_pairs_out():
    items = [nli(), nli("neutral")]
    probe = semantic_role_swap(items, source="constituents", label_policy=to_contradiction, num_proc=2)
    assert probe["label"] == ["contradiction"]
    assert probe_info(probe).dropped == {"label_policy returned None": 1}
    assert probe_info(probe).settings["label_policy"] == "to_contradiction"


def test_a_swap_that_would_leave_the_text_is_skipped():
    item = Sentence(("人", "咬", "人", "人"), ("", "", "", ""), uid="1", language="zh")

    def spans(_):
        return [{"ARG0": (0, 1), "ARG1": (2, 4)}]

    assert semantic_role_swap([item], source=spans, agreement="ignore")["hypothesis"] == ["人人咬人"]
    like = Sentence(("人", "人", "人"), ("", "", ""), uid="2", language="zh")
    probe = semantic_role_swap([like], source=lambda _: [{"ARG0": (0, 1), "ARG1": (1, 3)}], agreement="ignore")
    assert probe_info(probe).skipped == {"the text would not change": 1}


def test_a_sentence_becomes_a_pair_with_its_swap():
    [row] = semantic_role_swap([nli().premise], source="constituents", label_policy="contradiction")
    assert (row["premise"], row["hypothesis"], row["label"]) == (
        "A nun saw the hat",
        "The hat saw a nun",
        "contradiction",
    )
    assert (row["original_hypothesis"], row["original_label"]) == ("A nun saw the hat", "entailment")
    assert semantic_role_swap([nli().premise], source="constituents")[0]["label"] is None


def test_the_callers_spans_are_used_and_checked():
    item = Sentence(("A", "nun", "saw", "an", "owl"), uid="c", language="en")

    def spans(_):
        return [{"agent": (0, 2), "patient": (3, 5), "V": (2, 3)}]

    [row] = semantic_role_swap([item], roles=("agent", "patient"), source=spans, agreement="ignore")
    assert row["hypothesis"] == "An owl saw a nun"
    assert row["provenance"].endswith("roles: spans")
    with pytest.raises(ValueError, match=r"within the 5 words, .* patient = \[3, 9\)"):
        semantic_role_swap([item], ("agent", "patient"), lambda _: [{"agent": (0, 2), "patient": (3, 9)}])
    both = {"agent": (0, 2), "patient": (3, 5)}
    with pytest.raises(ValueError, match=r"within the 5 words, .* V = \[9, 10\)"):
        semantic_role_swap([item], ("agent", "patient"), lambda _: [both | {"V": (9, 10)}])
    with pytest.raises(TypeError, match=r"list of \{role: \(start, end\)\} mappings"):
        semantic_role_swap([item], ("agent", "patient"), lambda _: both)


def test_every_predicate_may_have_its_row():
    tree = (
        "(S (S (NP (DT A) (NN nun)) (VP (VBD saw) (NP (NNP Ada)))) (CC and)"
        " (S (NP (DT a) (NN judge)) (VP (VBD heard) (NP (DT the) (NN owl)))))"
    )
    assert swapped(tree, spans="all") == [
        "Ada saw a nun and a judge heard the owl",
        "A nun saw Ada and the owl heard a judge",
    ]
    assert {swapped(tree, seed=k)[0] for k in range(9)} == set(swapped(tree, spans="all"))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"roles": ("ARG0", "ARG0")}, ValueError, "two different roles"),
        ({"roles": ("ARG0", "ARG2"), "source": "dependencies"}, ValueError, "ARG0 and ARG1 unless"),
        ({"source": "magic"}, ValueError, "source"),
        ({"label_policy": "opposite"}, ValueError, "a function from the old label to the new, got 'opposite'"),
        ({"label_policy": None, "source": "constituents"}, ValueError, "label_policy must give"),
        ({"side": "both"}, ValueError, "side"),
        ({"seed": 2**63}, ValueError, "seed"),
        ({"parser": "nltk"}, ValueError, "parser must be 'spacy' or 'stanza'"),
        ({"languages": ("English",)}, ValueError, "ISO code"),
        ({"languages": "en"}, TypeError, "languages"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        semantic_role_swap([nli()], **{"label_policy": "neutral", **arguments})


def test_missing_layers_are_counted():
    bare = Sentence(("A", "nun"), uid="b", language="en")
    for source, reason in (("frames", "no frames"), ("dependencies", "no dependencies")):
        assert probe_info(semantic_role_swap([bare], source=source)).dropped == {reason: 1}


def test_the_reason_of_a_missing_layer_names_the_source_that_the_items_have():
    upos, noun = ("DET", "NOUN", "VERB", "DET", "NOUN"), {"Number": "Sing"}
    features = ({}, noun, {"VerbForm": "Fin", "Tense": "Past"}, {}, noun)
    tree = Dependencies((2, 3, 0, 5, 3), ("det", "nsubj", "root", "det", "obj"), "made up", upos, features)
    with_dependencies = Sentence(("A", "dog", "bit", "a", "nun"), uid="d", language="en", dependencies=tree)
    with_phrases = sentence("(S (NP (DT A) (NN dog)) (VP (VBD bit) (NP (DT a) (NN nun))))")
    for item, layer in ((with_dependencies, "dependencies"), (with_phrases, "constituents")):
        reason = f"no frames, but {layer}; pass source='{layer}'"
        assert probe_info(semantic_role_swap([item])).dropped == {reason: 1}
        assert len(semantic_role_swap([item], source=layer)) == 1


NUMBERS = [
    ("the dogs", "DT NNS", "plural"), ("a group of dogs", "DT NN IN NNS", None),
    ("a couple of dogs", "DT NN IN NNS", None),
    ("our teeth", "PRP$ NN", "plural"), ("physics", "NNS", None), ("4 Golden Carp", "CD NNP NNP", None),
    ("a man or a dog", "DT NN CC DT NN", None),
    ("everything they say", "NN PRP VBP", "3sg"), ("the man with a cat and a dog", "DT NN IN DT NN CC DT NN", "3sg"),
    ("black and white dogs", "JJ CC JJ NNS", "plural"), ("me", "PRP", "1sg"),
    ("a man and a dog", "DT NN CC DT NN", "plural"), ("my friend and guide", "PRP$ NN CC NN", None),
    ("thousands of dogs", "NNS IN NNS", "plural"), ("you", "PRP", "plural"),
    ("union leftist militants", "NN JJ NNS", "plural"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "tags", "number"), NUMBERS)
def test_number_of_noun_phrases(words, tags, number):
    assert number_of(words.split(), tags.split()) == number


def test_agrees_and_inflect_are_consistent():
    forms = [("is", "VBZ", "3sg"), ("are", "VBP", "plural"), ("am", "VBP", "1sg"), ("was", "VBD", "3sg"),
             ("goes", "VBZ", "3sg"), ("carry", "VBP", "plural"), ("has", "VBZ", "3sg")]  # fmt: skip
    for (word, tag, old), new in itertools.product(forms, ("1sg", "3sg", "plural")):
        made = inflect(word, tag, new)
        tag_made = "VBD" if tag == "VBD" else "VBZ" if new == "3sg" else "VBP"
        assert agrees(made, tag_made, new, new)
        assert (made == word) == agrees(word, tag, old, new)
    assert inflect("walked", "VBD", "plural") is None


SOURCES = [
    ("frames.jsonl", read_frames, {"spans": "all"}),
    ("nli_pairs.jsonl", read_snli, {"source": "constituents", "label_policy": "contradiction"}),
    (
        ".conllu",
        lambda path: read_conllu(path, path.name[:2]),
        {"source": "dependencies", "languages": ("de", "en", "fi", "fr", "tr", "zh")},
    ),
]


@pytest.mark.parametrize(
    ("path", "read", "arguments"),
    [pytest.param(*path.values, *rest, id=path.id) for kind, *rest in SOURCES for path in corpora(kind)],
)
def test_swaps_of_corpora_account_for_every_sentence_and_always_change_the_text(path, read, arguments):
    probe = semantic_role_swap(read(path), agreement="reinflect", **arguments).select_columns(
        ["hypothesis", "original_hypothesis", "uid"]
    )
    info = probe_info(probe)
    with_rows = len(set(probe["uid"]))
    # few where case or agreement marks the roles
    assert with_rows >= {"de": 0, "tr": 1, "fi": 1, "fr": 5}.get(path.name[:2], 0.02 * info.items)
    assert info.items == with_rows + sum(info.dropped.values())
    texts = probe.select_columns(["hypothesis", "original_hypothesis"])
    assert all(row["hypothesis"] != row["original_hypothesis"] for row in texts)


@pytest.mark.parametrize(
    ("text", "agent", "verb", "patient"),
    [
        ("I need the cat .", (0, 1), 1, (2, 4)),
        ("I shall send you a copy .", (0, 1), 2, (4, 6)),
        ("He confirmed that the values are correct .", (0, 1), 1, (2, 7)),
        ("We pulled off an operation .", (0, 1), 1, (3, 5)),
        ("He met the man the nun saw .", (4, 6), 6, (2, 4)),
    ],
)
def test_english_frames_without_a_tree_are_refused_and_the_reason_names_the_parser(text, agent, verb, patient):
    frame = Frame("own.01", (verb, verb + 1), (Argument("ARG0", *agent), Argument("ARG1", *patient)), "made up")
    item = Sentence(tuple(text.split()), uid="1", language="en", frames=(frame,))
    probe = semantic_role_swap([item], agreement="reinflect")
    assert len(probe) == 0
    [reason] = probe_info(probe).skipped
    assert reason.startswith("no tree with tags")
    assert "parser='spacy'" in reason


def test_a_present_verb_is_inflected_for_its_new_subject_and_a_past_is_not():
    assert swapped(S.format("(PRP I)", "need", "(DT the) (NN cat)").replace("VBD", "VBP"), agreement="reinflect") == [
        "The cat needs me."
    ]
    assert swapped(S.format("(PRP He)", "saw", "(PRP me)")) == ["I saw him."]
    assert reasons(S.format("(PRP I)", "hurt", "(DT the) (NN judge)")) == {"the tense of the verb is unknown"}


TWO = Candidate(("ARG0", "ARG1"), ((0, 1), (2, 3)), 1)
# noun phrases with their tags, by what a swap with "he" is
PERSONS = {
    "both": ["I/PRP", "them/PRP", "somebody/NN", "the/DT old/JJ nuns/NNS", "Ada/NNP", "Ada/NNP Lovelace/NNP",
             "Mr./NNP Zzyzx/NNP", "a/DT group/NN of/IN nuns/NNS", "two/CD Americans/NNPS", "the/DT people/NNS",
             "a/DT cook/NN ,/, a/DT nun/NN and/CC her/PRP$ niece/NN", "my/PRP$ friend/NN and/CC guide/NN"],
    "one": ["something/NN", "it/PRP", "a/DT hat/NN", "the/DT nun/NN 's/POS hat/NN", "a/DT group/NN of/IN hats/NNS",
            "a/DT nun/NN and/CC her/PRP$ hat/NN", "an/DT officer/NN 's/POS office/NN"],
    "unknown": ["Zzyzx/NNP", "the/DT US/NNP", "US/NNP", "the/DT nun/NN 's/POS House/NNP", "those/DT", "this/DT one/NN",
                "a/DT nun/NN and/CC Zzyzx/NNP", "a/DT nun/NN and/CC", "him/PRP and/CC me/PRP", "of/IN"],
}  # fmt: skip


@pytest.mark.parametrize("answer", PERSONS)
def test_a_swap_is_reversible_if_both_arguments_are_persons(answer):
    for phrase in PERSONS[answer]:
        words, tags = zip(*(each.rsplit("/", 1) for each in f"he/PRP saw/VBD {phrase}".split()), strict=True)
        tree = Constituents((), "made up", tags)
        item = Sentence(words, language="en", constituents=tree)
        assert reversible(item, Candidate(("ARG0", "ARG1"), ((0, 1), (2, len(words))), 1)) == answer, phrase
    without_tags = [Sentence(("he", "saw", word), language="en") for word in ("her", "nuns")]
    assert [reversible(each, TWO) for each in without_tags] == ["both", "unknown"]


def test_elsewhere_features_tell_persons():
    def czech(*features):
        layer = Dependencies((2, 0, 2), ("nsubj", "root", "obj"), "toy", None, (features[0], {}, features[1]))
        return Sentence(("a", "b", "c"), language="cs", dependencies=layer)

    pronoun, person, thing = {"PronType": "Prs"}, {"Animacy": "Hum"}, {"Animacy": "Inan"}
    for two, answer in (((pronoun, person), "both"), ((thing, pronoun), "one"), ((thing, thing), "none"),
                        ((pronoun, {}), "unknown"), ((person, {"Animacy": "Anim"}), "unknown")):  # fmt: skip
        assert reversible(czech(*two), TWO) == answer
    assert reversible(Sentence(("he", "saw", "her")), TWO) == "unknown"
