"""`OmniAllegroPipeline`: declares what an Allegro pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import AllegroPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.parts import ENTRY_POINTS, T5_PLAN, TransformerParts

__all__ = ["OmniAllegroPipeline"]


class OmniAllegroPipeline(TransformerParts, AllegroPipeline):
    """`AllegroPipeline` that owns its offloading.

    The VAE decodes in tiles only: call `pipe.vae.enable_tiling()` first, also after a pipeline was loaded from a folder.
    """

    _offload_plan: ClassVar[OffloadPlan] = T5_PLAN
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ENTRY_POINTS,
        "": ("encode_prompt", "decode_latents"),
    }
    __call__ = leaving_nothing(AllegroPipeline.__call__)
