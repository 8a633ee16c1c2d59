"""The contract kit: what a pipeline that owns its offload must keep, as checks that run without a GPU.

    from omni_offload.testing import PipelineCase, check_pipeline

    report = check_pipeline(PipelineCase(name="mine", make_pipeline=..., make_inputs=..., outputs=...))
    print(report)
    report.raise_for_failures()

Importing it imports no pytest and builds nothing.
"""

from omni_offload.testing.audit import AuditReport, Finding, HostRead, audit_pipeline
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.case import PipelineCase
from omni_offload.testing.frontends import PipelineContractTests, parametrize_with_checks
from omni_offload.testing.report import CheckReport, CheckResult, Outcome
from omni_offload.testing.runner import all_checks, check_pipeline

__all__ = [
    "AuditReport",
    "Bench",
    "CheckReport",
    "CheckResult",
    "Finding",
    "HostRead",
    "NotRun",
    "Outcome",
    "PipelineCase",
    "PipelineContractTests",
    "all_checks",
    "audit_pipeline",
    "check_pipeline",
    "parametrize_with_checks",
]
