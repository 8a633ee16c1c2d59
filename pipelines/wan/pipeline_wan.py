"""`OmniWanPipeline`: declares what a Wan text-to-video pipeline is made of, and inherits the rest."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import WanPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniWanPipeline"]


class OmniWanPipeline(OmniOffloadMixin, WanPipeline):
    """`WanPipeline` that owns its offloading.

    Wan 2.1 and Wan 2.2's small model have one DiT; Wan 2.2 has two, of which `transformer` takes the noisy steps and
    `transformer_2` the others. The VAE enters its decoder once a latent frame, so `decode` as a whole is the work.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",), "transformer_2": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("encoder.block",)},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("encode_prompt",),
    }

    @functools.wraps(WanPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; after an error the VAE lets go of the features that it keeps between frames, which are on the device."""
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            self.vae.clear_cache()
            raise
