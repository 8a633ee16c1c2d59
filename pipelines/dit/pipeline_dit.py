"""`OmniDiTPipeline`: declares what the class-conditional DiT pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import DiTPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniDiTPipeline"]


class OmniDiTPipeline(OmniOffloadMixin, DiTPipeline):
    """`DiTPipeline` that owns its offloading.

    After its blocks the DiT calls the embedding in the first one's norm once more: it is no part of the block that comes and goes.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        rest_submodules=["transformer.transformer_blocks.0.norm1.emb"],
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode")}
