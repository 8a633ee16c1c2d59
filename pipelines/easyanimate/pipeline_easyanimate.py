"""EasyAnimate pipelines that own their offloading: from text, and into a masked video.

diffusers 0.42 has a third, `EasyAnimateControlPipeline`, no call of which gets past its prompt: it passes an argument that its
`encode_prompt` does not take.
"""

from typing import ClassVar

from diffusers import EasyAnimateInpaintPipeline, EasyAnimatePipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import TransformerParts

__all__ = ["OmniEasyAnimateInpaintPipeline", "OmniEasyAnimatePipeline"]


class _EasyAnimateParts(TransformerParts):
    """The components of an EasyAnimate pipeline; its text encoder is a vision-language model that sees text only."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
    )


class OmniEasyAnimatePipeline(_EasyAnimateParts, EasyAnimatePipeline):
    """`EasyAnimatePipeline` that owns its offloading."""

    __call__ = leaving_nothing(EasyAnimatePipeline.__call__)


class OmniEasyAnimateInpaintPipeline(_EasyAnimateParts, EasyAnimateInpaintPipeline):
    """`EasyAnimateInpaintPipeline` that owns its offloading; the VAE encodes the video to begin with."""

    __call__ = leaving_nothing(EasyAnimateInpaintPipeline.__call__)
