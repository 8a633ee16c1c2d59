"""The audit: one call, and what the declarations of its pipeline miss."""

from omni_offload.testing.audit.declared import Declarations, Item
from omni_offload.testing.audit.report import AuditReport, Finding, HostRead
from omni_offload.testing.audit.run import audit_pipeline

__all__ = ["AuditReport", "Declarations", "Finding", "HostRead", "Item", "audit_pipeline"]
