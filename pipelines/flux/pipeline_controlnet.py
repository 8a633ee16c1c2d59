"""Flux pipelines with one ControlNet or several that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import FluxControlNetImg2ImgPipeline, FluxControlNetInpaintPipeline, FluxControlNetPipeline

from omni_offload import OffloadPlan
from pipelines.flux.parts import BLOCKS, ENCODERS, ENTRY_POINTS, PLAN, FluxTextParts
from pipelines.parts import with_controlnet

__all__ = ["OmniFluxControlNetImg2ImgPipeline", "OmniFluxControlNetInpaintPipeline", "OmniFluxControlNetPipeline"]


class _ControlNetParts(FluxTextParts):
    """The components of a Flux pipeline with ControlNets.

    ControlNet and DiT alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other. The VAE encodes the control picture, unless the ControlNet does it itself.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS, ("controlnet", "transformer")]

    controlnet: Any

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        return with_controlnet(PLAN, self.controlnet, *BLOCKS)


class OmniFluxControlNetPipeline(_ControlNetParts, FluxControlNetPipeline):
    """`FluxControlNetPipeline` that owns its offloading; `image_encoder` is there for image prompts only."""

    _encoder_modules: ClassVar[list[str]] = [*ENCODERS, "image_encoder"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxControlNetImg2ImgPipeline(_ControlNetParts, FluxControlNetImg2ImgPipeline):
    """`FluxControlNetImg2ImgPipeline` that owns its offloading; the VAE encodes both pictures before the DiT runs."""


class OmniFluxControlNetInpaintPipeline(_ControlNetParts, FluxControlNetInpaintPipeline):
    """`FluxControlNetInpaintPipeline` that owns its offloading; the VAE encodes all pictures before the DiT runs."""
