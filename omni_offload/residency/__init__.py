"""Where the bytes are: host masters, device copies, and which of the two a module's tensors are bound to."""

from omni_offload.residency.block import BlockResidency
from omni_offload.residency.context import ResidencyContext
from omni_offload.residency.counters import Counters
from omni_offload.residency.host import ByteMeter
from omni_offload.residency.module import ModuleResidency, recording
from omni_offload.residency.partition import Partition
from omni_offload.residency.slots import Slot, SlotPool

__all__ = [
    "BlockResidency",
    "ByteMeter",
    "Counters",
    "ModuleResidency",
    "Partition",
    "ResidencyContext",
    "Slot",
    "SlotPool",
    "recording",
]
