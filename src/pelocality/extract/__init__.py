"""From a Hugging Face model to its positional matrices, logits and their parts.

- ``positional_attention``: the attention of one repeated word, averaged over words.
- ``positional_logits``: the position-only logits, in closed form where the family has one.
- ``decompose``: the logits of real text as content, position and the two cross terms.
- ``position_share``: how much of each head's attention on real text position explains.
- ``eager_attention``: a model that returns its weights for the while, and comes back as it was.
"""

from pelocality.extract.decomposition import Decomposition, decompose
from pelocality.extract.eager import eager_attention
from pelocality.extract.identical import positional_attention
from pelocality.extract.logits import PositionalLogits, positional_logits
from pelocality.extract.result import PositionalAttention, Provenance
from pelocality.extract.share import PositionShare, position_share

__all__ = [
    "Decomposition",
    "PositionShare",
    "PositionalAttention",
    "PositionalLogits",
    "Provenance",
    "decompose",
    "eager_attention",
    "position_share",
    "positional_attention",
    "positional_logits",
]
