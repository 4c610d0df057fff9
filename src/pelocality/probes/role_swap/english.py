"""Word lists of English for role swaps, and the Penn Treebank tags of a tree."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pelocality.corpora import Sentence

Number = Literal["1sg", "3sg", "plural"]


def words(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


_VOICELESS = str.maketrans("vzc", "fss")  # live and life, choose and choice
_FILES = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("english.txt", "persons.txt"))
_TEXTS = dict(re.findall(r"(?m)^([\w ]+): ((?:.+\n)+)", "\n".join(_FILES)))  # by name, without comments
WORDS = {name: words(text) for name, text in _TEXTS.items()}
IRREGULAR = {form: base for base, *forms in map(str.split, _TEXTS["irregular"].split(",")) for form in forms}


@functools.lru_cache(maxsize=4096)
def stem(word: str) -> str:
    """Return the stem of a word in small letters, the same for all regular forms."""
    from nltk.stem.snowball import EnglishStemmer

    return str(EnglishStemmer().stem(word))


@functools.lru_cache(maxsize=32)
def stems(verbs: frozenset[str]) -> frozenset[str]:
    """Return the stems of the base forms of verbs."""
    return frozenset(map(stem, verbs))


def base(form: str) -> str:
    """Return the stem of a verb in any form."""
    return stem(IRREGULAR.get(form, form))


def are_cognate(verb: str, noun: str) -> bool:
    """Return whether a noun is derived from a verb, perhaps with another vowel: *sing a song*, *die a death*."""
    one, other = (re.sub(r"[aeiouyw]|(.)(?=\1)", "", base(word).translate(_VOICELESS)) for word in (verb, noun))
    return base(verb) == base(noun) or (len(one) > 1 and one == other) or other in (one + "th", one + "ght")


ACCUSATIVE = {"i": "me", "he": "him", "she": "her", "we": "us", "they": "them"}
NOMINATIVE = {"me": "I", "him": "he", "her": "she", "us": "we", "them": "they"}
PRONOUNS: dict[str, Number] = dict.fromkeys(("we", "us", "you", "they", "them"), "plural")
PRONOUNS.update(dict.fromkeys(("he", "him", "she", "her", "it", *WORDS["indefinite"]), "3sg"), i="1sg", me="1sg")
PERSONAL = PRONOUNS.keys() - WORDS["indefinite"]
SAME_PERSON = (words("i me"), words("we us"), words("you"))
# Reflexives and reciprocals, in words with a space between
MUTUAL = re.compile(r"(?<!\S)(?:(?:my|your|him|her|it|one|our|them)sel(?:f|ves)|own|each other|one another)(?!\S)")
DIRECTION = re.compile(r"(?!(?:a|re|co|ste|to)?wards?$)\w+wards?|sideways|\w+wise")  # "backwards", but "rewards"
BESIDE = (WORDS["before"] | WORDS["after"]) - {"not"}  # "the nun alone saw Ada", "the nun only saw Ada"
AUXILIARIES = {word: tag for tag in ("MD", "VBP", "VBZ", "VBD", "VBG", "VBN", "VB") for word in WORDS[tag]}
VERB_GROUP = frozenset({"MD", "VBD", "VBP", "VBZ", "VB", "VBN", "VBG", "RB"})
SYMMETRIC_VERBS = WORDS["symmetric"]
# These name a time, a length, a weight or an amount.
MEASURE = re.compile(r"""(?x) (?: \w*(?:(?<!th)(?<!li)day|(?<!k)night|week|month|year|time) | (?:kilo)?gram |
    (?:kilo|centi|milli)?met(?:er|re) | sec(?:ond)?|min(?:ute)?|hour|hr|moment|instant|spell|while|eternity|morning|
    afternoon|evening|weekend|season|decade|centur(?:y|i)|january|february|march|april|may|june|july|august|september|
    october|november|december|tomorrow|mile|k?m|[cm]m|[km]g|lb|pace|step|foot|feet|inch|yard|pound|ounce|ton|percent|%|
    dollar|cent|euro|point|degree|bit|lot|deal|block|lap|way|half|distance|dozen|average|amount|home )(?:e?s)?""")
# Taggers mistake the capital of these at the start of a sentence for that of a name.
ABSTRACT = re.compile(r"""(?x) \w{2,}(?:[gnst]ion|ness|(?:i|er|al|es)ty|ment|dom|ship|hood|ism|[^r][ae]nce|ency) | art|
    (?:fai|dea|heal|weal|you|tru|streng|wra)th|love|hate|hope|fear|beauty|life|peace|war|justice|nature|power|money|fate|
    luck|pride|envy|anger|grief|time|pain""")
# Nations, religions and parties, as adjectives and as nouns of people
NATION = re.compile(r"""(?x) \w*(?:an|i)s? | \w*(?:ese|ish|ch|ic)(?:men)? | gyps(?:y|ies) | (?:arab|dutch|greek|scot|
    swiss|turk|welsh|jew|muslim|hindu|protestant|catholic|democrat|soviet|dane|pole|swede|brit(?:on)?|serb|czech|slovak|
    kurd)(?:s|men)?""")
_UPOS_TAGS = {"ADJ": "JJ", "ADP": "IN", "ADV": "RB", "CCONJ": "CC", "DET": "DT", "INTJ": "UH", "NUM": "CD",
              "PRON": "PRP", "SCONJ": "IN", "PUNCT": ".", "PROPN": "NNP", "NOUN": "NN"}  # fmt: skip


def lowered(sentence: Sentence) -> list[str]:
    """Return the words of a sentence in small letters, with plain apostrophes."""
    return [word.lower().replace("’", "'") for word in sentence.words]


def tags_of(sentence: Sentence) -> tuple[str, ...] | None:
    """Return the Penn Treebank tags of a sentence, made of universal tags and features if necessary; None without."""
    if sentence.constituents is not None and sentence.constituents.tags is not None:
        return tuple(sentence.constituents.tags)
    layer = sentence.dependencies
    if layer is None or layer.upos is None:
        return None
    features = layer.features or ({},) * len(layer.upos)
    verbs = [i for i, upos in enumerate(layer.upos) if upos in ("VERB", "AUX")]
    without_form = [i for i in verbs if "VerbForm" not in features[i]]
    if without_form and layer.xpos is not None and not VERB_GROUP.isdisjoint(layer.xpos[i] for i in verbs):
        return tuple(tag.replace("JJR", "JJ") for tag in layer.xpos)  # as comparatives are tagged below
    return None if verbs and without_form == verbs else tuple(map(_tag, lowered(sentence), layer.upos, features))


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
    if features.get("PronType") in ("Int", "Rel") or word in WORDS["interrogative"]:
        return "WRB" if upos == "ADV" else "WP"
    if upos in ("PRON", "DET") and (features.get("Poss") == "Yes" or word in ("his", "its", "their")):
        return "PRP$"
    tag = "," if word == "," else _UPOS_TAGS.get(upos, upos)
    tag = "DT" if upos == "PRON" and word in WORDS["determiners"] else tag
    return tag + "S" if tag[:2] == "NN" and features.get("Number") in ("Plur", "Ptan") else tag
