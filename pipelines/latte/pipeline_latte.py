"""`OmniLattePipeline`: declares what a Latte pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

import attrs
from diffusers import LattePipeline

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS, T5_PLAN, TransformerParts

__all__ = ["OmniLattePipeline"]


class OmniLattePipeline(TransformerParts, LattePipeline):
    """`LattePipeline` that owns its offloading.

    A spatial block and a temporal one run in turn. Containers are declared, and that order is learned in the first step. The
    VAE decodes some frames at a time.
    """

    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        T5_PLAN, block_attrs={"transformer": ("transformer_blocks", "temporal_transformer_blocks")}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **ENTRY_POINTS,
        "": ("encode_prompt", "decode_latents"),
    }
