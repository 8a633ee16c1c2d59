"""`OmniQwenImagePipeline`: declares what a Qwen-Image pipeline is made of, and lets go of what upstream caches for a device."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniQwenImagePipeline", "forget_positions"]


class OmniQwenImagePipeline(OmniOffloadMixin, QwenImagePipeline):
    """`QwenImagePipeline` that owns its offloading.

    The text encoder is a whole vision-language model: its vision tower never runs, as the prompts are texts, but its head does.
    The VAE enters its decoder once a latent frame, so `decode` as a whole is the work.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={"text_encoder": ("model.visual.blocks", "model.language_model.layers")},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("encode_prompt",),
    }

    @functools.wraps(QwenImagePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with no positions from before, and leave none behind; nor, after an error, frames in the VAE.

        Upstream keeps the DiT's rotary frequencies per device, for ever. While the DiT is on the device, its own tensors are
        what `.to(device)` returns and what is kept; once it is back on the host, a resident run would be handed these.
        """
        forget_positions()
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            self.vae.clear_cache()
            raise
        finally:
            forget_positions()


def forget_positions() -> None:
    """Empty the caches of `QwenEmbedRope`'s methods. They are functions' own, and shared by all its instances."""
    for method in (QwenEmbedRope._get_device_freqs, QwenEmbedRope._compute_video_freqs):  # noqa: SLF001  (that is where they are)
        cached = inspect.getclosurevars(method).nonlocals["cached"]
        cached.cache_clear()
