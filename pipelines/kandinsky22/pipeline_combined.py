"""Kandinsky 2.2 pipelines of a prior and a decoder that own their offloading: from text, a picture, and a masked picture."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    KandinskyV22CombinedPipeline,
    KandinskyV22Img2ImgCombinedPipeline,
    KandinskyV22InpaintCombinedPipeline,
)

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.combined import running_inner

__all__ = [
    "OmniKandinskyV22CombinedPipeline",
    "OmniKandinskyV22Img2ImgCombinedPipeline",
    "OmniKandinskyV22InpaintCombinedPipeline",
]

_INNER: Mapping[str, str] = {"prior_pipe": "prior_", "decoder_pipe": ""}


class _CombinedParts(OmniOffloadMixin):
    """The components of a prior and of a decoder, one after the other."""

    _dit_modules: ClassVar[list[str]] = ["prior_prior", "unet"]
    _encoder_modules: ClassVar[list[str]] = ["prior_text_encoder", "prior_image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["movq"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"prior_prior": ("transformer_blocks",), "unet": ("down_blocks", "mid_block", "up_blocks")},
        encoder_block_attrs={
            "prior_text_encoder": ("text_model.encoder.layers",),
            "prior_image_encoder": ("vision_model.encoder.layers",),
        },
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prior_prior": ("post_process_latents",),
        "movq": ("encode", "decode"),
    }


class OmniKandinskyV22CombinedPipeline(_CombinedParts, KandinskyV22CombinedPipeline):
    """`KandinskyV22CombinedPipeline` that owns its offloading."""

    __call__ = running_inner(KandinskyV22CombinedPipeline.__call__, _INNER)


class OmniKandinskyV22Img2ImgCombinedPipeline(_CombinedParts, KandinskyV22Img2ImgCombinedPipeline):
    """`KandinskyV22Img2ImgCombinedPipeline` that owns its offloading."""

    __call__ = running_inner(KandinskyV22Img2ImgCombinedPipeline.__call__, _INNER)


class OmniKandinskyV22InpaintCombinedPipeline(_CombinedParts, KandinskyV22InpaintCombinedPipeline):
    """`KandinskyV22InpaintCombinedPipeline` that owns its offloading."""

    __call__ = running_inner(KandinskyV22InpaintCombinedPipeline.__call__, _INNER)
