"""Who moves weights, and when."""

from omni_offload.backends.base import OffloadBackend, backend_of, manage
from omni_offload.backends.distributed_layerwise import DistributedLayerwiseOffloadBackend
from omni_offload.backends.layerwise import LayerwiseOffloadBackend
from omni_offload.backends.model_level import ENGINE_MARK, ModelLevelOffloadBackend, is_asked, owns_its_offload

__all__ = [
    "ENGINE_MARK",
    "DistributedLayerwiseOffloadBackend",
    "LayerwiseOffloadBackend",
    "ModelLevelOffloadBackend",
    "OffloadBackend",
    "backend_of",
    "is_asked",
    "manage",
    "owns_its_offload",
]
