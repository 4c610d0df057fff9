"""Word lists and tags of English that the rules of role swaps use.

Every list is short, so that it can be checked by reading; a swap is skipped where the rules are in doubt.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

from pelocality.corpora import Sentence

Number = Literal["1sg", "3sg", "plural"]


def words(text: str) -> frozenset[str]:
    """Return the words of a list."""
    return frozenset(text.split())


ARCHAIC_PRONOUNS = words("thou thee thy thine ye")  # taggers of today's English do not know them
ACCUSATIVE = {"i": "me", "he": "him", "she": "her", "we": "us", "they": "them"}
NOMINATIVE = {"me": "I", "him": "he", "her": "she", "us": "we", "them": "they"}
QUANTIFIED = words("no-one") | {a + b for a in ("some", "any", "every", "no") for b in ("one", "body", "thing")}
PRONOUN_NUMBER: dict[str, Number] = {
    **dict.fromkeys(("i", "me"), "1sg"),
    **dict.fromkeys(("he", "him", "she", "her", "it"), "3sg"),
    **dict.fromkeys(("we", "us", "you", "they", "them"), "plural"),
    **dict.fromkeys(QUANTIFIED, "3sg"),
}
PERSONAL = PRONOUN_NUMBER.keys() - QUANTIFIED
REFLEXIVES = words("myself yourself himself herself itself oneself ourselves yourselves themselves themself own")
RECIPROCALS = frozenset({("each", "other"), ("one", "another")})
WH_WORDS = words("who whom whose which what whoever whomever whatever whichever")
# must follow a negation or a question: "nobody saw anyone", not "anyone saw nobody"
NEGATIVE_POLARITY = words("any anyone anybody anything either neither ever much yet")
ANY = words("any anyone anybody anything")
NEGATIVE_QUANTIFIERS = words("no nobody no-one noone nothing none neither few little only")  # license the words above
OTHERS = words("another other others")
INDEFINITE = words("a an one each some")
FOCUS = words(  # of the phrase after
    "almost nearly only even just not merely mostly especially particularly exactly mainly largely partly chiefly "
    "primarily solely either neither both"
)
FOCUS_AFTER = words("alone too either whatsoever else there here nearby ago apart")  # of the phrase before
PERSONS = (words("i me"), words("we us"), words("you"))
# Levin (1993) 50 and 51.1, verbs of posture and directed motion: a noun phrase after them tells a way or a state
MOTION_VERBS = words(
    "go goes went gone going come comes came coming fall falls fell fallen falling arrive arrives arrived arriving "
    "travel travels travelled traveled travelling traveling sit sits sat sitting stand stands stood standing "
    "lie lies kneel kneels knelt kneeling crouch crouches crouched crouching "
    "live lives lived living"
)
PLACES = words("indoors outdoors inside outside upstairs downstairs downtown abroad overseas home")
POSSESSIVES = words("his her its their hers theirs")
THIRD_PERSON = words("he him she her it they them")
COPULAS = words(
    "be am is are was were been being 's 're 'm become becomes became becoming "
    "seem seems seemed seeming remain remains remained remaining appear appears appeared appearing "
    "stay stays stayed staying constitute constitutes constituted constituting "
    "represent represents represented representing mark marks marked marking"
)
MAKE = words("make makes made making")
# after an object: a goal, a means, a time or a cause of the verb; other prepositions may as well belong to the noun
VERB_LINKS = words("to into onto via because since if unless although though so as until till once after before")
TIME_LINKS = words("when whenever while")
PREPOSITIONS = words(
    "in at on with without before for from about by near under between to as of "
    "past outside inside near down up off over across along through into onto around against behind above below beside "
    "beneath beyond during after until like opposite round toward towards upon via within despite per"
)
AFTER_HEAD = words("IN TO WDT WP WRB MD VBZ VBP VBD")  # tags that cannot precede the head of a noun phrase
MODALS = words("can could may might must shall should will would ca wo 'll 'd")
INVARIABLE = MODALS | {"had", "did"}  # finite, and the same with any subject
PASSIVE_AUXILIARIES = words("be am is are was were been being 's 're 'm get gets got getting")
# with a noun without article the two are one predicate: "took place", "makes sense"
LIGHT_VERBS = MAKE | words(
    "play plays played playing "
    "shake shakes shook shaking take takes took taking taken have has had having give gives gave giving given do does "
    "did doing done get gets got getting pay pays paid paying keep keeps kept keeping lose loses lost losing "
    "catch catches caught catching"
)
DO = words("do does did doing done")  # stands for another predicate: "did a great job", "do the opposite"
AUXILIARIES = INVARIABLE | words("am is are was were 's 're 'm has have does do")
AFTER_AUXILIARY = words("n't not too either also")  # between an auxiliary without a verb and the end of its clause
INVERTING = words("as so than nor neither")  # an auxiliary without a verb may follow, before its subject: "so did Ada"
# verbs that lead down to the verb phrase of the main verb
LEADING_VERBS = AUXILIARIES | PASSIVE_AUXILIARIES | words("having doing done to ought better used going dare need")
# verbs after which a clause has a bare infinitive: "she made him go"
HELPING_VERBS = words(
    "help helps helped helping let lets letting see sees saw seen seeing watch watches watched watching "
    "hear hears heard hearing"
)
# Levin (1993) 10.5, 10.6 and 37.2: "of" after their object is the verb's, "accused the nun of theft"
OF_VERBS = words(
    "accuse suspect acquit convict absolve cure heal rob strip cheat deprive relieve drain empty free rid purge remind "
    "inform notify assure warn advise convince persuade"
)
HAVE = words("have has had having")
BARE_INFINITIVE_VERBS = HELPING_VERBS | MAKE | HAVE
# verbs whose "object" is an amount or a time: "it costs a fortune", "the talk lasts an hour"
MEASURE_VERBS = words(
    "cost costs costing weigh weighs weighed weighing last lasts lasted lasting total totals totaled "
    "measure measures measured measuring number numbers numbered spend spends spent spending"
)
DAYS = words("today tomorrow tonight yesterday everyday anytime sometime")
DEGREES = words("than enough so such too same as more less fewer")  # with a second part: "enough men to start"
MONTHS = words(
    "january february march april may june july august september october november december "
    "jan. feb. mar. apr. jun. jul. aug. sept. sep. oct. nov. dec."
)
MEASURES = (
    MONTHS
    | DAYS
    | words(
        "second sec minute min hour hr day night morning afternoon evening week weekend month year decade century time "
        "monday tuesday wednesday thursday friday saturday sunday mile kilometer meter foot "
        "metre kilometre centimeter centimetre meters % "
        "feet inch pound lb kilo percent block lap way distance dollar cent euro point degree while bit lot"
    )
)
IRREGULAR_PLURALS = words("teeth feet men women children people mice geese lice oxen cattle criteria phenomena alumni")
# "says hello": the object is quoted words, not a patient
QUOTING_VERBS = words(
    "say says said saying talk talks talked talking spell spells spelled spelling think thinks thought thinking guess "
    "wonder mean means"
)
# singular nouns that may take a plural verb: "a couple of men are", "the staff is / are"; and singular nouns in -s
VAGUE_NUMBER = words(
    "couple lot number majority bunch rest half dozen variety pair range most all some none "
    "fish sheep deer series species aircraft police staff crew data media bacteria "
    "news means headquarters corps measles diabetes gas lens bias atlas canvas chaos pancreas"
)
PLURAL_DETERMINERS = words("these those both many several few two three four five six seven eight nine ten")
SINGULAR_DETERMINERS = words("a an this that each every another one")
OTHER_DETERMINERS = words("the my your his her its our their some all most")  # of either number
# words that lose their capital when they leave the start of a sentence, also without tags
LOWER_CASE = words(
    "a an the this that these those my your his her its our their some any no every each both all many "
    "several few most two three four five six seven eight nine ten another he she it we you they"
)
# nations, peoples, languages, religions and parties: they keep their capital, also in the plural and before -man
NATIONS = words(
    "afghan anglo arab argentine aryan asian aussie balkan baptist basque belgian bolshevik breton brit briton "
    "buddhist calvinist catalan catholic celt chinese christian communist copt croat cypriot czech dane democrat "
    "dutch english eskimo filipino finn french gael gentile german greek gypsy hindu hispanic hutu inca iraqi irish "
    "israeli japanese jew kazakh khmer kurd latina latino londoner malay maori marxist methodist mongol mormon "
    "moslem muslim nazi norse pole portuguese protestant quaker quebecer republican saudi scot scots serb shia "
    "shiite sikh slav slovak slovene soviet spaniard sunni swede swiss tajik tamil taoist thai tory turk tutsi "
    "uighur uyghur uzbek welsh western yankee yorker zealander zionist zulu"
)
FLOATING = words("all both each")
PLURAL_ADVERBS = words("together jointly mutually respectively collectively")  # of a clause with a plural subject
# Levin (1993), English Verb Classes and Alternations, 36.2 (marry verbs) and 36.3 (meet verbs), with the verbs of
# likeness, place, company, arrival, passage and parts that hold in both directions, or so nearly that no label changes:
# the road takes you to town, you take the road; the court clears the sale, the sale clears the court; the nuns comprise
# the choir, the choir comprises the nuns
SYMMETRIC_VERBS = words(
    "meet encounter marry wed divorce date equal match resemble parallel border adjoin abut neighbor neighbour "
    "intersect cross overlap fight battle box duel debate wrestle play tie rhyme "
    "hug embrace cuddle snuggle kiss touch face join rival mirror complement oppose contradict comprise compose "
    "take bring drive catch hit reach enter clear pass"
)
SYMMETRIC_BETWEEN_NAMES = words("play")  # "Germany played Brazil", but "Ada played a part"
_IRREGULAR = {"meet": ("met",), "fight": ("fought",), "wed": ("wed",), "tie": ("tying",), "take": ("took", "taken")}
_IRREGULAR |= {"bring": ("brought",), "drive": ("drove", "driven"), "catch": ("caught",)}
# whose past is their base form: "they put me on" may be now or then, "the leash put me on" then only
SYNCRETIC = words("put let cut hit set shut read cost hurt quit spread beat bet split slit shed rid cast burst")


def is_measure(word: str) -> bool:
    """Return whether a noun names a time, a length, a weight or an amount, in the singular or the plural."""
    return word in MEASURES or word.removesuffix("s") in MEASURES


@functools.lru_cache(maxsize=32)
def verb_forms(verbs: frozenset[str]) -> frozenset[str]:
    """Return the forms of verbs, regular ones and the irregular ones of the symmetric verbs; some do not exist.

    Examples:
        >>> sorted(verb_forms(frozenset({"marry"})))
        ['married', 'marries', 'marry', 'marrying', 'marrys']
    """
    forms = set(verbs)
    for verb in verbs:
        stem = verb.removesuffix("e")
        forms |= {verb + "s", stem + "ing", stem + "ed", *_IRREGULAR.get(verb, ())}
        if verb.endswith("y") and verb[-2:-1] not in "aeiou":  # married, but played
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


def tags_of(sentence: Sentence) -> tuple[str, ...] | None:
    """Return the Penn Treebank tags of an English sentence, derived from universal tags and features if necessary.

    None if it has neither. Verbs without features are tagged ``VB?``, any form.
    """
    if sentence.constituents is not None and sentence.constituents.tags is not None:
        return tuple(sentence.constituents.tags)
    layer = sentence.dependencies
    if layer is None or layer.upos is None:
        return None
    features: Sequence[Mapping[str, str]] = layer.features or ({},) * len(sentence.words)
    return tuple(_tag(word, upos, f) for word, upos, f in zip(sentence.words, layer.upos, features, strict=True))


def _tag(word: str, upos: str, known: Mapping[str, str]) -> str:
    if upos in ("NOUN", "PROPN"):
        return ("NNP" if upos == "PROPN" else "NN") + ("S" if known.get("Number") in ("Plur", "Ptan") else "")
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
    if word.lower() in MODALS and features.get("VerbForm", "Fin") == "Fin":
        return "MD"
    form, tense = features.get("VerbForm"), features.get("Tense")
    if form == "Fin":
        third = features.get("Person") == "3" and features.get("Number") == "Sing"
        return "VBD" if tense == "Past" else "VBZ" if third else "VBP"
    if form == "Part":
        return "VBG" if tense == "Pres" or word.endswith("ing") else "VBN"
    return {"Inf": "VB", "Ger": "VBG"}.get(form or "", "VB?")
