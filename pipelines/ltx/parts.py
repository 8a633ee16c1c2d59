"""What enlarges the latents of LTX-Video and of LTX-2."""

from collections.abc import Mapping
from typing import ClassVar

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["LatentUpsampleParts"]


class LatentUpsampleParts(OmniOffloadMixin):
    """The components of a pipeline that makes larger latents; the model that does it is its DiT."""

    _dit_modules: ClassVar[list[str]] = ["latent_upsampler"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"latent_upsampler": ("res_blocks", "post_upsample_res_blocks")})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vae": ("encode", "decode")}
