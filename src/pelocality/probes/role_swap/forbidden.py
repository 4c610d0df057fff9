"""What forbids an exchange in English: verbs whose roles are no two, arguments that are no plain noun phrase."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pelocality.corpora import Sentence
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate, RoleArgument
from pelocality.probes.role_swap.capitals import is_all_capitals, starts_sentence
from pelocality.probes.role_swap.misread import misread


def check_english(sentence: Sentence, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Say why two English arguments must stay where they are, if they must.

    Args:
        sentence: The sentence.
        candidate: The arguments and their clause.
        symmetric: Base forms of verbs whose roles mean the same exchanged.

    Returns:
        The reason, None where nothing speaks against the exchange.
    """
    tags = english.tags_of(sentence)
    lower = [word.lower() for word in sentence.words]
    verb = lower[candidate.verb] if candidate.verb is not None else ""
    if (
        candidate.verb is not None
        and not starts_sentence(sentence, candidate.verb)
        and sentence.words[candidate.verb][0].isupper()
        and not is_all_capitals(sentence)
    ):
        return "the sentence is written as a heading"  # "The Dog Bit Him": which words bear a capital is a style's
    if verb in english.COPULAS or candidate.lemma in ("be", "become", "seem", "remain", "stay"):
        return "the verb is a copula"
    if verb in english.verb_forms(symmetric) or candidate.lemma in symmetric:
        return "the verb is symmetric"
    if verb in english.MEASURE_VERBS:
        return "the verb takes a measure"
    if verb in english.QUOTING_VERBS:
        return "the verb takes words"
    if any(_is_expletive(candidate, argument, lower) for argument in candidate.arguments):
        return "an argument is an expletive"
    reason = _check_verb_phrase(sentence, candidate, lower, tags)
    if reason:
        return reason
    for argument, other in (candidate.arguments, candidate.arguments[::-1]):
        words = lower[argument.start : argument.end]
        own = tags[argument.start : argument.end] if tags is not None else None
        reason = _check_noun_phrase(words, own)
        if reason:
            return reason
        their = lower[other.start : other.end]
        owner = (english.POSSESSIVES | english.THIRD_PERSON) & set(words if len(words) > 1 else ())
        if owner and not (
            len(their) == 1 and their[0] in english.PRONOUN_NUMBER and their[0] not in english.THIRD_PERSON
        ):
            return "a pronoun in one argument may mean the other"
    start, end = candidate.extent
    if candidate.verb is not None and any(
        word in english.FLOATING and not any(f.start <= i < f.end for f in candidate.arguments)
        for i, word in enumerate(lower[start:end], start)
        if i < candidate.verb
    ):
        return "a quantifier floats off its argument"
    return None


def _check_verb_phrase(
    sentence: Sentence, candidate: Candidate, lower: Sequence[str], tags: Sequence[str] | None
) -> str | None:
    """Look at the words around the verb: likeness, *have on*, and what may be misread."""
    if candidate.verb is None:
        return None
    after = lower[candidate.verb + 1 : candidate.verb + 2]
    verb, ends = lower[candidate.verb], [lower[argument.start : argument.end] for argument in candidate.arguments]
    if verb in english.SHAKE and any(end[-1] == "hands" for end in ends):
        return "the verb is symmetric"
    if verb in english.MAKE and any(end[0] in ("a", "an") and set(end[1:2]) & english.JUDGEMENTS for end in ends):
        return "the verb is a copula"
    if verb in english.SENSE_VERBS and after == ["like"]:
        return "the verb is symmetric"
    last = max(argument.end for argument in candidate.arguments)
    if verb in english.HAVE and lower[last : last + 1] == ["on"]:
        return "the verb is 'have on'"
    if tags is None:
        return None
    if _may_be_finite(candidate, lower, tags):
        return "whether the verb is finite is in doubt"
    return misread(candidate, lower, tags) if sentence.automatic else None


def _may_be_finite(candidate: Candidate, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Find base forms that nothing explains: "whether you need it" may be tagged so and still agree."""
    subject = next((f for f in candidate.arguments if f.subject), None)
    if subject is None or candidate.verb is None or candidate.finite is not None or tags[candidate.verb] != "VB":
        return False
    before = words[subject.start - 1] if subject.start else ""
    return "to" not in words[subject.end : candidate.verb] and before not in english.BARE_INFINITIVE_VERBS


def _is_expletive(candidate: Candidate, argument: RoleArgument, words: Sequence[str]) -> bool:
    """Say whether a pronoun refers to nothing: "it rained cats", "it takes courage", "it pained him to go"."""
    own = words[argument.start : argument.end]
    if own == ["there"] and argument.subject is not False:
        return True
    if own != ["it"] or candidate.verb is None:
        return False
    last = max(f.end for f in candidate.arguments)
    begins = argument.end <= candidate.verb and words[candidate.verb] in english.EXPLETIVE_VERBS
    return begins or (last < len(words) and words[last] in english.CLAUSE_WORDS)


def _check_noun_phrase(words: Sequence[str], tags: Sequence[str] | None) -> str | None:
    """Say why an English argument is not a plain noun phrase, if it is not."""
    if set(words[:2]) & english.WH_WORDS or (tags and tags[0] in ("WDT", "WP", "WP$", "WRB")):
        return "an argument is interrogative or relative"
    if english.NEGATIVE_POLARITY & set(words):
        return "an argument is bound to negation"
    if len(words) > 1 and (words[0] in english.ACCUSATIVE or words[0] in english.NOMINATIVE.keys() - {"her"}):
        return "a pronoun inside a longer argument"
    if any(
        w in ("and", "or") and words[k + 1] in {*english.ACCUSATIVE, *english.NOMINATIVE}
        for k, w in enumerate(words[:-1])
    ):
        return "a pronoun inside a longer argument"
    if len(words) == 1 and words[0] in english.LOWER_CASE and words[0] not in english.PRONOUN_NUMBER:
        return "an argument is not headed by a noun"
    if tags is None:
        return None
    if tags[0] in ("IN", "TO", "EX", "RB", "VB", "VBD", "VBZ", "VBP"):
        return "an argument is not a noun phrase"
    head = english.head_of(words, tags)
    if head is None:
        return "an argument is not headed by a noun"
    if ("TO", "VB") in itertools.pairwise(tags):
        return "an argument carries an infinitive"  # "a role to play": its subject is the other argument
    if any(m == words[head] or m + "s" == words[head] for m in english.MEASURES):
        return "an argument is a measure"
    bare = tags[head] == "NN" and words[head] not in english.PRONOUN_NUMBER
    if bare and not any(t in ("DT", "PRP$", "POS", "CD", "PDT", "NNP", "NNPS") for t in tags[:head]):
        return "an argument is a bare singular noun"
    return None
