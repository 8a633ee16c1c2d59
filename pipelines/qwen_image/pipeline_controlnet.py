"""Qwen-Image pipelines with ControlNets that own their offloading: from text, and into a masked picture."""

import functools
from typing import Any, ClassVar

import attrs
from diffusers import QwenImageControlNetInpaintPipeline, QwenImageControlNetPipeline, QwenImageMultiControlNetModel

from omni_offload import OffloadPlan
from pipelines.qwen_image.parts import BLOCKS, PLAN, QwenImageParts, letting_go

__all__ = ["OmniQwenImageControlNetInpaintPipeline", "OmniQwenImageControlNetPipeline"]


class _ControlNetParts(QwenImageParts):
    """The components of a Qwen-Image pipeline with ControlNets.

    ControlNet and DiT alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other. The VAE encodes the control pictures.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "transformer")]

    controlnet: Any

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        blocks = BLOCKS
        if isinstance(self.controlnet, QwenImageMultiControlNetModel):
            first = {id(net): index for index, net in reversed([*enumerate(self.controlnet.nets)])}
            blocks = tuple(f"nets.{index}.{name}" for index in sorted(first.values()) for name in BLOCKS)
        return attrs.evolve(PLAN, block_attrs={"controlnet": blocks, **PLAN.block_attrs})


class OmniQwenImageControlNetPipeline(_ControlNetParts, QwenImageControlNetPipeline):
    """`QwenImageControlNetPipeline` that owns its offloading, with one ControlNet or several."""

    @functools.wraps(QwenImageControlNetPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageControlNetInpaintPipeline(_ControlNetParts, QwenImageControlNetInpaintPipeline):
    """`QwenImageControlNetInpaintPipeline` that owns its offloading."""

    @functools.wraps(QwenImageControlNetInpaintPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)
