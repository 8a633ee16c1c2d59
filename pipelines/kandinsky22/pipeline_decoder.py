"""Kandinsky 2.2 decoders that own their offloading: from embeddings, with a picture, a masked picture or a control picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    KandinskyV22ControlnetImg2ImgPipeline,
    KandinskyV22ControlnetPipeline,
    KandinskyV22Img2ImgPipeline,
    KandinskyV22InpaintPipeline,
    KandinskyV22Pipeline,
)

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = [
    "OmniKandinskyV22ControlnetImg2ImgPipeline",
    "OmniKandinskyV22ControlnetPipeline",
    "OmniKandinskyV22Img2ImgPipeline",
    "OmniKandinskyV22InpaintPipeline",
    "OmniKandinskyV22Pipeline",
]


class _DecoderParts(OmniOffloadMixin):
    """A UNet, which takes image embeddings from a prior, and an autoencoder of pictures."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["movq"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"movq": ("encode", "decode")}


class OmniKandinskyV22Pipeline(_DecoderParts, KandinskyV22Pipeline):
    """`KandinskyV22Pipeline` that owns its offloading."""


class OmniKandinskyV22Img2ImgPipeline(_DecoderParts, KandinskyV22Img2ImgPipeline):
    """`KandinskyV22Img2ImgPipeline` that owns its offloading."""


class OmniKandinskyV22InpaintPipeline(_DecoderParts, KandinskyV22InpaintPipeline):
    """`KandinskyV22InpaintPipeline` that owns its offloading."""


class OmniKandinskyV22ControlnetPipeline(_DecoderParts, KandinskyV22ControlnetPipeline):
    """`KandinskyV22ControlnetPipeline` that owns its offloading; the UNet itself reads the control picture."""


class OmniKandinskyV22ControlnetImg2ImgPipeline(_DecoderParts, KandinskyV22ControlnetImg2ImgPipeline):
    """`KandinskyV22ControlnetImg2ImgPipeline` that owns its offloading; the UNet itself reads the control picture."""
