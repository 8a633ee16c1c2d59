"""Flux pipelines that own their offloading: from text, from a picture, into a masked picture, and editing a picture."""

from diffusers import (
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)

from pipelines.flux.parts import FluxParts, FluxTextParts

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


class OmniFluxImg2ImgPipeline(FluxParts, FluxImg2ImgPipeline):
    """`FluxImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""


class OmniFluxKontextPipeline(FluxParts, FluxKontextPipeline):
    """`FluxKontextPipeline` that owns its offloading; the VAE runs before the DiT too, where there is a picture to edit."""


class OmniFluxInpaintPipeline(FluxParts, FluxInpaintPipeline):
    """`FluxInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""


class OmniFluxKontextInpaintPipeline(FluxParts, FluxKontextInpaintPipeline):
    """`FluxKontextInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""


class OmniFluxFillPipeline(FluxTextParts, FluxFillPipeline):
    """`FluxFillPipeline` that owns its offloading; the DiT sees mask and masked picture, which the VAE encodes before it."""
