"""Numbers from a matrix of positional weights: the published pair, and complementary metrics.

A metric reads attention (..., query, key) whose rows sum to 1, and returns one number per matrix, (...). Attention may
be a tensor, an array, the tuple of attentions that a Hugging Face model returns, or a result of this library. Four
functions return more per matrix: ``distance_profile``, ``profile_asymmetry``, ``monotonicity`` and ``crop``. ``mask=``
leaves padding out. ``positions=`` says where queries and keys lie, if not one after the other on a line.

Without an n x n matrix, ``measure_relative`` returns the same numbers for a relative encoding, and ``measure_absolute``
those of ``measure`` for a table of position embeddings. ``pelocality.metrics.accumulate`` sums over batches and
processes.
"""

from pelocality.metrics.alignment import diagonality as diagonality
from pelocality.metrics.directions import (
    direction_balance as direction_balance,
    relative_asymmetry as relative_asymmetry,
)
from pelocality.metrics.distances import (
    adjusted_locality as adjusted_locality,
    distance_profile as distance_profile,
    half_life as half_life,
    mean_distance as mean_distance,
    past_locality as past_locality,
    profile_asymmetry as profile_asymmetry,
    window as window,
)
from pelocality.metrics.position_tables import position_weights as position_weights
from pelocality.metrics.published import (
    Measurement as Measurement,
    locality as locality,
    measure as measure,
    symmetry as symmetry,
)
from pelocality.metrics.steps import step_balance as step_balance, step_profile as step_profile
from pelocality.metrics.structure import (
    crop as crop,
    entropy as entropy,
    monotonicity as monotonicity,
    sink_rate as sink_rate,
    toeplitz_share as toeplitz_share,
)
from pelocality.metrics.without_matrix import (
    RelativeMeasurement as RelativeMeasurement,
    measure_absolute as measure_absolute,
    measure_relative as measure_relative,
)
