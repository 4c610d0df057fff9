"""Word lists of English for role swaps, and the Penn Treebank tags of a tree."""

import functools
import re
from collections.abc import Mapping
from typing import Literal

from pelocality.corpora import Sentence

Number = Literal["1sg", "3sg", "plural"]


def words(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


_VOICELESS = str.maketrans("vzc", "fss")  # live and life, choose and choice
# An irregular verb stands before its other forms; "is seeing the judge" means dating.
_VERBS = """be am is are was were been, bear bore borne, become became, begin began begun, bite bit bitten, bleed
    bled, blow blew blown, break broke broken, bring brought, build built, buy bought, catch caught, choose chose
    chosen, come came, date seeing, deal dealt, do does did done, draw drew drawn, dream dreamt, drink drank drunk,
    drive drove driven, eat ate eaten, fall fell fallen, feed fed, feel felt, fight fought, find found, fly flew
    flown, forget forgot forgotten, forgive forgave forgiven, freeze froze frozen, get got gotten, give gave given, go
    went gone, grow grew grown, have has had, hear heard, hide hid hidden, hold held, keep kept, kneel knelt, know
    knew known, lay laid, lead led, leave left, lend lent, lie lay lain, lose lost, make made, mean meant, meet met,
    pay paid, ride rode ridden, rise rose risen, run ran, say said, see saw seen, sell sold, send sent, shake shook
    shaken, shoot shot, sing sang sung, sit sat, sleep slept, speak spoke spoken, spend spent, stand stood, steal
    stole stolen, strike struck, swear swore sworn, take took taken, teach taught, tell told, think thought, throw
    threw thrown, understand understood, wake woke woken, wear wore worn, weep wept, win won, write wrote written"""
IRREGULAR = {form: base for base, *forms in map(str.split, _VERBS.split(",")) for form in forms}


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
INDEFINITE = words("someone somebody something everyone everybody everything")
PRONOUNS: dict[str, Number] = {"i": "1sg", "me": "1sg", **dict.fromkeys(("we", "us", "you", "they", "them"), "plural"),
                               **dict.fromkeys(("he", "him", "she", "her", "it", *INDEFINITE), "3sg")}  # fmt: skip
PERSONAL = PRONOUNS.keys() - INDEFINITE
THIRD_PERSON = words("he him she her it they them his hers its their theirs")
SAME_PERSON = (words("i me"), words("we us"), words("you"))
# Reflexives and reciprocals, in words with a space between
MUTUAL = re.compile(r"(?<!\S)(?:(?:my|your|him|her|it|one|our|them)sel(?:f|ves)|own|each other|one another)(?!\S)")
# These are words of degree, whose second part may stand elsewhere, and words that a negation licenses.
BOUND = words("neither much only enough such same more less fewer than so too as least others another thee thou ye")
ANY = words("any anyone anybody anything ever yet either")
NEGATIVE = words("no nobody no-one noone nothing none few little")
# Before or after a noun phrase, these may belong to it: "almost every nun", "the nun alone", "the nuns all saw Ada".
BEFORE = words("""almost nearly only even just not merely mostly especially particularly exactly mainly largely
    partly primarily solely either neither both about roughly approximately half quite rather such dare dared""")
AFTER = words("""all both each alone too either together jointly mutually respectively collectively whatsoever else
    there here nearby below above ago apart indoors outdoors upstairs abroad""")
DIRECTION = re.compile(r"(?!(?:a|re|co|ste|to)?wards?$)\w+wards?|sideways|\w+wise")  # "backwards", but "rewards"
BESIDE = (BEFORE | AFTER) - {"not"}  # "the nun alone saw Ada", "the nun only saw Ada"
DEFINITE = words("the this that these those")
DETERMINERS = words("""a an the this that these those each every another some all no both many several few my your
    his her its our their one two three four five six seven eight nine ten""")
_AUXILIARIES = {"MD": "can could may might must shall should will would ca wo cannot 'll 'd", "VBP": "am are have do",
    "VBZ": "is has does", "VBD": "was were had did", "VBG": "being having", "VBN": "been", "VB": "be"}  # fmt: skip
AUXILIARIES = {word: tag for tag, listed in _AUXILIARIES.items() for word in words(listed)}
VERB_GROUP = frozenset({"MD", "VBD", "VBP", "VBZ", "VB", "VBN", "VBG", "RB"})
# The form of these verbs may have any tense.
SYNCRETIC = words("put let cut hit set shut hurt quit spread beat bet split shed rid cast burst read cost")
COPULAS = words("be become seem remain appear stay constitute represent mark act")
# An indefinite noun after these is a predicate: "felt a fool", "proved a success".
PREDICATIVE = words("feel prove taste smell emerge")
# The object of these is an amount, a time, a place, a way, a state or quoted words, and not a patient.
MEASURING = words("""cost weigh last total measure number average spend go come fall arrive travel sit stand lie
    kneel live rise decline say talk spell think guess wonder mean die look sound read wait pause sleep""")
# With any indefinite noun, with a bare one, with a bare singular, they make one predicate: "gave a speech", "shook
# hands", "laid siege".
LIGHT = words("make take give pay")
LIGHTER = LIGHT | words("have get keep lose play shake catch hold run set")
LIGHTEST = LIGHTER | words("lay draw bear cast lend strike break shed wage declare raise turn return")
# After their object may stand a predicate: "sees the pictures flicker", "found this news helpful".
SMALL_CLAUSES = LIGHTER | words("""see hear watch feel notice let help find consider call want leave think believe
    name elect appoint""")
# Levin (1993) 36.2 and 36.3, and verbs that hold, or nearly hold, in both directions
SYMMETRIC_VERBS = words("""meet encounter marry wed divorce date equal match resemble parallel border adjoin abut
    neighbor neighbour intersect cross overlap fight battle box duel debate wrestle play tie rhyme hug embrace
    cuddle snuggle kiss touch face join rival mirror complement oppose contradict comprise compose enter clear pass
    reach hit""")
TIMES = words("yesterday today tomorrow tonight again once twice now then later soon still")
# These name a time, a length, a weight or an amount.
MEASURE = re.compile(r"""(?x) (?: \w*(?:(?<!th)(?<!li)day|(?<!k)night|week|month|year|time) | (?:kilo)?gram |
    (?:kilo|centi|milli)?met(?:er|re) | sec(?:ond)?|min(?:ute)?|hour|hr|moment|instant|spell|while|eternity|morning|
    afternoon|evening|weekend|season|decade|centur(?:y|i)|january|february|march|april|may|june|july|august|september|
    october|november|december|tomorrow|mile|k?m|[cm]m|[km]g|lb|pace|step|foot|feet|inch|yard|pound|ounce|ton|percent|%|
    dollar|cent|euro|point|degree|bit|lot|deal|block|lap|way|half|distance|dozen|average|amount|home )(?:e?s)?""")
# After "by", these say how something is done, and not who does it.
MEANS = words("method assay analysis technique mean use procedure approach way process mail email phone hand force")
PLURALS = words("teeth men women children people mice geese lice oxen cattle criteria phenomena alumni police")
# Whether a verb after them is singular or plural is in doubt.
VAGUE_NUMBER = words("""couple lot number majority bunch rest half dozen variety pair range most all some none group
    series species fish sheep deer aircraft staff crew data media team family committee audience public government
    news means headquarters""")
# Taggers mistake the capital of these at the start of a sentence for that of a name.
ABSTRACT = re.compile(r"""(?x) \w{2,}(?:[gnst]ion|ness|(?:i|er|al|es)ty|ment|dom|ship|hood|ism|[^r][ae]nce|ency) | art|
    (?:fai|dea|heal|weal|you|tru|streng|wra)th|love|hate|hope|fear|beauty|life|peace|war|justice|nature|power|money|fate|
    luck|pride|envy|anger|grief|time|pain""")
# Nations, religions and parties, as adjectives and as nouns of people
NATION = re.compile(r"""(?x) \w*(?:an|i)s? | \w*(?:ese|ish|ch|ic)(?:men)? | gyps(?:y|ies) | (?:arab|dutch|greek|scot|
    swiss|turk|welsh|jew|muslim|hindu|protestant|catholic|democrat|soviet|dane|pole|swede|brit(?:on)?|serb|czech|slovak|
    kurd)(?:s|men)?""")
_WH = words("who whom whose which what whoever whomever whatever whichever")
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
    if features.get("PronType") in ("Int", "Rel") or word in _WH:
        return "WRB" if upos == "ADV" else "WP"
    if upos in ("PRON", "DET") and (features.get("Poss") == "Yes" or word in ("his", "its", "their")):
        return "PRP$"
    tag = "DT" if upos == "PRON" and word in DETERMINERS else "," if word == "," else _UPOS_TAGS.get(upos, upos)
    return tag + "S" if tag[:2] == "NN" and features.get("Number") in ("Plur", "Ptan") else tag
