"""Which positions a model really runs: declared by its configuration against measured.

``audit`` puts together what ``measured`` reads from the running model and ``declared`` from its configuration;
``comparison`` compares the two and has the words for both, ``rotations`` the angles of queries and keys.
"""

from pelocality.models.auditing.audits import audit as audit
from pelocality.models.auditing.result import (
    Audit as Audit,
    AuditComparison as AuditComparison,
    LayerAudit as LayerAudit,
)
