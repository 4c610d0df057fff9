from . import families as families
from .attaching.attach import Attachment as Attachment, attach as attach, attached as attached
from .attaching.loading import load as load
from .attaching.rotation_targets import rotary_from_targets as rotary_from_targets
from .auditing import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
    audit as audit,
)
from .constant_content import (
    identical_patches as identical_patches,
    periodic_series as periodic_series,
    steady_sound as steady_sound,
    steady_spectrum as steady_spectrum,
)
from .function import AttentionFunction as AttentionFunction
from .heads.classes import HeadClasses as HeadClasses, head_classes as head_classes
from .logits.bands import RotaryBands as RotaryBands, rotary_bands as rotary_bands
from .logits.decomposition import Decomposition as Decomposition, decompose as decompose
from .logits.position import PositionalLogits as PositionalLogits, positional_logits as positional_logits
from .measuring.identical_words import positional_attention as positional_attention
from .measuring.influence import Influence as Influence, influence as influence
from .measuring.order_use import OrderUse as OrderUse, order_use as order_use
from .measuring.provenance import Provenance as Provenance
from .measuring.reflection import reflection_gap as reflection_gap
from .measuring.result import (
    AveragedAttention as AveragedAttention,
    AveragedMetrics as AveragedMetrics,
    PositionalAttention as PositionalAttention,
)
from .measuring.rollout import Rollout as Rollout, rollout as rollout
from .measuring.text_averages import TextAverage as TextAverage, text_average as text_average
from .sequence_model import SequenceModel as SequenceModel
from .training.callback import (
    LocalityCallback as LocalityCallback,
    encoding_parameters as encoding_parameters,
    trajectory as trajectory,
)
from .training.distillation import DistillationLoss as DistillationLoss, distillation_loss as distillation_loss
from .training.relocation import Relocation as Relocation, relocate as relocate
