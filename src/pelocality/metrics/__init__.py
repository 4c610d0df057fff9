"""Numbers from a positional weight matrix: the published pair, and companions that say what the pair cannot.

Every function takes attention (..., query, key) whose rows sum to 1 (a tensor, an array, the tuple of attentions a
Hugging Face model returns, or a result of ours) and gives one number per matrix, (...). ``mask=`` leaves padding out.
"""

from pelocality.metrics.directions import direction_balance, relative_asymmetry
from pelocality.metrics.distances import (
    adjusted_locality,
    distance_profile,
    half_life,
    mean_distance,
    past_locality,
    profile_asymmetry,
    window,
)
from pelocality.metrics.door import crop
from pelocality.metrics.published import Measurement, locality, measure, symmetry
from pelocality.metrics.structure import entropy, monotonicity, sink_rate, toeplitz_share

__all__ = [
    "Measurement",
    "adjusted_locality",
    "crop",
    "direction_balance",
    "distance_profile",
    "entropy",
    "half_life",
    "locality",
    "mean_distance",
    "measure",
    "monotonicity",
    "past_locality",
    "profile_asymmetry",
    "relative_asymmetry",
    "sink_rate",
    "symmetry",
    "toeplitz_share",
    "window",
]
