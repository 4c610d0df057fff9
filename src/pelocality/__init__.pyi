from . import (
    accumulate as accumulate,
    architectures as architectures,
    attachment as attachment,
    corpora as corpora,
    dependencies as dependencies,
    encodings as encodings,
    evaluation as evaluation,
    extract as extract,
    layers as layers,
    metrics as metrics,
    plots as plots,
    probes as probes,
    reflection as reflection,
    streaming as streaming,
    tables as tables,
    training as training,
    trees as trees,
)
from .attachment import Attachment as Attachment, attach as attach, attached as attached, load as load
from .corpora import (
    read_conllu as read_conllu,
    read_frames as read_frames,
    read_pairs as read_pairs,
    read_snli as read_snli,
    read_trees as read_trees,
)
from .dependencies import (
    compare_head_kinds as compare_head_kinds,
    dependency_accuracy as dependency_accuracy,
    dependency_distances as dependency_distances,
)
from .encodings import (
    KERPLE as KERPLE,
    ALiBi as ALiBi,
    AttenuatedEncoding as AttenuatedEncoding,
    DistanceTable as DistanceTable,
    FixedWindow as FixedWindow,
    NoEncoding as NoEncoding,
    SinusoidalEncoding as SinusoidalEncoding,
    T5Buckets as T5Buckets,
    biased_attention as biased_attention,
)
from .evaluation import (
    evaluate as evaluate,
    evaluate_minimal_pairs as evaluate_minimal_pairs,
    log_likelihood as log_likelihood,
    paper_table as paper_table,
    pseudo_log_likelihood as pseudo_log_likelihood,
)
from .extract import (
    PositionalAttention as PositionalAttention,
    decompose as decompose,
    position_share as position_share,
    positional_attention as positional_attention,
    positional_logits as positional_logits,
)
from .layers import PositionalSelfAttention as PositionalSelfAttention
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
from .probes import (
    constituency_shuffling as constituency_shuffling,
    minimal_pairs as minimal_pairs,
    probe_info as probe_info,
    random_shuffling as random_shuffling,
    semantic_role_swap as semantic_role_swap,
    window_shuffling as window_shuffling,
)
from .reflection import reflection_gap as reflection_gap
from .streaming import measure_absolute as measure_absolute, measure_relative as measure_relative
from .tables import position_weights as position_weights
from .training import LocalityCallback as LocalityCallback

__version__: str
