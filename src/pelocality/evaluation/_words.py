"""Scores of words, added up from those of their tokens, and the regions of a sentence from which words were moved."""

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

Reduction = Literal["sum", "mean"]
Scored = tuple[int, int, float]  # the first character of a token, the character after its last, and its score


def reduced(scores: Sequence[float], reduction: str) -> float:
    """Return the sum or the mean of the scores of tokens, NaN without any."""
    return math.fsum(scores) / (len(scores) if reduction == "mean" else 1) if scores else math.nan


def words_of(
    text: str, tokens: Iterable[Scored], reduction: str = "sum", regions: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a row for each word of a text, with the scores of the tokens that begin in it or in the space before it.

    With the region of each character, a word is cut where another region begins within it.
    """
    pieces: list[tuple[int, int]] = []
    for match in re.finditer(r"\S+", text):
        edges = [k for k in range(*match.span()) if k == match.start() or (regions and regions[k] != regions[k - 1])]
        pieces += itertools.pairwise([*edges, match.end()])
    pieces = pieces or [(0, len(text))]
    ends = [end for _, end in pieces]
    scores: list[list[float]] = [[] for _ in pieces]
    for start, end, score in tokens:
        first = end - len(text[start:end].lstrip())
        scores[min(bisect.bisect_right(ends, first), len(ends) - 1)].append(score)
    for (start, end), own in zip(pieces, scores, strict=True):
        region = {"region": regions[start]} if regions else {}
        about = {"word": text[start:end], "start": start, "end": end, "tokens": len(own)}
        yield about | region | {"score": reduced(own, reduction)}


def regions_of(good: str, bad: str, spans: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the region of each character of both sentences of a pair, which are equal except for the spans.

    Raises:
        ValueError: They are not.
    """
    spans = sorted(spans, key=lambda span: span["start"])
    original = "".join(f"(?P<g{k}>.*?){re.escape(span['original'])}" for k, span in enumerate(spans)) + "(?P<end>.*)"
    changed = "".join(f"(?P=g{k}){re.escape(span['perturbed'])}" for k, span in enumerate(spans)) + "(?P=end)"
    match = re.fullmatch(f"{original}\0{changed}", f"{good}\0{bad}", re.DOTALL)
    if match is None:
        raise ValueError(f"spans must be those of the two sentences, got {spans} of {good!r} and {bad!r}")
    # A verb that is inflected anew did not move: it belongs to what stands around it.
    moved = [k for k, span in enumerate(spans) if span["category"] != "agreement"]
    regions: tuple[list[str], list[str]] = ([], [])
    for k, gap in enumerate(match.groups()):
        around = "before" if k <= moved[0] else "behind" if k > moved[-1] else "between"
        region = f"phrase {moved.index(k) + 1}" if k in moved else around
        for side, version in zip(regions, ("original", "perturbed"), strict=True):
            side += [around] * len(gap) + [region] * sum(len(span[version]) for span in spans[k : k + 1])
    return regions
