"""Z-Image pipelines with a ControlNet that own their offloading: from text, and into a masked picture."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import ZImageControlNetInpaintPipeline, ZImageControlNetPipeline

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS
from pipelines.z_image.parts import BLOCKS, ENCODER_BLOCKS, ZImageParts, positions_of_a_call

__all__ = ["OmniZImageControlNetInpaintPipeline", "OmniZImageControlNetPipeline"]


class _ControlNetParts(ZImageParts):
    """The components of a Z-Image pipeline with a ControlNet.

    ControlNet and DiT alternate in every step, so that they are on the device together. The ControlNet runs the DiT's refiners
    as its own: they are the same modules. The VAE encodes the control picture.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "transformer")]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"controlnet": ("control_layers",), "transformer": BLOCKS}, encoder_block_attrs=ENCODER_BLOCKS
    )


class OmniZImageControlNetPipeline(_ControlNetParts, ZImageControlNetPipeline):
    """`ZImageControlNetPipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS

    @functools.wraps(ZImageControlNetPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with positions of its own."""
        with positions_of_a_call(self.transformer):
            return super().__call__(*args, **kwargs)


class OmniZImageControlNetInpaintPipeline(_ControlNetParts, ZImageControlNetInpaintPipeline):
    """`ZImageControlNetInpaintPipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS

    @functools.wraps(ZImageControlNetInpaintPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with positions of its own."""
        with positions_of_a_call(self.transformer):
            return super().__call__(*args, **kwargs)
