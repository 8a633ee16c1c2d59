"""Distributed layerwise: each rank keeps a shard of every streamed block and gathers it, or streams whole blocks of its own."""

from omni_offload.backends.layerwise import LayerwiseOffloadBackend

__all__ = ["DistributedLayerwiseOffloadBackend"]


class DistributedLayerwiseOffloadBackend(LayerwiseOffloadBackend):
    """Streams blocks over a process group. Its configurations resolve; enabling it is not possible yet."""
