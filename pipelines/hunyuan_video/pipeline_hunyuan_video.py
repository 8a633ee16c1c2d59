"""HunyuanVideo pipelines that own their offloading: from text, from a picture, and in sections."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import (
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
)

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS, TransformerParts

__all__ = [
    "OmniHunyuanSkyreelsImageToVideoPipeline",
    "OmniHunyuanVideoFramepackPipeline",
    "OmniHunyuanVideoImageToVideoPipeline",
    "OmniHunyuanVideoPipeline",
]

_ENCODERS = ("text_encoder", "text_encoder_2")

_PLAN = OffloadPlan(
    block_attrs={"transformer": ("context_embedder.token_refiner.refiner_blocks", "transformer_blocks", "single_transformer_blocks")},
    encoder_block_attrs={"text_encoder": ("layers",), "text_encoder_2": ("encoder.layers",)},
)
"""The blocks that refine the text run first."""


class _HunyuanVideoParts(TransformerParts):
    """The components of a HunyuanVideo pipeline.

    The two text encoders are on the device together: with `true_cfg_scale` they run for the prompts and then again for the
    negative prompts. CLIP-L is a hundredth of the language model beside it.
    """

    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [_ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniHunyuanVideoPipeline(_HunyuanVideoParts, HunyuanVideoPipeline):
    """`HunyuanVideoPipeline` that owns its offloading."""


class OmniHunyuanSkyreelsImageToVideoPipeline(_HunyuanVideoParts, HunyuanSkyreelsImageToVideoPipeline):
    """`HunyuanSkyreelsImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""


class OmniHunyuanVideoImageToVideoPipeline(_HunyuanVideoParts, HunyuanVideoImageToVideoPipeline):
    """`HunyuanVideoImageToVideoPipeline` that owns its offloading; its first text encoder is Llava, which sees the picture too."""

    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        _PLAN,
        encoder_block_attrs={
            **_PLAN.encoder_block_attrs,
            "text_encoder": ("model.vision_tower.encoder.layers", "model.language_model.layers"),
        },
    )


class OmniHunyuanVideoFramepackPipeline(_HunyuanVideoParts, HunyuanVideoFramepackPipeline):
    """`HunyuanVideoFramepackPipeline` that owns its offloading.

    The video is made in sections. After each the VAE decodes what there is: DiT and VAE come once a section, which takes many
    steps.
    """

    _encoder_modules: ClassVar[list[str]] = [*_ENCODERS, "image_encoder"]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        _PLAN, encoder_block_attrs={**_PLAN.encoder_block_attrs, "image_encoder": ("encoder.layers",)}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**ENTRY_POINTS, "": ("encode_prompt", "encode_image")}
