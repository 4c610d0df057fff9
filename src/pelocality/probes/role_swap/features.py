"""Other languages than English: two arguments may change places where no marked feature tells their roles."""

from collections.abc import Mapping

from pelocality.corpora import Dependencies, Sentence, is_punctuation
from pelocality.probes.role_swap.clauses import Candidate, Span

_AGREEMENT = (("Number", None), ("Person", "3"), ("Gender", None))  # features of a verb, and their value if unmarked


def reason_by_features(sentence: Sentence, candidate: Candidate, agreement: str) -> str | None:
    """Return the reason why two arguments cannot be exchanged, None if no feature speaks against it."""
    layer, verb, spans = sentence.dependencies, candidate.verb, candidate.arguments
    if any(is_punctuation(word) for span in spans for word in sentence.words[slice(*span)]):
        return "an argument is not a plain noun phrase"
    if layer is None or verb is None:
        return None
    if any(layer.relations[child].endswith(":lvc") for child in layer.children[verb]):
        return "a light verb with a noun"
    features = layer.features or ({},) * len(layer.heads)
    if any(features[i].get("Reflex") == "Yes" or features[i].get("PronType") == "Rcp" for i in layer.subtree(verb)):
        return "a reflexive or reciprocal in the clause"
    if any(tag in features[start].get("PronType", "") for start, _ in spans for tag in ("Int", "Rel")):
        return "an argument is interrogative or relative"
    # Every word counts: articles and adjectives have the case of their noun.
    first, second = ({features[i]["Case"] for i in range(*span) if "Case" in features[i]} for span in spans)
    if first != second:
        return "the arguments have different cases"
    nouns = (i for i, upos in enumerate(layer.upos or ()) if upos in ("NOUN", "PROPN"))
    if not first and any("Case" in features[i] for i in nouns):
        return "the case of the arguments is unknown"
    # The verb, an auxiliary, a participle of a passive or a verb with the same subject marks these.
    verbs = [verb, *(k for k in layer.children[verb] if layer.relations[k].split(":")[0] in ("aux", "conj"))]
    finite = [i for i in verbs if features[i].get("VerbForm") in (None, "Fin") or candidate.voice == "passive"]
    marked = {name for i in finite for name in features[i]}
    old, new = (agreement_features(layer, features, span) for span in spans)
    differs = any(name in marked and old.get(name, default) != new.get(name, default) for name, default in _AGREEMENT)
    return "the verb would not agree with its new subject" if differs and agreement != "ignore" else None


def agreement_features(layer: Dependencies, features: tuple[Mapping[str, str], ...], span: Span) -> Mapping[str, str]:
    """Return the features of the head of an argument, plural if another word is coordinated with it."""
    head = next((i for i in range(*span) if not span[0] < layer.heads[i] <= span[1]), span[1] - 1)
    joined = any(layer.heads[i] == head + 1 and layer.relations[i].startswith("conj") for i in range(*span))
    return {**features[head], "Number": "Plur"} if joined else features[head]


def keeps_capital(sentence: Sentence, word: int) -> bool | None:
    """Return whether a word keeps the capital that it has at the start of a sentence, None if that is unknown."""
    upos = sentence.dependencies.upos if sentence.dependencies is not None else None
    return None if upos is None else upos[word] == "PROPN" or (sentence.language == "de" and upos[word] == "NOUN")
