"""Positional encodings as additive biases, all keeping one small protocol.

``encoding(n)`` is the bias (heads, n, n) that attention adds to its logits, ``encoding.weights(n)`` the attention it
stands for, ``encoding.relative(n)`` its value at every distance. `AttenuatedEncoding` is the paper's instrument,
`DistanceTable` the free form that is learned, and the rest are baselines with published formulas. For one of your own,
write `RelativeEncoding.at`. `biased_attention` is PyTorch's attention function with any of them.
"""

from pelocality.encodings.alibi import ALiBi
from pelocality.encodings.attention import biased_attention
from pelocality.encodings.attenuated import AttenuatedEncoding
from pelocality.encodings.buckets import T5Buckets
from pelocality.encodings.kerple import KERPLE
from pelocality.encodings.protocol import Encoding
from pelocality.encodings.relative import RelativeEncoding
from pelocality.encodings.simple import FixedWindow, NoEncoding, SinusoidalEncoding
from pelocality.encodings.table import DistanceTable

__all__ = [
    "KERPLE",
    "ALiBi",
    "AttenuatedEncoding",
    "DistanceTable",
    "Encoding",
    "FixedWindow",
    "NoEncoding",
    "RelativeEncoding",
    "SinusoidalEncoding",
    "T5Buckets",
    "biased_attention",
]
