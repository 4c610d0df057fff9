"""The exchange of two arguments, with the pronoun case, the capitals and the verb form that follow from it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pelocality.corpora import Sentence, is_punctuation
from pelocality.probes._build import Skipped
from pelocality.probes.role_swap import english
from pelocality.probes.role_swap.clauses import Candidate, Span
from pelocality.probes.role_swap.english import WORDS, Number
from pelocality.probes.role_swap.features import keeps_capital, reason_by_features
from pelocality.probes.role_swap.pattern import Clause, head_of, reason_against

Agreement = Literal["skip", "reinflect", "ignore"]
Replacement = tuple[int, int, str, str]  # start, end, text, and the role or "agreement"
Swap = tuple[Candidate, list[Replacement]]

_CAMEL_CASE = re.compile(r"[a-z]+[A-Z]")
_CAPITAL = Skipped("whether a word keeps its capital is unknown")
_PRESENT: dict[Number, str] = {"1sg": "am", "3sg": "is", "plural": "are"}
_PAST: dict[Number, str] = {"1sg": "was", "3sg": "was", "plural": "were"}
_BE = {**dict.fromkeys(_PRESENT.values(), _PRESENT), **dict.fromkeys(_PAST.values(), _PAST)}


def exchange(
    sentence: Sentence, candidate: Candidate, agreement: Agreement, symmetric: frozenset[str], by_caller: bool = False
) -> Swap | Skipped:
    """Return the candidate with its voice, and the replacements that exchange its arguments, or the reason to skip.

    The arguments that a function of the caller's found are exchanged as they are, whether or not a pattern fits.
    """
    first, last = sorted(candidate.arguments)
    if first[1] > last[0]:
        return Skipped("the arguments overlap")
    starts, ends = ({place[k] for place in sentence.surface_tokens} for k in (0, 1))
    if not starts >= {first[0], last[0]} or not ends >= {first[1], last[1]}:
        return Skipped("an argument cuts a surface token")
    replacements: list[Replacement] | Skipped = []
    tags, reason = english.tags_of(sentence) if sentence.language == "en" else None, None
    if tags is not None:
        verb = candidate.verb
        if verb is None:  # it, or "by", stands before the last argument
            verb = max(0, last[0] - 1 - (sentence.words[last[0] - 1].lower() == "by"))
        clause = Clause(sentence, tags, first, verb, last)
        candidate = replace(candidate, voice="passive" if clause.passive else "active")
        reason = None if by_caller else reason_against(clause, candidate, symmetric)
        if not reason and agreement != "ignore":
            replacements = _reinflected_verb(clause, agreement)
    elif sentence.language != "en":
        reason = reason_by_features(sentence, candidate, agreement)
    elif not by_caller:
        reason = (
            "no tree with tags and features, by which English swaps are recognised; parser='spacy' makes one of text"
        )
    elif agreement != "ignore":
        reason = "no tree tells whether the verb agrees; parser='spacy' makes one, agreement='ignore' swaps as it is"
    if reason:
        return Skipped(reason)
    if isinstance(replacements, Skipped):
        return replacements
    for here, role in zip(candidate.arguments, candidate.roles, strict=True):
        text = _moved(sentence, first if here == last else last, here, here == first, tags)
        if isinstance(text, Skipped):
            return text
        replacements.append((*here, text, role))
    replacements.sort()
    if sentence.replaced([(start, end, text) for start, end, text, _ in replacements]) == sentence.text:
        return Skipped("the text would not change")
    return candidate, replacements


def _moved(sentence: Sentence, argument: Span, here: Span, subject: bool, tags: Sequence[str] | None) -> str | Skipped:
    """Return the text of an argument in the place of the other, with the right pronoun case and capital."""
    text = _uncapitalised(sentence, *argument, tags)
    if isinstance(text, Skipped):
        return text
    form = (english.NOMINATIVE if subject else english.ACCUSATIVE).get(text.lower())
    if form is not None and sentence.language == "en" and not (tags and tags[argument[0]].startswith("NN")):
        text = form.upper() if sentence.text.isupper() or (len(text) > 1 and text.isupper()) else form
    place = sentence.words[here[0]]
    if not _starts_sentence(sentence, here[0]):
        return text
    if _CAMEL_CASE.match(place) or _CAMEL_CASE.match(text):  # "iPhones" has no capital: would another word have one?
        return _CAPITAL
    # Turkish has a capital for each of its two letters i
    upper = "İ" if text[0] == "i" and sentence.language in ("tr", "az") else text[0].upper()
    return text if place[0].islower() else upper + text[1:]


def _starts_sentence(sentence: Sentence, start: int) -> bool:
    """Return whether a word begins a sentence: only punctuation before it, or the end of another sentence."""
    before = [word for word in sentence.words[:start] if word not in ('"', "“", "'", "‘", "(", "``")]
    return all(is_punctuation(word) for word in before) or before[-1] in (".", "!", "?")


def _uncapitalised(sentence: Sentence, start: int, end: int, tags: Sequence[str] | None) -> str | Skipped:
    """Return words without the capital of a sentence's first word, or the reason to skip if that is in doubt."""
    text, word, begins = sentence.surface(start, end), sentence.words[start], _starts_sentence(sentence, start)
    if start and not begins and word[0].isupper() and sentence.words[start - 1] in ('"', "“", "``", "'", "‘", ":"):
        return _CAPITAL  # a sentence that begins inside another
    if not word[0].isupper() or word == "I" or (sentence.text.isupper() and len(sentence.words) > 1):
        return text
    lower = {"I": "ı", "İ": "i"} if sentence.language in ("tr", "az") else {}
    without = lower.get(text[0], text[0].lower()) + text[1:]
    listed = sentence.language == "en" and word.lower() in WORDS["determiners"] | english.PRONOUNS.keys()
    if tags is None and not listed:
        named = keeps_capital(sentence, start)
        return text if named or not begins else _CAPITAL if named is None else without
    tag, *others = (tags or ("",) * end)[start:end]
    if not begins:  # a capital of "The" or of a common noun may begin a sentence inside another
        return _CAPITAL if word.istitle() and (listed or tag in ("NN", "NNS")) else text
    if listed:
        return _CAPITAL if len(word) > 1 and word.isupper() else without  # "THE dog"
    if any(letter.isupper() or letter.isdigit() for letter in word[1:]):
        return text
    gold, alone = not sentence.automatic, end - start == 1
    if tag.startswith("NNP"):
        # Taggers mistake the capital of "Kids play" for a name's, but a bare singular is one: "Diana plays".
        name = gold or others[:1] == ["NNP"] or (alone and tag == "NNP" and not word.endswith("s"))
        return text if name and not (alone and english.ABSTRACT.fullmatch(word.lower())) else _CAPITAL
    plural = word.endswith("s") or word.lower() in WORDS["plurals"]
    common = tag in ("NN", "JJ", "CD", "RB") or (tag == "NNS" and (gold or plural))  # "Carolyn", tagged as a plural
    named = tag == "NN" and not gold and (alone or others[0] == "POS")  # "Stone saw him"
    doubt = not common or named or "-" in word or english.NATION.fullmatch(word.lower())
    return _CAPITAL if doubt else without


