"""Sentences given by the user, and names of relations."""

from collections.abc import Iterator
from typing import Any

from pelocality.corpora import Sentence

ALL = "all"  # the name of all relations together
NO_TOKENS = -2  # the most attended word of a word without tokens


def checked_sentences(sentences: Any) -> Iterator[Sentence]:
    """Yield the sentences of a corpus, after refusing anything else."""
    for sentence in sentences:
        if not isinstance(sentence, Sentence):
            raise TypeError(f"sentences must hold those of read_conllu or read_frames, got {type(sentence).__name__}")
        yield sentence


def without_subtype(relation: str) -> str:
    """Return a relation without its subtype: ``nsubj`` for ``nsubj:pass``."""
    return relation.split(":")[0]
