"""Flux pipelines whose DiT sees a control picture, and that own their offloading: from text, from a picture, into a masked picture."""

from diffusers import FluxControlImg2ImgPipeline, FluxControlInpaintPipeline, FluxControlPipeline

from pipelines.flux.parts import FluxTextParts

__all__ = ["OmniFluxControlImg2ImgPipeline", "OmniFluxControlInpaintPipeline", "OmniFluxControlPipeline"]


class OmniFluxControlPipeline(FluxTextParts, FluxControlPipeline):
    """`FluxControlPipeline` that owns its offloading; the VAE encodes the control picture before the DiT runs."""


class OmniFluxControlImg2ImgPipeline(FluxTextParts, FluxControlImg2ImgPipeline):
    """`FluxControlImg2ImgPipeline` that owns its offloading; the VAE encodes both pictures before the DiT runs."""


class OmniFluxControlInpaintPipeline(FluxTextParts, FluxControlInpaintPipeline):
    """`FluxControlInpaintPipeline` that owns its offloading; the VAE encodes all pictures before the DiT runs."""
