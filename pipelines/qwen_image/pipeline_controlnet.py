"""Qwen-Image pipelines with ControlNets that own their offloading: from text, and into a masked picture."""

from typing import Any, ClassVar

from diffusers import QwenImageControlNetInpaintPipeline, QwenImageControlNetPipeline

from omni_offload import OffloadPlan
from pipelines.parts import with_controlnet
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
        return with_controlnet(PLAN, self.controlnet, *BLOCKS)


class OmniQwenImageControlNetPipeline(_ControlNetParts, QwenImageControlNetPipeline):
    """`QwenImageControlNetPipeline` that owns its offloading, with one ControlNet or several."""

    __call__ = letting_go(QwenImageControlNetPipeline.__call__)


class OmniQwenImageControlNetInpaintPipeline(_ControlNetParts, QwenImageControlNetInpaintPipeline):
    """`QwenImageControlNetInpaintPipeline` that owns its offloading."""

    __call__ = letting_go(QwenImageControlNetInpaintPipeline.__call__)
