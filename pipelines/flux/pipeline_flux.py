"""Flux pipelines that own their offloading: from text, from a picture, and editing a picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import FluxImg2ImgPipeline, FluxKontextPipeline, FluxPipeline

from pipelines.flux.parts import ENTRY_POINTS, FluxParts

__all__ = ["OmniFluxImg2ImgPipeline", "OmniFluxKontextPipeline", "OmniFluxPipeline"]


class OmniFluxPipeline(FluxParts, FluxPipeline):
    """`FluxPipeline` that owns its offloading; the VAE's decoder runs last, and its encoder never."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxImg2ImgPipeline(FluxParts, FluxImg2ImgPipeline):
    """`FluxImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniFluxKontextPipeline(FluxParts, FluxKontextPipeline):
    """`FluxKontextPipeline` that owns its offloading; the VAE runs before the DiT too, where there is a picture to edit."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
