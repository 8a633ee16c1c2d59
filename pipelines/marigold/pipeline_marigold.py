"""Marigold pipelines that own their offloading: depth, normals, intrinsics."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from diffusers import MarigoldDepthPipeline, MarigoldIntrinsicsPipeline, MarigoldNormalsPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniMarigoldDepthPipeline", "OmniMarigoldIntrinsicsPipeline", "OmniMarigoldNormalsPipeline"]


def _forgetting_embedding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that keeps no embedding of the empty prompt for the next one.

    Upstream makes it once. It would stay on the device, and the text encoder's adapters and edits would not be in force.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        finally:
            self.empty_text_embedding = None

    return call


class _MarigoldParts(OmniOffloadMixin):
    """The components of a Marigold pipeline. The text encoder runs for an empty prompt."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")}, encoder_block_attrs={"text_encoder": ("encoder.layers",)}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode"), "": ("decode_prediction",)}


class OmniMarigoldDepthPipeline(_MarigoldParts, MarigoldDepthPipeline):
    """`MarigoldDepthPipeline` that owns its offloading."""

    __call__ = _forgetting_embedding(MarigoldDepthPipeline.__call__)


class OmniMarigoldNormalsPipeline(_MarigoldParts, MarigoldNormalsPipeline):
    """`MarigoldNormalsPipeline` that owns its offloading."""

    __call__ = _forgetting_embedding(MarigoldNormalsPipeline.__call__)


class OmniMarigoldIntrinsicsPipeline(_MarigoldParts, MarigoldIntrinsicsPipeline):
    """`MarigoldIntrinsicsPipeline` that owns its offloading."""

    __call__ = _forgetting_embedding(MarigoldIntrinsicsPipeline.__call__)
