"""Sentences and trees, the one data model of probes and evaluation, and the readers that make them from files.

Readers are lazy, and their errors name the file and the line.
"""

from pelocality.corpora.constituents import (
    category as category,
    dependency_constituents as dependency_constituents,
    parse_bracketed as parse_bracketed,
    phrases as phrases,
)
from pelocality.corpora.corpus import Corpus as Corpus, example_data as example_data
from pelocality.corpora.pairs import (
    plain_sentence as plain_sentence,
    read_pairs as read_pairs,
    read_snli as read_snli,
    read_texts as read_texts,
)
from pelocality.corpora.parsers import SpacyParser as SpacyParser, StanzaParser as StanzaParser
from pelocality.corpora.propbank import read_propbank as read_propbank
from pelocality.corpora.sentence import (
    Argument as Argument,
    Constituent as Constituent,
    Constituents as Constituents,
    Dependencies as Dependencies,
    Dropped as Dropped,
    Frame as Frame,
    Pair as Pair,
    Sentence as Sentence,
)
from pelocality.corpora.spacing import (
    align as align,
    is_punctuation as is_punctuation,
    join as join,
    spaces_by_rule as spaces_by_rule,
    unescape as unescape,
)
from pelocality.corpora.treebanks import (
    read_conllu as read_conllu,
    read_frames as read_frames,
    read_trees as read_trees,
)
