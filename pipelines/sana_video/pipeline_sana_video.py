"""Sana Video pipelines that own their offloading: from text and from a picture.

Their VAE is Wan's, a deep-compression one, or that of LTX-2, whose statistics the pipelines copy to where the latents are.
"""

from typing import ClassVar

from diffusers import SanaImageToVideoPipeline, SanaVideoPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import TransformerParts
from pipelines.sana.decoding import raising_out_of_memory

__all__ = ["OmniSanaImageToVideoPipeline", "OmniSanaVideoPipeline"]


class _SanaVideoParts(TransformerParts):
    """The components of a Sana Video pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)}, encoder_block_attrs={"text_encoder": ("layers",)}
    )


class OmniSanaVideoPipeline(_SanaVideoParts, SanaVideoPipeline):
    """`SanaVideoPipeline` that owns its offloading."""

    __call__ = leaving_nothing(raising_out_of_memory(SanaVideoPipeline.__call__))


class OmniSanaImageToVideoPipeline(_SanaVideoParts, SanaImageToVideoPipeline):
    """`SanaImageToVideoPipeline` that owns its offloading; the VAE encodes the first frame."""

    __call__ = leaving_nothing(raising_out_of_memory(SanaImageToVideoPipeline.__call__))
