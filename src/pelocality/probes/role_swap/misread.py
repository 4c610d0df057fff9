"""What parsers of English misread most often, told from the words around two arguments.

Each rule was written for rows that a reader found wrong in automatically parsed image captions.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.candidates import Candidate, RoleArgument

# prepositions that go with the noun before them: "a picture of a dog", "a book about dogs"
_NOMINAL_PREPOSITIONS = frozenset({"of", "about", "like"})


def misread(candidate: Candidate, words: Sequence[str], tags: Sequence[str]) -> str | None:
    """Say what a parser may have misread in a clause, if anything.

    Args:
        candidate: The arguments and their clause, with its verb.
        words: The words of the sentence, in small letters.
        tags: Their Penn Treebank tags.

    Returns:
        The reason to set the candidate aside, None where nothing looks misread.
    """
    verb = candidate.verb
    if verb is None:
        return None
    particle = set(words[verb + 1 : verb + 2]) & english.PREPOSITIONAL_PARTICLES
    if particle and any(argument.start == verb + 2 for argument in candidate.arguments):
        return "a particle may be a preposition"
    for argument in candidate.arguments:
        own, own_tags = words[argument.start : argument.end], tags[argument.start : argument.end]
        if _may_end_elsewhere(argument, verb, words, tags) or _holds_a_verb(
            bool(argument.object), words[verb], own, own_tags
        ):
            return "an argument may not end where the parser ends it"
        if argument.object and any(
            tag == "IN" and word not in _NOMINAL_PREPOSITIONS for word, tag in zip(own, own_tags, strict=True)
        ):
            return "an argument may hold what belongs to the verb"  # "carries a stick on the grass"
        if english.is_slip(own, own_tags):
            return "a determiner does not fit its noun"
        participle = candidate.finite is None and tags[verb] == "VBG"
        if argument.subject and participle and _may_be_another_s(own, own_tags):
            return "whose participle the verb is may be misread"
    return None


def _may_end_elsewhere(argument: RoleArgument, verb: int, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Look for what parsers cut off a noun phrase most often."""
    following = words[argument.end : argument.end + 1]
    if following in (["and"], ["or"]):
        return True
    if following == ["to"] and argument.end - argument.start == 1:  # "making something to eat"
        return words[argument.start] in english.PRONOUN_NUMBER
    if argument.end <= verb:  # "a man with a hat on is ...", "a woman next to him is ..."
        between = tags[argument.end : verb]
        named = any(tag.startswith(("NN", "PRP")) for tag in between)
        return following == ["on"] or tags[argument.end] in ("IN", "RP") or named
    after = tags[argument.end : argument.end + 2]  # "washing stairs leading down", "in a coat in competing"
    return after[:1] == ("VBG",) or (following == ["in"] and after[1:] == ("VBG",))


def _holds_a_verb(is_object: bool, verb: str, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Look for what parsers take into a noun phrase most often."""
    if any(tag == "CC" and after.endswith("ing") for tag, after in zip(tags, words[1:], strict=False)):
        return True  # "having drinks and smoking cigarettes"
    if is_object and "VBG" in tags[1:]:
        return True
    last_two = [tag[:2] for tag in tags[-2:]] == ["NN", "NN"]
    if last_two and words[-1].endswith("ing"):  # "holding a microphone singing": whoever sings
        return True
    return last_two and verb in english.HELPING_VERBS  # "helping a child dig"


def _may_be_another_s(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Say whether the participle after a subject may belong to a part of it.

    "a view of a woman holding a drink", "a man with a beard and a boy with a bag riding a bike".
    """
    head = english.head_of(words, tags)
    chained = "of" in words and (head is None or words[head] not in english.GROUPS)
    return chained or ("CC" in tags and bool({"IN", "VBG"} & set(tags)))
