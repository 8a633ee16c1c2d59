"""Flux pipelines whose DiT sees a control picture, and that own their offloading: from text, from a picture, into a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import FluxControlImg2ImgPipeline, FluxControlInpaintPipeline, FluxControlPipeline

from pipelines.flux.parts import TEXT_ENTRY_POINTS, FluxTextParts

__all__ = ["OmniFluxControlImg2ImgPipeline", "OmniFluxControlInpaintPipeline", "OmniFluxControlPipeline"]


class OmniFluxControlPipeline(FluxTextParts, FluxControlPipeline):
    """`FluxControlPipeline` that owns its offloading; the VAE encodes the control picture before the DiT runs."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS


class OmniFluxControlImg2ImgPipeline(FluxTextParts, FluxControlImg2ImgPipeline):
    """`FluxControlImg2ImgPipeline` that owns its offloading; the VAE encodes both pictures before the DiT runs."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS


class OmniFluxControlInpaintPipeline(FluxTextParts, FluxControlInpaintPipeline):
    """`FluxControlInpaintPipeline` that owns its offloading; the VAE encodes all pictures before the DiT runs."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS
