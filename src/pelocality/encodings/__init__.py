"""Positional encodings as additive biases, all with one small interface, and attention layers that take them.

``encoding(n)`` is the bias (heads, n, n) that attention adds to its logits, ``encoding.weights(n)`` the attention it
stands for, ``encoding.relative(n)`` its value at every distance. `AttenuatedEncoding` is the paper's, `DistanceTable`
is learned without a formula, and the rest are baselines with published formulas. For one of your own, write
`RelativeEncoding.at`. `PositionalSelfAttention` and `biased_attention` put any of them into a transformer of your own.
"""

from pelocality.encodings.alibi import ALiBi as ALiBi
from pelocality.encodings.attention import biased_attention as biased_attention
from pelocality.encodings.attenuated import AttenuatedEncoding as AttenuatedEncoding
from pelocality.encodings.base import Encoding as Encoding
from pelocality.encodings.buckets import T5Buckets as T5Buckets
from pelocality.encodings.kerple import KERPLE as KERPLE
from pelocality.encodings.layers import PositionalSelfAttention as PositionalSelfAttention
from pelocality.encodings.relative import RelativeEncoding as RelativeEncoding
from pelocality.encodings.simple import (
    FixedWindow as FixedWindow,
    NoEncoding as NoEncoding,
    SinusoidalEncoding as SinusoidalEncoding,
)
from pelocality.encodings.table import DistanceTable as DistanceTable
