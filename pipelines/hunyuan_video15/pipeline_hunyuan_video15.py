"""HunyuanVideo 1.5 pipelines that own their offloading: from text and from a picture."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import ENTRY_POINTS, TransformerParts

__all__ = ["OmniHunyuanVideo15ImageToVideoPipeline", "OmniHunyuanVideo15Pipeline"]

_ENCODERS = ("text_encoder", "text_encoder_2")

_PLAN = OffloadPlan(
    block_attrs={"transformer": ("context_embedder.token_refiner.refiner_blocks", "transformer_blocks")},
    encoder_block_attrs={"text_encoder": ("layers",), "text_encoder_2": ("encoder.block",)},
)


class _HunyuanVideo15Parts(TransformerParts):
    """The components of a HunyuanVideo 1.5 pipeline.

    The two text encoders are on the device together, as they run for the prompts and then again for the negative prompts. The
    second one, a small ByT5, runs for what stands in quotation marks only.
    """

    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [_ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniHunyuanVideo15Pipeline(_HunyuanVideo15Parts, HunyuanVideo15Pipeline):
    """`HunyuanVideo15Pipeline` that owns its offloading."""


class OmniHunyuanVideo15ImageToVideoPipeline(_HunyuanVideo15Parts, HunyuanVideo15ImageToVideoPipeline):
    """`HunyuanVideo15ImageToVideoPipeline` that owns its offloading; image encoder and VAE encode the first frame."""

    _encoder_modules: ClassVar[list[str]] = ["image_encoder", *_ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        _PLAN, encoder_block_attrs={**_PLAN.encoder_block_attrs, "image_encoder": ("encoder.layers",)}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**ENTRY_POINTS, "": ("encode_prompt", "encode_image")}
    __call__ = leaving_nothing(HunyuanVideo15ImageToVideoPipeline.__call__)