def _reinflected_verb(clause: Clause, agreement: Agreement) -> list[Replacement] | Skipped:
    """Return the replacement of the finite verb that the new subject needs, if any, or the reason to skip."""
    sentence, finite = clause.sentence, clause.finite
    word, tag, spans = sentence.words[finite], clause.tags[finite], (clause.first, clause.last)
    old, new = (number_of(sentence.words[slice(*span)], clause.tags[slice(*span)]) for span in spans)
    past = word.lower().endswith("ed") or word.lower() in english.IRREGULAR or word.lower() in _BE
    if tag == "VBD" and new == "3sg" != old and not past and (sentence.automatic or word.lower() in WORDS["syncretic"]):
        return Skipped("the tense of the verb is unknown")  # "I put the hat on"; "two men carve a ham", tagged as past
    if old is not None and not agrees(word, tag, old, old):
        return Skipped("the verb does not agree with its present subject")
    if agrees(word, tag, old, new):
        return []
    if agreement == "skip":
        return Skipped("the verb would not agree with its new subject")
    if new is None:
        return Skipped("the number of the new subject is in doubt")
    form, token = inflect(word, tag, new), next((t for t in sentence.surface_tokens if t[0] == finite), None)
    rest = sentence.surface(finite + 1, token[1]) if token is not None and token[1] > finite + 1 else ""  # the n't
    if form is None or token is None or (form.lower() == "am" and rest):
        return Skipped("the verb cannot be reinflected")
    return [(*token, form + rest, "agreement")]


def agrees(finite: str, tag: str, old: Number | None, new: Number | None) -> bool:
    """Return whether a finite verb that agrees with one subject agrees with another; False if in doubt."""
    word = finite.lower()
    if tag == "MD" or (tag == "VBD" and word not in _BE):
        return True
    return new is not None and (_BE[word][new] == word if word in _BE else (new == "3sg") == (tag == "VBZ"))


def inflect(finite: str, tag: str, number: Number) -> str | None:
    """Return a present-tense verb, or *was* or *were*, inflected for a number by lemminflect; None for other forms."""
    word = finite.lower()
    if word in _BE:
        form = _BE[word][number]
    elif tag in ("VBZ", "VBP") and word.isalpha() and len(word) > 1:  # "they r"
        import lemminflect

        lemmas = lemminflect.getLemma(word, upos="VERB")
        if not lemmas or (tag == "VBP" and word not in lemmas):  # "they knew", tagged as present
            return None
        lemma = lemmas[0] if tag == "VBZ" else word
        forms = lemminflect.getInflection(lemma, tag="VBZ") if number == "3sg" else (lemma,)
        form = next((form for form in forms if number != "3sg" or form.endswith("s")), "")  # "needs", not "need"
    else:
        return None
    case = str.upper if len(finite) > 1 and finite.isupper() else str.capitalize if finite[0].isupper() else str
    return case(form) or None


def number_of(words: Sequence[str], tags: Sequence[str]) -> Number | None:
    """Return the number of a noun phrase as a subject: of *I*, of *he*, or plural (with *you*); None if in doubt."""
    lower = [word.lower() for word in words]
    head = head_of(lower, tags)
    noun, after = lower[head], lower[head + 1 : head + 2]
    if len(words) == 1 and noun in english.PRONOUNS and not tags[0].startswith("NNP"):
        return english.PRONOUNS[noun]
    if "and" in after or "," in after:  # "a man and a dog", but "my friend and guide"
        return "plural" if "or" not in lower and {"DT", "PRP$", "NNP", "NNS"} & {*tags[head + 2 :]} else None
    plural = tags[head] in ("NNS", "NNPS") or noun in WORDS["plurals"]
    counted = not plural and any(word[0].isdigit() and word != "1" for word in lower[:head])  # "4 Golden Killifish"
    vague = noun in WORDS["vague number"] or noun.endswith("ics") or "or" in after or counted
    of_many = after == ["of"] and not plural and any(tag in ("NNS", "NNPS") for tag in tags[head:])  # "a group of dogs"
    if vague or of_many or (not plural and noun.endswith("s") and not noun.endswith(("ss", "us"))):  # "James"
        return None
    return "plural" if plural else "3sg"
