"""`OmniStableDiffusionControlNetPipeline`: Stable Diffusion with one ControlNet or several."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import MultiControlNetModel, StableDiffusionControlNetPipeline

from omni_offload import OffloadPlan
from pipelines.stable_diffusion.parts import ENTRY_POINTS, PLAN, StableDiffusionParts

__all__ = ["OmniStableDiffusionControlNetPipeline"]

_CONTROL_BLOCKS = ("down_blocks", "mid_block")


class OmniStableDiffusionControlNetPipeline(StableDiffusionParts, StableDiffusionControlNetPipeline):
    """`StableDiffusionControlNetPipeline` that owns its offloading.

    ControlNet and UNet alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "unet"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "unet")]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        blocks: tuple[str, ...] = _CONTROL_BLOCKS
        if isinstance(self.controlnet, MultiControlNetModel):
            first = {id(net): index for index, net in reversed([*enumerate(self.controlnet.nets)])}
            blocks = tuple(f"nets.{index}.{name}" for index in sorted(first.values()) for name in _CONTROL_BLOCKS)
        return attrs.evolve(PLAN, block_attrs={"controlnet": blocks, **PLAN.block_attrs})
