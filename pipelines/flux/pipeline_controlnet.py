"""`OmniFluxControlNetPipeline`: Flux with one ControlNet or several."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import FluxControlNetPipeline, FluxMultiControlNetModel

from omni_offload import OffloadPlan
from pipelines.flux.parts import BLOCKS, ENCODERS, ENTRY_POINTS, PLAN, FluxParts

__all__ = ["OmniFluxControlNetPipeline"]


class OmniFluxControlNetPipeline(FluxParts, FluxControlNetPipeline):
    """`FluxControlNetPipeline` that owns its offloading.

    ControlNet and DiT alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other. The VAE encodes the control picture, unless the ControlNet does it itself.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS, ("controlnet", "transformer")]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        blocks = BLOCKS
        if isinstance(self.controlnet, FluxMultiControlNetModel):
            first = {id(net): index for index, net in reversed([*enumerate(self.controlnet.nets)])}
            blocks = tuple(f"nets.{index}.{name}" for index in sorted(first.values()) for name in BLOCKS)
        return attrs.evolve(PLAN, block_attrs={"controlnet": blocks, **PLAN.block_attrs})
