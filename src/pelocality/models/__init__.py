"""Hugging Face models: what their positions do, and encodings attached to them.

Measured:

- ``positional_attention``: the attention of one repeated word, averaged over words.
- ``text_average``: the mean attention over texts, for any model.
- ``AttentionFunction``: the attention of anyone's model, for both of these and for ``position_share``.
- ``positional_logits``: the position-only logits, in closed form where the family has one.
- ``decompose``: the logits of real text as content, position and the two cross terms.
- ``position_share``: how much of each head's attention on real text position explains.
- ``reflection_gap``: whether a model can distinguish a sequence from its reversal.
- ``audit``: which positions a model really runs, declared by its configuration against measured.
- ``LocalityCallback``: locality, symmetry and their complements of every layer while a model trains.

Changed: ``attach(model, encoding)`` adds the encoding's bias to the attention logits of every layer until it is
removed; ``load`` brings a saved one back; ``relocate`` trains a copy with it to do what the model did.
"""

from pelocality.models.attachment import Attachment as Attachment, attach as attach, attached as attached
from pelocality.models.auditing import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
    audit as audit,
)
from pelocality.models.callback import (
    LocalityCallback as LocalityCallback,
    encoding_parameters as encoding_parameters,
    trajectory as trajectory,
)
from pelocality.models.decomposition import Decomposition as Decomposition, decompose as decompose
from pelocality.models.eager import eager_attention as eager_attention
from pelocality.models.function import AttentionFunction as AttentionFunction
from pelocality.models.identical_words import positional_attention as positional_attention
from pelocality.models.loading import load as load
from pelocality.models.logits import PositionalLogits as PositionalLogits, positional_logits as positional_logits
from pelocality.models.reflection import reflection_gap as reflection_gap
from pelocality.models.relocation import (
    Relocation as Relocation,
    distillation_loss as distillation_loss,
    relocate as relocate,
)
from pelocality.models.result import (
    AveragedAttention as AveragedAttention,
    PositionalAttention as PositionalAttention,
    Provenance as Provenance,
)
from pelocality.models.share import PositionShare as PositionShare, position_share as position_share
from pelocality.models.text_average import TextAverage as TextAverage, text_average as text_average
