"""Sentences and trees: the one data model of the probes."""

from pelocality.trees.constituents import category, dependency_constituents, parse_bracketed, phrases
from pelocality.trees.sentence import (
    Argument,
    Constituent,
    Constituents,
    Dependencies,
    Dropped,
    Frame,
    Pair,
    Records,
    Sentence,
)
from pelocality.trees.spacing import align, is_punctuation, join, spaces_by_rule, unescape

__all__ = [
    "Argument",
    "Constituent",
    "Constituents",
    "Dependencies",
    "Dropped",
    "Frame",
    "Pair",
    "Records",
    "Sentence",
    "align",
    "category",
    "dependency_constituents",
    "is_punctuation",
    "join",
    "parse_bracketed",
    "phrases",
    "spaces_by_rule",
    "unescape",
]
