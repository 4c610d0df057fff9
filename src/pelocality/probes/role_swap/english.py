"""What an exchange of arguments must know of English: word classes, number, pronoun case, verb forms.

Every list is closed and short, so that it can be read: where a case is in doubt the swap is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Sentence

Number = Literal["1sg", "3sg", "plural"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCUSATIVE = {"i": "me", "he": "him", "she": "her", "we": "us", "they": "them"}
NOMINATIVE = {"me": "I", "him": "he", "her": "she", "us": "we", "them": "they"}
PRONOUN_NUMBER: dict[str, Number] = {
    **dict.fromkeys(("i", "me"), "1sg"),
    **dict.fromkeys(("he", "him", "she", "her", "it"), "3sg"),
    **dict.fromkeys(("we", "us", "you", "they", "them"), "plural"),
    **{quantity + kind: "3sg" for quantity in ("some", "any", "every", "no") for kind in ("one", "body", "thing")},
}
REFLEXIVES = _words("myself yourself himself herself itself oneself ourselves yourselves themselves themself own")
RECIPROCALS = frozenset({("each", "other"), ("one", "another")})
WH_WORDS = _words("who whom whose which what whoever whomever whatever whichever")
# bound to a place after negation or a question: "nobody saw anyone", not "anyone saw nobody"
NEGATIVE_POLARITY = _words("any anyone anybody anything either neither ever")
POSSESSIVES = _words("his her its their hers theirs")
THIRD_PERSON = _words("he him she her it they them")
COPULAS = _words(
    "be am is are was were been being 's 're 'm become becomes became becoming "
    "seem seems seemed seeming remain remains remained remaining appear appears appeared appearing "
    "stay stays stayed staying constitute constitutes constituted constituting"
)
SHAKE = _words("shake shakes shook shaken shaking")  # hands
MAKE = _words("make makes made making")
# "she makes a good doctor" says what she is
JUDGEMENTS = _words("good better great fine excellent perfect wonderful lovely nice poor bad terrible")
# "it rains cats and dogs", "it takes courage": this it refers to nothing
EXPLETIVE_VERBS = _words(
    "rain rains rained raining snow snows snowed snowing hail hails hailed hailing drizzle drizzles drizzled "
    "drizzling pour pours poured pouring take takes took taking taken"
)
CLAUSE_WORDS = _words("to that when if how whether")
# verbs after which a clause has a bare infinitive: "she made him go"
HELPING_VERBS = _words(
    "help helps helped helping let lets letting see sees saw seen seeing watch watches watched watching "
    "hear hears heard hearing"
)
HAVE = _words("have has had having")
BARE_INFINITIVE_VERBS = HELPING_VERBS | MAKE | HAVE
# verbs whose "object" is an amount or a time: "it costs a fortune", "the talk lasts an hour"
MEASURE_VERBS = _words(
    "cost costs costing weigh weighs weighed weighing last lasts lasted lasting total totals totaled "
    "measure measures measured measuring number numbers numbered spend spends spent spending"
)
MEASURES = _words(
    "second minute hour day night morning afternoon evening week weekend month year time today tomorrow "
    "tonight yesterday monday tuesday wednesday thursday friday saturday sunday mile kilometer meter foot "
    "inch pound lb kilo percent block lap way distance dollar while bit lot"
)
# one noun that may count as many: "a couple of men are", "the staff is / are"
IRREGULAR_PLURALS = _words("teeth feet men women children people mice geese")
# "says hello": what stands after it is words, not a patient
QUOTING_VERBS = _words("say says said saying spell spells spelled spelling")
SENSE_VERBS = _words(
    "look looks looked looking sound sounds sounded sounding smell smells smelled taste tastes feel feels felt"
)
# particles that a parser may have taken for one: "walks down the street"
PREPOSITIONAL_PARTICLES = _words("up down along past through over across around by on in off out")
VAGUE_NUMBER = _words(
    "couple lot number majority bunch rest half dozen variety pair range most all some none "
    "fish sheep deer series species aircraft police staff crew data media"
)
# "a group of people holding hands": the people hold them; "a view of a woman holding a drink": no view does
GROUPS = VAGUE_NUMBER | _words("group crowd team bunch pair band line row class family crew gathering")
PLURAL_DETERMINERS = _words("these those both many several few two three four five six seven eight nine ten")
SINGULAR_DETERMINERS = _words("a an this that each every another one")
# words whose capital at the start of a sentence is the sentence's, when no tag says so
LOWER_CASE = _words(
    "a an the this that these those my your his her its our their some any no every each both all many "
    "several few most two three four five six seven eight nine ten another he she it we you they"
)
FLOATING = frozenset({"all", "both", "each"})
BE = {
    "am": "present", "is": "present", "are": "present", "was": "past", "were": "past"
}  # fmt: skip
_BE_FORMS: dict[str, dict[Number, str]] = {
    "present": {"1sg": "am", "3sg": "is", "plural": "are"},
    "past": {"1sg": "was", "3sg": "was", "plural": "were"},
}
# Levin (1993), English Verb Classes and Alternations, 36.2 (marry verbs) and 36.3 (meet verbs), with the verbs of
# likeness, place and company that hold both ways: what A does to B, B does to A, or so nearly that no label changes.
SYMMETRIC_VERBS = _words(
    "meet marry wed divorce date equal match resemble parallel border adjoin abut neighbor neighbour "
    "intersect overlap fight battle duel debate wrestle tie rhyme "
    "hug embrace cuddle kiss touch contact face accompany join"
)
_IRREGULAR = {"meet": ("met",), "fight": ("fought",), "wed": ("wed",), "tie": ("tying",)}


@functools.lru_cache(maxsize=32)
def verb_forms(verbs: frozenset[str]) -> frozenset[str]:
    """List the forms of some regular verbs, and of the irregular ones among the symmetric verbs.

    Args:
        verbs: Base forms.

    Returns:
        All forms they may take in a text; a few that do not exist do no harm.

    Examples:
        >>> sorted(verb_forms(frozenset({"marry"})))
        ['married', 'marries', 'marry', 'marrying', 'marrys']
    """
    forms = set(verbs)
    for verb in verbs:
        stem = verb.removesuffix("e")
        forms |= {verb + "s", stem + "ing", stem + "ed", *_IRREGULAR.get(verb, ())}
        if verb.endswith("y"):
            forms |= {verb[:-1] + "ies", verb[:-1] + "ied"}
            forms.discard(verb + "ed")
        if verb.endswith(("ch", "sh", "s", "x")):
            forms.add(verb + "es")
        if verb[-1] not in "aeiouwxy":  # hugged
            forms |= {verb + verb[-1] + "ed", verb + verb[-1] + "ing"}
    return frozenset(forms)


_UPOS_TAGS = {
    "ADJ": "JJ", "ADP": "IN", "ADV": "RB", "CCONJ": "CC", "DET": "DT", "INTJ": "UH", "NUM": "CD",
    "PRON": "PRP", "SCONJ": "IN", "SYM": "SYM", "X": "FW", "PUNCT": ".", "PART": "RP",
}  # fmt: skip
_MODALS = _words("can could may might must shall should will would ca wo 'll 'd")


def tags_of(sentence: Sentence) -> tuple[str, ...] | None:
    """Give Penn Treebank tags: the sentence's own, or what its universal tags and features say.

    Args:
        sentence: An English sentence.

    Returns:
        A tag per word; None where neither is known. Verbs without features are tagged ``VB?``: any form.
    """
    if sentence.constituents is not None and sentence.constituents.tags is not None:
        return sentence.constituents.tags
    layer = sentence.dependencies
    if layer is None or layer.upos is None:
        return None
    features: Sequence[Mapping[str, str]] = layer.features or ({},) * len(sentence.words)
    return tuple(_tag(word, upos, f) for word, upos, f in zip(sentence.words, layer.upos, features, strict=True))


def _tag(word: str, upos: str, known: Mapping[str, str]) -> str:
    if upos in ("NOUN", "PROPN"):
        return ("NNP" if upos == "PROPN" else "NN") + ("S" if known.get("Number") == "Plur" else "")
    if upos in ("VERB", "AUX"):
        return _verb_tag(word, known)
    if upos == "PART":
        return "TO" if word.lower() == "to" else "POS" if word.startswith(("'", "’")) else "RB"
    if word.lower() in WH_WORDS:
        return "WP"
    if upos == "PRON" and (word.lower() in POSSESSIVES - {"her"} or known.get("Poss") == "Yes"):
        return "PRP$"
    if upos == "PRON" and known.get("PronType") == "Dem":
        return "DT"
    return _UPOS_TAGS.get(upos, upos)


def _verb_tag(word: str, features: Mapping[str, str]) -> str:
    if word.lower() in _MODALS and features.get("VerbForm", "Fin") == "Fin":
        return "MD"
    form, tense = features.get("VerbForm"), features.get("Tense")
    if form == "Fin":
        third = features.get("Person") == "3" and features.get("Number") == "Sing"
        return "VBD" if tense == "Past" else "VBZ" if third else "VBP"
    if form == "Part":
        return "VBG" if tense == "Pres" or word.endswith("ing") else "VBN"
    return {"Inf": "VB", "Ger": "VBG"}.get(form or "", "VB?")


def number_of(words: Sequence[str], tags: Sequence[str] | None) -> Number | None:
    """Say with which verb form a noun phrase agrees as a subject.

    Args:
        words: The words of the phrase.
        tags: Their Penn Treebank tags, where known.

    Returns:
        ``"1sg"``, ``"3sg"`` or ``"plural"`` (with *you*); None where it is in doubt.

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
    if len(words) == 1 and lower[0] in PRONOUN_NUMBER:
        return PRONOUN_NUMBER[lower[0]]
    if tags is None:
        joined = {"and", "or", "nor"} & set(lower)
        if joined or len(words) > 6:
            return None
        singular, plural = lower[0] in SINGULAR_DETERMINERS, lower[0] in PLURAL_DETERMINERS
        return "3sg" if singular else "plural" if plural else None
    head = head_of(words, tags)
    if head is None:
        return None
    if any(tag == "CC" and word != "&" for tag, word in zip(tags[head + 1 :], lower[head + 1 :], strict=True)):
        # "a man and a dog" are many; "the man with a cat and a dog" is in doubt, and so is "a man or a dog"
        return "plural" if head + 1 < len(words) and lower[head + 1] == "and" else None
    if lower[head] in PRONOUN_NUMBER:
        return PRONOUN_NUMBER[lower[head]]
    if lower[head] in VAGUE_NUMBER or not tags[head].startswith("NN"):
        return None
    if is_slip(words, tags):
        return None
    return "plural" if _is_plural(lower[head], tags[head]) else "3sg"


