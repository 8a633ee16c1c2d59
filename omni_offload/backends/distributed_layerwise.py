"""Distributed layerwise: each rank keeps a shard of every streamed block and gathers it, or streams whole blocks of its own."""

from typing import Any

from typing_extensions import override

from omni_offload.backends.layerwise import LayerwiseOffloadBackend

__all__ = ["DistributedLayerwiseOffloadBackend"]


class DistributedLayerwiseOffloadBackend(LayerwiseOffloadBackend):
    """Streams blocks over a process group. Its configurations resolve; enabling it is not possible yet."""

    @override
    def enable(self, pipeline: Any) -> None:
        """Not there yet.

        Raises:
            NotImplementedError: Always, before anything is touched.
        """
        raise NotImplementedError(f"{self.config.strategy.value} offload cannot be enabled yet; use mode 'layer' for {type(pipeline)}")
