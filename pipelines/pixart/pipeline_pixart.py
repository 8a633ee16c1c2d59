"""PixArt pipelines that own their offloading: Alpha, Sigma, and Sigma with perturbed attention."""

from typing import ClassVar

from diffusers import PixArtAlphaPipeline, PixArtSigmaPAGPipeline, PixArtSigmaPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import keeping_attention
from pipelines.parts import T5_PLAN, TransformerParts

__all__ = ["OmniPixArtAlphaPipeline", "OmniPixArtSigmaPAGPipeline", "OmniPixArtSigmaPipeline"]


class _PixArtParts(TransformerParts):
    """The components of a PixArt pipeline; `text_encoder` may be None, where prompts come encoded."""

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN


class OmniPixArtAlphaPipeline(_PixArtParts, PixArtAlphaPipeline):
    """`PixArtAlphaPipeline` that owns its offloading."""


class OmniPixArtSigmaPipeline(_PixArtParts, PixArtSigmaPipeline):
    """`PixArtSigmaPipeline` that owns its offloading."""


class OmniPixArtSigmaPAGPipeline(_PixArtParts, PixArtSigmaPAGPipeline):
    """`PixArtSigmaPAGPipeline` that owns its offloading; for guidance the attention of some blocks runs in two ways."""

    __call__ = keeping_attention(PixArtSigmaPAGPipeline.__call__, "transformer")
