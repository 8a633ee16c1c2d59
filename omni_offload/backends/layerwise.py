"""Layerwise: a selected model's blocks stream through device buffers while the rest of it rotates."""

import functools
from typing import Any

from typing_extensions import override

from omni_offload.backends.block_hooks import block_hooks
from omni_offload.backends.entry import EntryHooks
from omni_offload.backends.model_level import ModelLevelOffloadBackend
from omni_offload.backends.rotation import Rotation

__all__ = ["LayerwiseOffloadBackend"]


class LayerwiseOffloadBackend(ModelLevelOffloadBackend):
    """Streams the blocks of the components that the plan says stream; everything else rotates, as at model level.

    A pipeline that drives its model-level offload itself is managed here like any other.
    """

    @override
    def _delegates(self, pipeline: Any) -> bool:
        return False

    @override
    def _make_hooks(self, rotation: Rotation, pipeline: Any) -> EntryHooks:
        return EntryHooks(rotation, pipeline, functools.partial(block_hooks, rotation))
