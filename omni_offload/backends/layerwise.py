"""Layerwise: a selected model's blocks stream through device buffers while the rest of it rotates."""

from typing import Any

from typing_extensions import override

from omni_offload.backends.model_level import ModelLevelOffloadBackend

__all__ = ["LayerwiseOffloadBackend"]


class LayerwiseOffloadBackend(ModelLevelOffloadBackend):
    """Streams blocks. Its configurations resolve; enabling it is not possible yet."""

    @override
    def enable(self, pipeline: Any) -> None:
        """Not there yet.

        Raises:
            NotImplementedError: Always, before anything is touched.
        """
        raise NotImplementedError(f"{self.config.strategy.value} offload cannot be enabled yet; use mode 'module' for {type(pipeline)}")
