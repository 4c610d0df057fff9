from . import (
    accumulate as accumulate,
    extract as extract,
    metrics as metrics,
    plots as plots,
    streaming as streaming,
    tables as tables,
)
from .extract import (
    PositionalAttention as PositionalAttention,
    decompose as decompose,
    position_share as position_share,
    positional_attention as positional_attention,
    positional_logits as positional_logits,
)
from .metrics import (
    Measurement as Measurement,
    adjusted_locality as adjusted_locality,
    crop as crop,
    direction_balance as direction_balance,
    distance_profile as distance_profile,
    entropy as entropy,
    half_life as half_life,
    locality as locality,
    mean_distance as mean_distance,
    measure as measure,
    monotonicity as monotonicity,
    past_locality as past_locality,
    profile_asymmetry as profile_asymmetry,
    relative_asymmetry as relative_asymmetry,
    sink_rate as sink_rate,
    symmetry as symmetry,
    toeplitz_share as toeplitz_share,
    window as window,
)
from .streaming import measure_absolute as measure_absolute, measure_relative as measure_relative
from .tables import position_weights as position_weights

__version__: str
