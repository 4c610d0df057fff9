"""Noun phrases: the head, the number as a subject, and whether the determiner agrees."""

from collections.abc import Sequence

from pelocality.corpora import Dependencies
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.clauses import Slot
from pelocality.probes.role_swap.english import Number

_FINITE = frozenset({"MD", "VBD", "VBP", "VBZ"})


def head_of(words: Sequence[str], tags: Sequence[str]) -> int | None:
    """Return the index of the head of a noun phrase: the last of its first run of nouns, or a pronoun; None without.

    Examples:
        >>> head_of(["the", "man", "'s", "dog", "in", "town"], ["DT", "NN", "POS", "NN", "IN", "NN"])
        3
    """
    head = None
    for i, tag in enumerate(tags):
        if tag.startswith("NN") and ((i and tag == "NNP") or words[i].lower() not in english.PRONOUN_NUMBER):
            head = i
        elif tag == "POS":
            head = None
        elif tag in ("NN", "PRP", "DT") and words[i].lower() in english.PRONOUN_NUMBER:
            return i if head is None else head
        elif tag == "JJ" and i + 1 < len(tags) and tags[i + 1].startswith("NN") and not _FINITE & {*tags}:
            continue  # "union leftist militants", but "the way other countries view it"
        elif (head is not None and tag not in ("HYPH", "CD")) or tag in english.AFTER_HEAD:
            break
    return head


def head_in_tree(layer: Dependencies, argument: Slot) -> int:
    """Return the word of an argument whose head lies outside it."""
    span = range(argument.start, argument.end)
    return next((i for i in span if not argument.start < layer.heads[i] <= argument.end), span[-1])


def number_of(words: Sequence[str], tags: Sequence[str] | None) -> Number | None:
    """Return the number of a noun phrase as a subject: of *I*, of *he*, or plural (with *you*); None if in doubt.

    Examples:
        >>> number_of(["the", "dogs", "in", "the", "yard"], ["DT", "NNS", "IN", "DT", "NN"])
        'plural'
        >>> number_of(["a", "man", "and", "a", "dog"], ["DT", "NN", "CC", "DT", "NN"])
        'plural'
        >>> number_of(["an", "old", "fish"], ["DT", "JJ", "NN"])
        >>> number_of(["every", "dog"], None)
        '3sg'
    """
    lower = [word.lower() for word in words]
    if len(words) == 1 and lower[0] in english.PRONOUN_NUMBER:
        return english.PRONOUN_NUMBER[lower[0]]
    if tags is None:
        return _number_by_word(words)
    head = head_of(words, tags)
    if head is None:
        return None
    after = lower[head + 1 :]
    if any(tag == "CC" and word != "&" for tag, word in zip(tags[head + 1 :], after, strict=True)):
        # "a man and a dog" are many; in doubt: "my friend and guide", "the man with a cat and a dog", "a man or a dog"
        return "plural" if after[0] == "and" and list(tags[head + 2 : head + 3]) != ["NN"] else None
    quantity = not english.VAGUE_NUMBER.isdisjoint(after)  # "a ton of series"
    if after[:1] == ["of"] and (quantity or any(tag in ("NNS", "NNPS") for tag in tags[head + 1 :])):
        return None if tags[head] == "NN" else "plural"  # "a group of dogs is", or "are"
    if lower[head] in english.PRONOUN_NUMBER and tags[head] != "NNP":  # "the US"
        return english.PRONOUN_NUMBER[lower[head]]
    is_vague = lower[head] in english.VAGUE_NUMBER or not tags[head].startswith("NN")
    # "James", "the States", and plurals that are tagged as singular
    is_vague = is_vague or (tags[head] != "NNS" and lower[head].endswith("s") and lower[head][-2:] not in ("ss", "us"))
    if is_vague or has_determiner_mismatch(words, tags):
        return None
    return "plural" if _is_plural(lower[head], tags[head]) else "3sg"


def _number_by_word(words: Sequence[str]) -> Number | None:
    """Return the number of a short noun phrase without tags, None if in doubt."""
    lower = [word.lower() for word in words]
    last = lower[-1]
    is_joined = not {"and", "or", "nor", "of", "in", "with"}.isdisjoint(lower)
    if len(words) > 4 or is_joined or last in english.VAGUE_NUMBER:
        return None
    ends_in_s = last.endswith("s") and not last.endswith(("ss", "us"))
    # "the dogs", but "the Netherlands", "the crisis", "the politics"
    is_noun = lower[0] in english.OTHER_DETERMINERS and words[-1].islower() and not last.endswith(("is", "ics"))
    has_determiner = not english.PLURAL_DETERMINERS.isdisjoint(lower) or (lower[0].isdigit() and lower[0] != "1")
    is_plural = has_determiner or last in english.IRREGULAR_PLURALS or (ends_in_s and is_noun)
    if is_plural and lower[0] not in english.SINGULAR_DETERMINERS:
        return "plural"
    # "a few dogs", "a thousand nuns", "Thomas", "physics", "policemen"
    return None if is_plural or ends_in_s or last.endswith((*english.IRREGULAR_PLURALS,)) else "3sg"


def _is_plural(word: str, tag: str) -> bool:
    return tag in ("NNS", "NNPS") or word in english.IRREGULAR_PLURALS


def has_determiner_mismatch(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether a determiner does not agree with its noun: an error of the writer or of the tagger.

    True for *two woman*, and for *a marathon talks*, a noun and a verb tagged as two nouns.

    Examples:
        >>> has_determiner_mismatch(["a", "marathon", "talks"], ["DT", "NN", "NNS"])
        True
        >>> has_determiner_mismatch(["a", "few", "men"], ["DT", "JJ", "NNS"])
        False
    """
    head = head_of(words, tags)
    if head is None:
        return False
    start = max((k + 1 for k in range(head) if tags[k] == "POS"), default=0)  # "a man's hats"
    determiners = {word.lower() for word in words[start:head]}
    singular, plural = determiners & english.SINGULAR_DETERMINERS, determiners & english.PLURAL_DETERMINERS
    if _is_plural(words[head].lower(), tags[head]):
        return bool(singular) and not plural - {"both"}
    return bool(plural - {"few"})
