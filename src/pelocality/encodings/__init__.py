"""Positional encodings as additive biases, and attention layers that use them.

``encoding(n)`` returns the bias (heads, n, n) that attention adds to its logits, ``encoding.weights(n)`` the positional
attention, and ``encoding.relative(n)`` its logits by distance. `AttenuatedEncoding` is the encoding of the paper,
`DistanceTable` is a learned bias, and the others are baselines with published formulas. `PositionedEncoding` and
`DisplacementTable` are for positions that are no line, such as a grid of patches. `RotaryEncoding` and `CoPE`
need queries and keys, as each `ContentEncoding` does. For a custom encoding, implement `RelativeEncoding.at`.
`PositionalSelfAttention` and `biased_attention` use any of them in your own transformer.
"""

from pelocality.encodings.alibi import ALiBi as ALiBi
from pelocality.encodings.at_positions import (
    DisplacementTable as DisplacementTable,
    PositionedEncoding as PositionedEncoding,
)
from pelocality.encodings.attention_function import biased_attention as biased_attention
from pelocality.encodings.attention_module import PositionalSelfAttention as PositionalSelfAttention
from pelocality.encodings.attenuated import AttenuatedEncoding as AttenuatedEncoding
from pelocality.encodings.base import Encoding as Encoding
from pelocality.encodings.base_content import ContentEncoding as ContentEncoding
from pelocality.encodings.base_relative import RelativeEncoding as RelativeEncoding
from pelocality.encodings.buckets import T5Buckets as T5Buckets
from pelocality.encodings.cope import CoPE as CoPE
from pelocality.encodings.distance_table import DistanceTable as DistanceTable
from pelocality.encodings.fixed import (
    FixedWindow as FixedWindow,
    NoEncoding as NoEncoding,
    SinusoidalEncoding as SinusoidalEncoding,
)
from pelocality.encodings.kerple import KERPLE as KERPLE
from pelocality.encodings.rotary import RotaryEncoding as RotaryEncoding
