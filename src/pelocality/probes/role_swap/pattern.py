"""The English pattern: two plain noun phrases beside one finite verb group, and nothing that hangs off them.

A swap is made only where every word of the clause is recognised, by its tag and by short word lists. Each ``_check``
returns the reason why the pattern does not fit, or None if it does.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.clauses import NOT_IN_CLAUSE, Candidate, Span
from pelocality.probes.role_swap.english import WORDS

_NOT_PLAIN = "an argument is not a plain noun phrase"
_AFTER = "words after the last argument may belong to it"
_OTHER_VERB = "another verb has the same subject"
_FINITE = frozenset({"MD", "VBD", "VBP", "VBZ"})
_AFTER_HELPER = {None: _FINITE - {"MD"}, "have": {"VBN", "VBD"}, "be": {"VBG"}, "get": {"VBG"}}
_NOUNS = frozenset({"DT", "PRP$", "PDT", "CD", "NN", "NNS", "NNP", "NNPS", "JJ", "JJR", "VBG", "POS"})
_NOMINATIVE = english.ACCUSATIVE.keys() | {"you"}
_SUBJECTLESS = frozenset({"TO", "VB", "VBG", "VBN"})  # verb forms that take the subject of another clause
_INNER_MARKS = frozenset({",", "-", "--", "–", "—"})

# The tag after a conjunction, adverbs and phrases such as "at least": the first conjunction, or the next of one clause.
_JOINED = re.compile(
    r"(?:(?:(?!CC )\S+ )*|(?:(?!MD|VB[DPZ])\S+ )*)CC (?:(?:CC|RB|,|IN (?:JJS|(?:DT )?NN)) )*(?!CC|RB|,)(\S+)"
)
# Verbs that share the subject after a comma: "..., hoping to win", "..., then left"
_TRAILING = re.compile(r"(?:(?!MD|VB[DPZ])\S+ )*, (?:RB VBD|VBG)(?!\S)")
_CODES = {"DT": "D", "PDT": "D", "PRP$": "D", "CD": "C", "JJ": "J", "JJS": "J", "VBN": "V", "VBG": "V", "RB": "R",
          "NN": "N", ",": "K", "NNS": "N", "NNP": "M", "NNPS": "M", "POS": "P", "CC": "A", "HYPH": "H",
          "IN": "I"}  # fmt: skip
_ADJECTIVE = "(?:R?J|(?<=[DCJRKA])V)"
_CORE = rf"D{{0,2}}C?(?:{_ADJECTIVE}(?:K?A?{_ADJECTIVE})*|[NMJ]H[JV]?|[NM]P?)*(?:N|MC?)"
_OBJECT = rf"{_CORE}(?:O{_CORE})?|{_CORE}(?:K{_CORE})*K?A{_CORE}"
_SUBJECT = rf"{_OBJECT}|{_CORE}(?:[OI]{_CORE}){{1,2}}"  # before the verb, a preposition belongs to the noun
_WORD = re.compile(r"[^\W_](?:[.,'’&/-]?\w)*[.'’]?|['’]\w*|[.…,;:!?&$£€%\"“”„‘`()\[\]–—-]+|-[LR].B-", re.IGNORECASE)


def is_plain(words: Sequence[str], tags: Sequence[str], *, before_verb: bool = False) -> bool:
    """Return whether words are a pronoun, or determiners, adjectives and nouns, coordinated or with *of*."""
    if len(words) == 1 and words[0] in english.PRONOUNS:
        return True
    codes = "".join("O" if w == "of" else _CODES.get(t, "-") for w, t in zip(words, tags, strict=True))
    return bool(re.fullmatch(_SUBJECT if before_verb else _OBJECT, codes))


def head_of(words: Sequence[str], tags: Sequence[str]) -> int:
    """Return the index of the head of a plain noun phrase: the last noun before a preposition, comma or conjunction."""
    ends = (k for k in range(1, len(words)) if tags[k] in ("IN", "CC", ",", "WDT", "WP") and tags[k - 1][:2] == "NN")
    head = next(ends, len(words)) - 1
    return head - (head > 0 and tags[head] == "CD" and tags[head - 1] == "NNP")  # "iPhone 5"


@dataclass(frozen=True)
class Clause:
    """The words and tags of a sentence, and the places of a verb and of the arguments before and after it."""

    sentence: Sentence
    tags: Sequence[str]
    first: Span
    verb: int
    last: Span

    @cached_property
    def lower(self) -> list[str]:
        """The words in small letters."""
        return english.lowered(self.sentence)

    @cached_property
    def passive(self) -> bool:
        """Whether the last argument is an agent: *by* stands before it, beside the verb or its particle."""
        particle = self.lower[self.verb + 1 : self.last[0] - 1]
        by = self.lower[self.last[0] - 1] == "by"
        return by and (not particle or particle[0] in ("up", "down", "out", "off", "over"))

    @cached_property
    def finite(self) -> int:
        """The finite verb: the auxiliary before the subject of a question, or the first verb after the subject."""
        before = self.first[0] - 1
        if before >= 0 and self.tags[before] in _FINITE and self.lower[before] in english.AUXILIARIES:
            return before
        return next((i for i in range(self.first[1], self.verb) if self.tags[i] in _FINITE), self.verb)

    @cached_property
    def start(self) -> int:
        """Where the clause begins: before its first argument, the auxiliary of a question, and adverbs."""
        k = min(self.first[0], self.finite)
        while k and self.tags[k - 1] == "RB" and self.lower[k - 1] not in WORDS["before"]:
            k -= 1
        return k

    @cached_property
    def gold(self) -> bool:
        """Whether the tags are those of a treebank."""
        return not self.sentence.automatic


def reason_against(clause: Clause, candidate: Candidate, symmetric: frozenset[str]) -> str | None:
    """Return why a candidate does not fit the pattern, None if it does."""
    first, last, verb = clause.first, clause.last, clause.sentence.words[clause.verb]
    if not first[1] <= clause.verb < last[0]:
        return NOT_IN_CLAUSE.reason
    if verb[0].isupper() and not clause.sentence.text.isupper():
        return "the sentence is a heading"  # "The Dog Bit Him": which words have a capital is a matter of style
    if not all(map(_WORD.fullmatch, clause.lower)):
        return "a symbol, or a word that is cut, stands in the sentence"  # "saw them *", "the river <unk>", "480±5 mg"
    if english.MUTUAL.search(" ".join(clause.lower)):
        return "a reflexive or reciprocal in the sentence"
    return (
        _check_verb(clause, candidate.lemma, symmetric)
        or _check_group(clause)
        or _check_phrase(clause, first, last)
        or _check_phrase(clause, last, first)
        or _check_before(clause)
        or _check_after(clause)
        or _check_reference(clause)
    )


def _check_verb(clause: Clause, lemma: str, symmetric: frozenset[str]) -> str | None:
    """Look for verbs whose arguments do not have two different roles."""
    lower, tags, first, last = clause.lower, clause.tags, clause.first, clause.last
    word, phrase, active = lower[clause.verb], lower[slice(*last)], not clause.passive
    verbs, head = {english.base(word), english.base(lemma)}, phrase[head_of(phrase, tags[slice(*last)])]
    indefinite = phrase[0] not in WORDS["definite"] and tags[last[0]] not in ("PRP", "PRP$", "NNP")
    bare = len(phrase) == 1 and tags[last[0]] in ("NN", "NNS") and head not in WORDS["indefinite"]
    predicate = bare or (phrase[0] in ("a", "an") and "of" not in phrase)
    light = WORDS["lighter"] if bare else WORDS["light"] if indefinite else frozenset()
    light = WORDS["lightest"] if bare and tags[last[0]] == "NN" else light
    for reason, listed in {
        "the verb is a copula": WORDS["copulas"] | (WORDS["predicative"] if active and predicate else frozenset()),
        "the verb may be symmetric": symmetric,
        "the verb takes a measure, a place or quoted words": WORDS["measuring"],
        "a light verb with a noun": {"do"} | (light if active else frozenset()),  # "took place", "gave a speech"
    }.items():
        if verbs & english.stems(frozenset(listed)):
            return reason
    if active and english.are_cognate(word, head) and (indefinite or verbs & {english.base(head)}):
        return "the object repeats the verb"
    marked = clause.gold and any({*lower[slice(*span)]} <= english.PERSONAL for span in (first, last))
    # "a hat has Ada" reads as an inversion
    return "the subject may stand after the verb" if "have" in verbs and not marked else None


def _check_group(clause: Clause) -> str | None:
    """Check that one finite verb group fills the place between the arguments, with the *by* of an agent."""
    lower, tags, finite, passive = clause.lower, clause.tags, clause.finite, clause.passive
    if not passive and clause.last[0] != clause.verb + 1:
        return NOT_IN_CLAUSE.reason
    barred = WORDS["after"] if clause.gold else english.BESIDE
    group = [finite] * (finite < clause.first[0])
    group += [i for i in range(clause.first[1], clause.verb) if tags[i] != "RB" or lower[i] in barred]
    auxiliary = all(lower[i] in english.AUXILIARIES or english.base(lower[i]) == "get" for i in group)
    helper, tag = english.base(lower[group[-1]]) if group else None, tags[clause.verb]
    fits = (tag == "VBN" and helper in ("be", "get")) if passive else tag in _AFTER_HELPER.get(helper, {"VB"})
    one = tags[finite] in _FINITE and [tags[i] in _FINITE for i in group] == [i == finite for i in group]
    return None if fits and auxiliary and one else "the arguments do not stand beside one finite verb"


def _check_phrase(clause: Clause, here: Span, other: Span) -> str | None:
    """Check that an argument is a plain noun phrase, no measure, and without words that depend on others elsewhere."""
    lower, tags, is_last = clause.lower, clause.tags, here > other
    words, within = lower[slice(*here)], tags[slice(*here)]
    if clause.gold and is_last and within[-1] not in ("IN", "TO", "VBG", "RP") and "," not in words:
        end = next((k for k in range(1, len(words)) if within[k] in ("WDT", "WP")), len(words))
        words, within = words[:end], within[:end]  # "a cat that died": a treebank says where a relative clause ends
    repeated = any(itertools.starmap(str.__eq__, itertools.pairwise(words)))  # a false start: "the the hat"
    dotted = "." in words[-1] and any(lower[end : end + 1] in ([], ["."]) for _, end in (here, other))  # "the U.K"
    adverb = words[-1] in WORDS["after"] or (within[-1] != "NNP" and english.DIRECTION.fullmatch(words[-1]))
    plain = is_plain(words, within, before_verb=not is_last) and not adverb
    # A parser may miss where a list or an apposition ends.
    if not plain or repeated or dotted or words[0] == "it" or ("," in words and not clause.gold):
        return _NOT_PLAIN
    free = (not is_last or {*lower[slice(*other)]} <= english.PERSONAL) and WORDS["any"].isdisjoint(lower)
    if not (WORDS["bound"] | WORDS["any"]).isdisjoint(words) or (not free and not WORDS["negative"].isdisjoint(words)):
        return "an argument has a quantifier or comparison that depends on other words"
    head = head_of(words, within)
    # "changed my hat last term"
    if {"last", "next"} & {*words} or words[head][0].isdigit() or english.MEASURE.fullmatch(words[head]):
        return "an argument is a measure"
    bare = within[head] == "NN" and {*within} <= {"NN", "JJ"} and words[0] not in WORDS["indefinite"]
    if is_last and clause.passive and (bare or words[head].removesuffix("s") in WORDS["means"]):
        return "the phrase with by may tell a means"  # "moved by force", "found by the same method"
    return _NOT_PLAIN if is_last and not clause.gold and _may_be_more(clause, words, within) else None


def _may_be_more(clause: Clause, words: Sequence[str], tags: Sequence[str]) -> bool:
    """Return whether the words of an object may be more than one phrase, which a parser often takes for one."""
    verb, after = clause.lower[clause.verb], {*clause.tags[clause.last[1] : clause.last[1] + 1]}
    two = any(one in ("NN", "NNS", "NNP") and other in ("NN", "NNS") for one, other in itertools.pairwise(tags))
    open_left = tags[0][:2] in ("NN", "JJ", "VB", "RB") and tags[0] != "NNP" and words[0] not in WORDS["indefinite"]
    # "travel light", "you silly young owl"; "have baked potatoes"
    bare = open_left and (tags[head_of(words, tags)] == "NN" or english.base(clause.lower[clause.verb - 1]) == "have")
    # "called her Estella", "turned her back"
    her = words[0] == "her" and ("NNP" in tags if len(words) > 1 else not after.isdisjoint({"RB", "RP"}))
    # "call that freedom", "the boy singing"
    small = english.base(verb) in english.stems(WORDS["small clauses"])
    predicate = (small and (two or words[0] == "that")) or (two and words[-1].endswith("ing"))
    return bare or her or predicate or "of" in words  # "accused the nun of theft"


def _check_before(clause: Clause) -> str | None:
    """Check that a clause begins before the first argument, so that nothing there belongs to it."""
    lower, tags, k, subject = clause.lower, clause.tags, clause.start, clause.lower[clause.first[0]]
    if k == 0:
        return None
    pronoun, before, has_clause = subject in _NOMINATIVE, lower[k - 1], not _FINITE.isdisjoint(tags[:k])
    # "either the nun or Ada", "we saw we saw Ada"
    if before in WORDS["before"] or lower[k - 2 : k] == lower[k : k + 2]:
        fits = False
    elif before in WORDS["introducing"] or _is_saying(before):
        fits = clause.gold or subject in english.PRONOUNS or before not in WORDS["prepositions"]
    elif tags[k - 1] == "CC":
        fits = k == 1 or (has_clause and (pronoun or clause.gold or is_punctuation(lower[k - 2])))
    else:
        first = next((tag for tag, word in zip(tags, lower, strict=True) if not is_punctuation(word)), "")
        opens = before != "," or has_clause or first in ("IN", "RB", "UH", "CC")
        alone = pronoun and (clause.gold or tags[k - 1] not in _NOUNS)  # "all they sold us", "as a cook you saw me"
        begin = next((i + 1 for i in reversed(range(k - 1)) if tags[i] == "CC" or is_punctuation(lower[i])), 0)
        phrase = [tag for tag in tags[begin:k] if tag not in ("IN", "RB", "WRB", "CC")]
        loose = _FINITE.isdisjoint(phrase) and not {"TO", "VBG", "VBN"}.isdisjoint(
            phrase[:1] if clause.gold else phrase
        )
        # "and sitting down, the nun"
        fits = opens and (before in (";", ":") or not loose) and (alone or is_punctuation(before))
    return None if fits else "words before the first argument may belong to it"


def _check_after(clause: Clause) -> str | None:
    """Check that the clause ends after the last argument, or goes on with words that cannot belong to it."""
    lower, tags, (begin, k), n = clause.lower, clause.tags, clause.last, len(clause.lower)
    pronoun = k - begin == 1 and lower[begin] in english.PERSONAL
    name = all(tag.startswith("NNP") for tag in tags[begin:k])
    while k < n and (tags[k] in ("RB", "RP") or lower[k] in WORDS["times"]) and lower[k] not in WORDS["after"]:
        k += 1
    after = tags[k + 1] if k + 1 < n else ""
    if k == n or not lower[k].strip(".!?;:…)”’'") or _links(lower, tags, k):
        return None
    if tags[k] == "CC" or is_punctuation(lower[k]):
        before = clause.start - 1
        # "if you saw Ada, ..."
        subordinate = before >= 0 and (lower[before] in WORDS["links"] or tags[before] == "WRB")
        ends = lower[k] == "," and subordinate and after not in ("CC", "WDT", "WP", "TO", "VBG", "VBN")
        return None if ends else _check_joined(lower, tags, k, pronoun or clause.gold)
    named = ("over", "about", *(("for", "with") if clause.gold else ())) if name else ()
    goal = lower[k] in ("to", "into", "onto", *named) and (clause.gold or pronoun or name)
    goal = goal or (pronoun and tags[k] == "IN" and lower[k] not in WORDS["exceptions"])
    goal = goal and after in _NOUNS | {"PRP"}
    moved = (pronoun or name) and lower[k] == "to" and after == "VB" and not clause.passive
    return None if goal or moved else _AFTER


def _is_saying(word: str) -> bool:
    return english.base(word) in english.stems(WORDS["saying"])


def _links(lower: Sequence[str], tags: Sequence[str], k: int) -> bool:
    """Return whether a word begins a subordinate clause, with a subject of its own."""
    return lower[k] in WORDS["links"] and _SUBJECTLESS.isdisjoint(tags[k + 1 : k + 2])


def _check_joined(lower: Sequence[str], tags: Sequence[str], k: int, sure: bool) -> str | None:
    """Check that words after punctuation or a conjunction are another clause, with a subject of its own."""
    mark, begin, n = lower[k], k, len(lower)
    k = next((i for i in range(k, n) if tags[i] not in ("CC", "RB") and not is_punctuation(lower[i])), n)
    joined = "CC" in tags[begin:k]
    if k == n or _links(lower, tags, k) or lower[k] in _NOMINATIVE | {"it", "there"}:
        return None
    if tags[k] in _FINITE | _SUBJECTLESS:
        said = _is_saying(lower[k]) and tags[k] in _FINITE and not joined
        return None if said else _OTHER_VERB
    end = next((i for i in range(k, len(lower)) if tags[i] not in _NOUNS), k)
    # "and our children love it"
    own = (joined or sure or mark not in _INNER_MARKS) and end > k and tags[end] in _FINITE
    addition = sure and not joined and mark in _INNER_MARKS and tags[k] in ("IN", "UH")
    return None if own or (addition and lower[k] not in WORDS["exceptions"]) else _AFTER


def _check_reference(clause: Clause) -> str | None:
    """Look in the clause for words whose meaning depends on an argument: pronouns, reflexives, ellipsis."""
    lower, tags, (_, last) = clause.lower, clause.tags, clause.last
    end = next((k for k in range(last, len(lower)) if tags[k] in ("CC", "WRB") or is_punctuation(lower[k])), None)
    phrases, after = [lower[slice(*span)] for span in (clause.first, clause.last)], {*lower[last:end]}
    spoken = [{*phrase} <= english.PERSONAL - WORDS["third person"] for phrase in phrases]
    third = [len(phrase) > 1 and not WORDS["third person"].isdisjoint(phrase) for phrase in phrases]
    same = any({*phrases[0], *phrases[1]} & person and person & after for person in english.SAME_PERSON)
    later = not all(spoken) and not WORDS["third person"].isdisjoint(after)
    if same or later or (third[0] and not spoken[1]) or (third[1] and not spoken[0]):
        return "a pronoun may refer to an argument"
    rest = " ".join(tags[last:])
    joined = _JOINED.match(rest)
    if (joined and joined[1] in _FINITE | {"VB", tags[clause.verb]}) or _TRAILING.match(rest):
        return _OTHER_VERB
    for k in range(last, len(lower)):
        if lower[k] in english.AUXILIARIES and tags[k] != "VB":
            follows = next((i for i in range(k + 1, len(lower)) if tags[i] != "RB"), None)
            noun = follows is not None and tags[k] == "MD" and tags[follows] in _NOUNS  # "but we can our cats"
            tag = follows is None or is_punctuation(lower[follows]) or lower[follows + 1 : follows + 2] == ["?"]
            if noun or tag:
                return "an auxiliary stands for the verb phrase"  # "I chose Ada, and we did too", "isn't she?"
    return None
