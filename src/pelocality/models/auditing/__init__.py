"""Which positions a model really runs: declared by its configuration against measured.

``audit`` runs a model as ``measured`` says, and lists what ``checks`` finds where that is not what the family's record
in ``models/families`` declares; ``rotations`` has the angles of queries and keys.
"""

from pelocality.models.auditing.audits import audit as audit
from pelocality.models.auditing.result import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
)
