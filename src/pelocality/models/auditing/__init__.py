"""Which positions a model really runs: declared by its configuration against measured.

``measured`` runs the model, and ``checks`` compares each layer with what the record of its family, in
``models/families``, declares.
"""

from pelocality.models.auditing.audits import audit as audit
from pelocality.models.auditing.result import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
)
