"""Which modules are meant, and what is done with each."""

from omni_offload.plan.model import PlannedComponent, ResolvedOffloadPlan, Treatment
from omni_offload.plan.resolver import resolve_again, resolve_offload_plan, streamed_parameters
from omni_offload.plan.streamed import parameters_of, streamed_blocks
from omni_offload.plan.weights import weight_bytes

__all__ = [
    "PlannedComponent",
    "ResolvedOffloadPlan",
    "Treatment",
    "parameters_of",
    "resolve_again",
    "resolve_offload_plan",
    "streamed_blocks",
    "streamed_parameters",
    "weight_bytes",
]
