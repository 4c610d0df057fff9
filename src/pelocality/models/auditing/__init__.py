"""Which positions a model really runs: declared by its configuration against measured.

``audit`` puts together what ``measured`` read from the running model and what ``declared`` says of its configuration;
``agreement`` has the comparisons and their words, ``rotations`` the angles of queries and keys.
"""

from pelocality.models.auditing.audit import audit as audit
from pelocality.models.auditing.result import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
)
