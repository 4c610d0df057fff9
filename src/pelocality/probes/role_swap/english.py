"""Word lists of English for role swaps, and the Penn Treebank tags of a tree."""

import functools
from collections.abc import Mapping
from typing import Literal

from pelocality.corpora import Sentence

Number = Literal["1sg", "3sg", "plural"]


def words(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


@functools.lru_cache(maxsize=32)
def verb_forms(verbs: frozenset[str], irregular: str = "") -> frozenset[str]:
    """Return the forms of verbs, some of which do not exist, and irregular ones."""
    forms = {*verbs, *irregular.split()}
    for verb in verbs:
        stem = verb.removesuffix("e")
        forms |= {verb + "s", verb + "es", stem + "ing", stem + "ed"}
        if verb.endswith("y"):  # married, but played
            forms |= {verb[:-1] + "ies", verb[:-1] + "ied"}
        if verb[-1] not in "aeiouwxy":  # hugged
            forms |= {verb + verb[-1] + "ed", verb + verb[-1] + "ing"}
    return frozenset(forms)


def _forms(verbs: str, irregular: str = "") -> frozenset[str]:
    return verb_forms(words(verbs), irregular)


ACCUSATIVE = {"i": "me", "he": "him", "she": "her", "we": "us", "they": "them"}
NOMINATIVE = {"me": "I", "him": "he", "her": "she", "us": "we", "them": "they"}
INDEFINITE = words("someone somebody something everyone everybody everything")
PRONOUNS: dict[str, Number] = {
    **dict.fromkeys(("i", "me"), "1sg"),
    **dict.fromkeys(("he", "him", "she", "her", "it", *INDEFINITE), "3sg"),
    **dict.fromkeys(("we", "us", "you", "they", "them"), "plural"),
}
PERSONAL = PRONOUNS.keys() - INDEFINITE
THIRD_PERSON = words("he him she her it they them his hers its their theirs")
SAME_PERSON = (words("i me"), words("we us"), words("you"))
REFLEXIVES = words("myself yourself himself herself itself oneself ourselves yourselves themselves themself own")
# These are words of degree, whose second part may stand elsewhere, and words that a negation licenses.
BOUND = words("neither much only enough such same more less fewer than so too as least others another thee thou ye")
ANY = words("any anyone anybody anything ever yet either")
NEGATIVE = words("no nobody no-one noone nothing none few little")
# Before or after a noun phrase, these may belong to it: "almost every nun", "the nun alone", "the nuns all saw Ada".
BEFORE = words(
    "almost nearly only even just not merely mostly especially particularly exactly mainly largely partly primarily "
    "solely either neither both about roughly approximately half quite rather such dare dared"
)
AFTER = words(
    "all both each alone too either together jointly mutually respectively collectively whatsoever else there here "
    "nearby below above ago apart indoors outdoors upstairs abroad"
)
BESIDE = (BEFORE | AFTER) - {"not"}  # "the nun alone saw Ada", "the nun only saw Ada"
DEFINITE = words("the this that these those")
DETERMINERS = words(
    "a an the this that these those each every another some all no both many several few my your his her its our their "
    "one two three four five six seven eight nine ten"
)
HAVE, DO = words("have has had having"), words("do does did doing done")
PASSIVE = words("be am is are was were been being get gets got getting")
_AUXILIARIES = {
    "MD": "can could may might must shall should will would ca wo cannot 'll 'd", "VBP": "am are have do",
    "VBZ": "is has does", "VBD": "was were had did", "VBG": "being having", "VBN": "been", "VB": "be",
}  # fmt: skip
AUXILIARIES = {word: tag for tag, listed in _AUXILIARIES.items() for word in words(listed)}
VERB_GROUP = frozenset({"MD", "VBD", "VBP", "VBZ", "VB", "VBN", "VBG", "RB"})
# The form of these verbs may have any tense.
SYNCRETIC = words("put let cut hit set shut hurt quit spread beat bet split shed rid cast burst read cost")
# These are pasts and participles that do not end in -ed.
PASTS = words(
    "ate eaten began begun bit bitten blew blown broke broken brought built bought caught chose chosen came dealt "
    "drew drawn drank drunk drove driven fell fallen fed felt fought found forgot forgotten forgave forgiven froze "
    "frozen got gotten gave given went gone had heard hid hidden held kept knew known laid led left lent lost made "
    "meant met paid rode ridden ran said saw seen sold sent shook shaken shot sang sung sat spoke spoken spent "
    "stood stole stolen struck took taken taught told thought threw thrown understood woke woken wore worn won "
    "wrote written became"
)
COPULAS = _forms("become seem remain appear stay constitute represent mark", "became be am is are was were been being")
# The object of these is an amount, a time, a place, a way, a state or quoted words, and not a patient.
MEASURING = _forms(
    "cost weigh last total measure number average spend go come fall arrive travel sit stand lie kneel live rise "
    "decline say talk spell think guess wonder mean die look sound read",
    "spent went gone came fell fallen sat stood lay lain dying lying rose risen said thought meant",
)
# With a bare noun, and the first four with any indefinite one, they make one predicate: "took place", "gave a speech".
LIGHT = _forms("make take give pay", "made took taken gave given paid")
LIGHTER = (
    LIGHT | HAVE | _forms("get keep lose play shake catch hold run set", "got gotten kept lost shook caught held ran")
)
# After their object may stand a predicate: "sees the pictures flicker", "found this news helpful".
SMALL_CLAUSES = LIGHTER | _forms(
    "see hear watch feel notice let help find consider call want leave think believe name elect appoint",
    "saw seen heard felt found left thought",
)
# Levin (1993) 36.2 and 36.3, and verbs that hold, or nearly hold, in both directions
SYMMETRIC_VERBS = words(
    "meet encounter marry wed divorce date equal match resemble parallel border adjoin abut neighbor neighbour "
    "intersect cross overlap fight battle box duel debate wrestle play tie rhyme hug embrace cuddle snuggle kiss "
    "touch face join rival mirror complement oppose contradict comprise compose enter clear pass reach hit"
)
SYMMETRIC_IRREGULAR = "met fought wed tying seeing"  # "is seeing the judge"
TIMES = words("yesterday today tomorrow tonight again once twice now then later soon still")
_MEASURES = words(
    "second sec minute min hour hr day night morning afternoon evening week weekend month year decade century time "
    "monday tuesday wednesday thursday friday saturday sunday january february march april may june july august "
    "september october november december yesterday today tomorrow tonight everyday mile kilometer kilometre km meter "
    "metre m pace step centimeter cm mm foot feet inch yard pound lb ounce gram kg mg ton percent % dollar cent euro "
    "point degree while bit lot deal block lap way distance half dozen average amount home"
)
# After "by", these say how something is done, and not who does it.
MEANS = words(
    "method assay analysis technique mean means use procedure approach way process mail email phone hand force"
)
PLURALS = words("teeth men women children people mice geese lice oxen cattle criteria phenomena alumni police")
# Whether a verb after them is singular or plural is in doubt.
VAGUE_NUMBER = words(
    "couple lot number majority bunch rest half dozen variety pair range most all some none group series species "
    "fish sheep deer aircraft staff crew data media team family committee audience public government news means "
    "headquarters"
)
# These nations, religions and parties do not end as most of them do.
_NATIONS = words("arab dutch english french german greek scot swiss turk welsh jew muslim hindu catholic protestant "
                 "democrat soviet dane pole swede briton brit serb czech slovak kurd gypsy")  # fmt: skip
_WH = words("who whom whose which what whoever whomever whatever whichever")
_UPOS_TAGS = {
    "ADJ": "JJ", "ADP": "IN", "ADV": "RB", "CCONJ": "CC", "DET": "DT", "INTJ": "UH", "NUM": "CD",
    "PRON": "PRP", "SCONJ": "IN", "PUNCT": ".", "PROPN": "NNP", "NOUN": "NN",
}  # fmt: skip


def lowered(sentence: Sentence) -> list[str]:
    """Return the words of a sentence in small letters, with plain apostrophes."""
    return [word.lower().replace("’", "'") for word in sentence.words]


def is_measure(word: str) -> bool:
    """Return whether a noun names a time, a length, a weight or an amount, in the singular or the plural."""
    return not _MEASURES.isdisjoint((word, word.removesuffix("s"), word.removesuffix("es")))


def may_be_nation(word: str, tag: str) -> bool:
    """Return whether a word in small letters is a nation or religion, or ends as many of them do."""
    stem = next((word.removesuffix(end) for end in ("men", "s") if word.endswith(end)), word)
    endings = ("an", "i", "ese") if tag == "NNS" else ("an", "ese", "ish", "i", "ch", "ic")
    return stem.endswith(endings) or not _NATIONS.isdisjoint({word, stem, word.removesuffix("ies") + "y"})


def has_gold_tags(sentence: Sentence) -> bool:
    """Return whether the tags of a sentence are those of a treebank."""
    return tags_of(sentence) is not None and not sentence.automatic


def tags_of(sentence: Sentence) -> tuple[str, ...] | None:
    """Return the Penn Treebank tags of a sentence, made of universal tags and features if necessary; None without."""
    if sentence.constituents is not None and sentence.constituents.tags is not None:
        return tuple(sentence.constituents.tags)
    layer = sentence.dependencies
    if layer is None or layer.upos is None or layer.features is None:
        return None
    return tuple(map(_tag, lowered(sentence), layer.upos, layer.features))


def _tag(word: str, upos: str, features: Mapping[str, str]) -> str:
    form, tense = features.get("VerbForm"), features.get("Tense")
    if upos in ("VERB", "AUX"):
        if form is None or (form == "Fin" and AUXILIARIES.get(word) == "MD"):
            return AUXILIARIES.get(word, "VERB")
        if form == "Fin":
            third = features.get("Person", "3") == "3" and features.get("Number") == "Sing"
            return "VBD" if tense == "Past" else "VBZ" if third else "VBP"
        return {"Inf": "VB", "Ger": "VBG"}.get(form) or ("VBG" if tense == "Pres" or word.endswith("ing") else "VBN")
    if upos == "PART":
        return "TO" if word == "to" else "POS" if word.startswith("'") else "RB"
    if features.get("PronType") in ("Int", "Rel") or word in _WH:
        return "WRB" if upos == "ADV" else "WP"
    if upos in ("PRON", "DET") and (features.get("Poss") == "Yes" or word in ("his", "its", "their")):
        return "PRP$"
    tag = "DT" if upos == "PRON" and word in DETERMINERS else "," if word == "," else _UPOS_TAGS.get(upos, upos)
    return tag + "S" if tag[:2] == "NN" and features.get("Number") in ("Plur", "Ptan") else tag
