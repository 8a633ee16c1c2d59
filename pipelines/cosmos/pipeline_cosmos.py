"""Cosmos pipelines that own their offloading.

`safety_checker` stands in no list: its models are no parameters of it, and the pipeline brings them to the device and back by itself.
"""

from typing import ClassVar

import attrs
from diffusers import (
    Cosmos2_5_PredictBasePipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosVideoToWorldPipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = [
    "OmniCosmos2TextToImagePipeline",
    "OmniCosmos2VideoToWorldPipeline",
    "OmniCosmos2_5_PredictBasePipeline",
    "OmniCosmosTextToWorldPipeline",
    "OmniCosmosVideoToWorldPipeline",
]

_QWEN_PLAN = attrs.evolve(T5_PLAN, encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")})


class _CosmosParts(TransformerParts):
    """The components of a Cosmos pipeline with a T5."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN


class OmniCosmosTextToWorldPipeline(_CosmosParts, CosmosTextToWorldPipeline):
    """`CosmosTextToWorldPipeline` that owns its offloading."""


class OmniCosmosVideoToWorldPipeline(_CosmosParts, CosmosVideoToWorldPipeline):
    """`CosmosVideoToWorldPipeline` that owns its offloading; the VAE encodes the picture or video to go on with."""


class OmniCosmos2TextToImagePipeline(_CosmosParts, Cosmos2TextToImagePipeline):
    """`Cosmos2TextToImagePipeline` that owns its offloading."""

    __call__ = leaving_nothing(Cosmos2TextToImagePipeline.__call__)


class OmniCosmos2VideoToWorldPipeline(_CosmosParts, Cosmos2VideoToWorldPipeline):
    """`Cosmos2VideoToWorldPipeline` that owns its offloading; the VAE encodes the picture or video to go on with."""

    __call__ = leaving_nothing(Cosmos2VideoToWorldPipeline.__call__)


class OmniCosmos2_5_PredictBasePipeline(TransformerParts, Cosmos2_5_PredictBasePipeline):  # noqa: N801  (upstream's name)
    """`Cosmos2_5_PredictBasePipeline` that owns its offloading; its text encoder is a vision-language model."""

    _offload_plan: ClassVar[OffloadPlan] = _QWEN_PLAN
    __call__ = leaving_nothing(Cosmos2_5_PredictBasePipeline.__call__)
