"""What LTX-2 pipelines are made of."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import LTX2Pipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["ENTRY_POINTS", "LTX2Parts", "plan_for"]

_STACKS: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("model.language_model.layers",),
    "prompt_enhancer": ("model.language_model.layers",),
    "connectors": ("video_connector.transformer_blocks", "audio_connector.transformer_blocks"),
}

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "vae": ("encode", "decode"),
    "audio_vae": ("encode", "decode"),
    "text_encoder": ("generate",),
    "prompt_enhancer": ("generate",),
    "": ("encode_prompt", "enhance_prompt"),
}


def plan_for(*encoders: str) -> OffloadPlan:
    """Return the plan of a pipeline with these encoders."""
    return OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={name: stacks for name, stacks in _STACKS.items() if name in encoders},
        encoder_component_types=dict.fromkeys(encoders, "text_encoder"),
    )


class LTX2Parts(OmniOffloadMixin):
    """The components of an LTX-2 pipeline.

    One DiT makes video and sound, in up to three runs a step; two VAEs decode them, and a vocoder turns the second one's
    spectrograms into waves. The pipeline reads the VAEs' `latents_mean` and `latents_std` by itself, before they decode and after
    they have encoded: they are on the host then, and it copies them to where the latents are. `prompt_enhancer` may be None.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "prompt_enhancer", "connectors"]
    _vae_modules: ClassVar[list[str]] = ["vae", "audio_vae", "vocoder"]
    _offload_plan: ClassVar[OffloadPlan] = plan_for("text_encoder", "prompt_enhancer", "connectors")

    prompt_enhancer: Any

    @functools.wraps(LTX2Pipeline.enhance_prompt)
    def enhance_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Let the model write a longer prompt, on the device from the start: upstream moves it there by hand, which is idle then."""
        with self.on_device("text_encoder" if self.prompt_enhancer is None else "prompt_enhancer"):
            return super().enhance_prompt(*args, **kwargs)  # type: ignore[misc]  # of the pipeline behind the parts
