from . import (
    corpora as corpora,
    encodings as encodings,
    evaluation as evaluation,
    metrics as metrics,
    models as models,
    plots as plots,
    probes as probes,
    reports as reports,
    statistics as statistics,
)
from .corpora import (
    example_data as example_data,
    read_conllu as read_conllu,
    read_frames as read_frames,
    read_pairs as read_pairs,
    read_snli as read_snli,
    read_trees as read_trees,
)
from .encodings import (
    KERPLE as KERPLE,
    ALiBi as ALiBi,
    AttenuatedEncoding as AttenuatedEncoding,
    CoPE as CoPE,
    DisplacementTable as DisplacementTable,
    DistanceTable as DistanceTable,
    FixedWindow as FixedWindow,
    NoEncoding as NoEncoding,
    PositionalSelfAttention as PositionalSelfAttention,
    PositionedEncoding as PositionedEncoding,
    RotaryEncoding as RotaryEncoding,
    SinusoidalEncoding as SinusoidalEncoding,
    T5Buckets as T5Buckets,
    biased_attention as biased_attention,
)
from .evaluation import (
    evaluate as evaluate,
    evaluate_minimal_pairs as evaluate_minimal_pairs,
    evaluate_needles as evaluate_needles,
    log_likelihood as log_likelihood,
    loss_by_position as loss_by_position,
    paper_table as paper_table,
    pseudo_log_likelihood as pseudo_log_likelihood,
)
from .evaluation.dependencies import (
    compare_head_types as compare_head_types,
    dependency_accuracy as dependency_accuracy,
    dependency_distances as dependency_distances,
)
from .metrics import (
    Measurement as Measurement,
    RelativeMeasurement as RelativeMeasurement,
    adjusted_locality as adjusted_locality,
    crop as crop,
    diagonality as diagonality,
    direction_balance as direction_balance,
    distance_profile as distance_profile,
    entropy as entropy,
    half_life as half_life,
    locality as locality,
    mean_distance as mean_distance,
    measure as measure,
    measure_absolute as measure_absolute,
    measure_relative as measure_relative,
    monotonicity as monotonicity,
    past_locality as past_locality,
    position_weights as position_weights,
    profile_asymmetry as profile_asymmetry,
    relative_asymmetry as relative_asymmetry,
    sink_rate as sink_rate,
    step_balance as step_balance,
    step_profile as step_profile,
    symmetry as symmetry,
    toeplitz_share as toeplitz_share,
    window as window,
)
from .metrics.accumulate import MeanAttention as MeanAttention, MeanOver as MeanOver
from .metrics.tables import to_frame as to_frame
from .models import (
    Attachment as Attachment,
    LocalityCallback as LocalityCallback,
    PositionalAttention as PositionalAttention,
    SequenceModel as SequenceModel,
    attach as attach,
    attached as attached,
    audit as audit,
    decompose as decompose,
    head_classes as head_classes,
    influence as influence,
    load as load,
    order_use as order_use,
    positional_attention as positional_attention,
    positional_logits as positional_logits,
    reflection_gap as reflection_gap,
    rollout as rollout,
    rotary_bands as rotary_bands,
    rotary_from_targets as rotary_from_targets,
    text_average as text_average,
)
from .positions import Positions as Positions
from .probes import (
    constituency_shuffling as constituency_shuffling,
    minimal_pairs as minimal_pairs,
    needle_items as needle_items,
    probe_info as probe_info,
    random_shuffling as random_shuffling,
    semantic_role_swap as semantic_role_swap,
    window_shuffling as window_shuffling,
)
from .reports import compare_models as compare_models, report as report

__version__: str
