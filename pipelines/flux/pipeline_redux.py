"""`OmniFluxPriorReduxPipeline`: pictures to prompt embeddings for Flux."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import FluxPriorReduxPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.flux.parts import ENCODERS, PLAN

__all__ = ["OmniFluxPriorReduxPipeline"]


class OmniFluxPriorReduxPipeline(OmniOffloadMixin, FluxPriorReduxPipeline):
    """`FluxPriorReduxPipeline` that owns its offloading.

    It has encoders only: of the picture, of what was encoded, and Flux's two of text, which may be None.
    """

    _dit_modules: ClassVar[list[str]] = []
    _encoder_modules: ClassVar[list[str]] = ["image_encoder", "image_embedder", *ENCODERS]
    _vae_modules: ClassVar[list[str]] = []
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        encoder_block_attrs={"image_encoder": ("encoder.layers",), **PLAN.encoder_block_attrs},
        encoder_dlo_weight_replication=ENCODERS,
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"": ("encode_prompt", "encode_image")}
