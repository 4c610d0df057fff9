"""Files and datasets to sentences and trees: readers, each lazy, each with line numbers in its errors."""

from pelocality.corpora.corpus import Corpus
from pelocality.corpora.pairs import plain_sentence, read_pairs, read_snli
from pelocality.corpora.parsers import SpacyParser, StanzaParser
from pelocality.corpora.treebanks import read_conllu, read_frames, read_trees

__all__ = [
    "Corpus",
    "SpacyParser",
    "StanzaParser",
    "plain_sentence",
    "read_conllu",
    "read_frames",
    "read_pairs",
    "read_snli",
    "read_trees",
]