def _is_plural(word: str, tag: str) -> bool:
    return tag in ("NNS", "NNPS") or word in IRREGULAR_PLURALS


def is_slip(words: Sequence[str], tags: Sequence[str]) -> bool:
    """Say whether a determiner does not fit the number of its noun: a slip of the writer or of the tagger.

    Args:
        words: The words of a noun phrase.
        tags: Their Penn Treebank tags.

    Returns:
        True for *two woman*, and for *a marathon talks*, a noun and a verb taken for two nouns.

    Examples:
        >>> is_slip(["a", "marathon", "talks"], ["DT", "NN", "NNS"]), is_slip(["a", "few", "men"], ["DT", "JJ", "NNS"])
        (True, False)
    """
    head = head_of(words, tags)
    if head is None:
        return False
    own = max((k + 1 for k in range(head) if tags[k] == "POS"), default=0)  # "a man's hats"
    determiners = {word.lower() for word in words[own:head]}
    if _is_plural(words[head].lower(), tags[head]):
        return bool(determiners & SINGULAR_DETERMINERS) and not determiners & PLURAL_DETERMINERS - {"both"}
    return bool(determiners & PLURAL_DETERMINERS - {"few"})


def head_of(words: Sequence[str], tags: Sequence[str]) -> int | None:
    """Find the head of a noun phrase: the last of its first run of nouns, or a pronoun.

    Args:
        words: The words of the phrase.
        tags: Their Penn Treebank tags.

    Returns:
        Its index, or None where the phrase has no noun before its first modifier to the right.

    Examples:
        >>> head_of(["the", "man", "'s", "dog", "in", "town"], ["DT", "NN", "POS", "NN", "IN", "NN"])
        3
    """
    head = None
    for i, tag in enumerate(tags):
        if tag.startswith("NN") and words[i].lower() not in PRONOUN_NUMBER:
            head = i
        elif tag == "POS":
            head = None
        elif tag in ("NN", "PRP", "DT") and words[i].lower() in PRONOUN_NUMBER:
            return i if head is None else head
        elif (head is not None and tag not in ("HYPH", "CD")) or tag in (
            "IN",
            "TO",
            "WDT",
            "WP",
            "WRB",
            "MD",
            "VBZ",
            "VBP",
            "VBD",
        ):
            break
    return head


