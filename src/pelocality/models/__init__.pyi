from . import families as families
from ._provenance import Provenance as Provenance
from .attachment import Attachment as Attachment, attach as attach, attached as attached
from .auditing import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
    audit as audit,
)
from .callback import (
    LocalityCallback as LocalityCallback,
    encoding_parameters as encoding_parameters,
    trajectory as trajectory,
)
from .decomposition import Decomposition as Decomposition, decompose as decompose
from .distillation import DistillationLoss as DistillationLoss, distillation_loss as distillation_loss
from .eager import eager_attention as eager_attention
from .function import AttentionFunction as AttentionFunction
from .identical_words import positional_attention as positional_attention
from .loading import load as load
from .logits import PositionalLogits as PositionalLogits, positional_logits as positional_logits
from .reflection import reflection_gap as reflection_gap
from .relocation import Relocation as Relocation, relocate as relocate
from .result import (
    AveragedAttention as AveragedAttention,
    PositionalAttention as PositionalAttention,
)
from .share import PositionShare as PositionShare, position_share as position_share
from .text_averages import TextAverage as TextAverage, text_average as text_average
