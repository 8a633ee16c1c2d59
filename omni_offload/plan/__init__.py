"""Which modules are meant, and what is done with each."""

from omni_offload.plan.model import PlannedComponent, ResolvedOffloadPlan, Treatment

__all__ = ["PlannedComponent", "ResolvedOffloadPlan", "Treatment"]
