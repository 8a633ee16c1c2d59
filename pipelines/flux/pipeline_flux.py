"""Flux pipelines that own their offloading: from text, from a picture, into a masked picture, and editing a picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)

from pipelines.flux.parts import ENTRY_POINTS, TEXT_ENTRY_POINTS, FluxParts, FluxTextParts

__all__ = [
    "OmniFluxFillPipeline",
    "OmniFluxImg2ImgPipeline",
    "OmniFluxInpaintPipeline",
    "OmniFluxKontextInpaintPipeline",
    "OmniFluxKontextPipeline",
    "OmniFluxPipeline",
]


class OmniFluxPipeline(FluxParts, FluxPipeline):
    """`FluxPipeline` that owns its offloading; the VAE's decoder runs last, and its encoder never."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxImg2ImgPipeline(FluxParts, FluxImg2ImgPipeline):
    """`FluxImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxKontextPipeline(FluxParts, FluxKontextPipeline):
    """`FluxKontextPipeline` that owns its offloading; the VAE runs before the DiT too, where there is a picture to edit."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxInpaintPipeline(FluxParts, FluxInpaintPipeline):
    """`FluxInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxKontextInpaintPipeline(FluxParts, FluxKontextInpaintPipeline):
    """`FluxKontextInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxFillPipeline(FluxTextParts, FluxFillPipeline):
    """`FluxFillPipeline` that owns its offloading; the DiT sees mask and masked picture, which the VAE encodes before it."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = TEXT_ENTRY_POINTS