def agrees(finite: str, tag: str | None, old: Number | None, new: Number | None) -> bool:
    """Say whether a verb form that stands with one subject may stand with another.

    Args:
        finite: The finite verb or auxiliary.
        tag: Its Penn Treebank tag, None or ``VB?`` where unknown.
        old: Number of the subject it has.
        new: Number of the subject it would have.

    Returns:
        True where the form fits both; False where it does not, or where that is in doubt.

    Examples:
        >>> agrees("bites", "VBZ", "3sg", "plural"), agrees("bit", "VBD", "3sg", "plural")
        (False, True)
        >>> agrees("was", "VBD", "1sg", "3sg"), agrees("like", "VBP", "1sg", "plural")
        (True, True)
    """
    word = finite.lower()
    if tag in ("MD", "VB", "VBG", "VBN") or (tag == "VBD" and word not in BE):
        return True
    if new is None:
        return False
    if word in BE:
        return _BE_FORMS[BE[word]][new] == word
    if tag == "VBZ":
        return new == "3sg"
    if tag == "VBP":
        return new != "3sg"
    return old is not None and (old == "3sg") == (new == "3sg")


def inflect(finite: str, tag: str | None, number: Number) -> str | None:
    """Put a present-tense verb, or *was* and *were*, into the form a subject asks for, with lemminflect.

    Args:
        finite: The finite verb or auxiliary.
        tag: Its Penn Treebank tag.
        number: Number of its new subject.

    Returns:
        The form, capitalised as it was; None where the form is not one of the present (nothing can be
        said).

    Raises:
        ImportError: Where lemminflect is not installed.

    Examples:
        >>> inflect("Does", "VBZ", "plural"), inflect("watch", "VBP", "3sg"), inflect("WAS", "VBD", "plural")
        ('Do', 'watches', 'WERE')
    """
    word = finite.lower()
    if word in BE:
        form = _BE_FORMS[BE[word]][number]
    elif tag in ("VBZ", "VBP") and word.isalpha():
        try:
            import lemminflect
        except ImportError as error:
            raise ImportError(
                'agreement="reinflect" needs lemminflect: pip install lemminflect, or use agreement="skip"'
            ) from error
        lemmas = lemminflect.getLemma(word, upos="VERB") if tag == "VBZ" else (word,)
        forms = lemminflect.getInflection(lemmas[0], tag="VBZ") if number == "3sg" else lemmas
        if not forms:
            return None
        form = forms[0]
    else:
        return None
    if finite.isupper() and len(finite) > 1:
        return form.upper()
    return form.capitalize() if finite[0].isupper() else form
