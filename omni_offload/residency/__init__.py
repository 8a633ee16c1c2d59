"""Where the bytes are: host masters, device copies, and which of the two a module's tensors are bound to."""

from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.host import ByteMeter
from omni_offload.residency.module import Counters, ModuleResidency, recording

__all__ = ["ByteMeter", "Counters", "ModuleResidency", "ResidencyContext", "recording"]
