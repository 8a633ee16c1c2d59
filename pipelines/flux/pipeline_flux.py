"""`OmniFluxPipeline`: declares what a Flux pipeline is made of, and inherits the rest."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import FluxPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniFluxPipeline"]


class OmniFluxPipeline(OmniOffloadMixin, FluxPipeline):
    """`FluxPipeline` that owns its offloading.

    Both encoders run once, before the DiT; the VAE's decoder runs last and its encoder never. `image_encoder` is there
    for image prompts only, and is None otherwise.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "image_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks", "single_transformer_blocks")},
        encoder_block_attrs={"text_encoder": ("encoder.layers",), "text_encoder_2": ("encoder.block",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("encode_prompt", "encode_image"),
    }
