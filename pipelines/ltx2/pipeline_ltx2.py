"""`OmniLTX2Pipeline`: declares what an LTX-2 pipeline is made of, and inherits the rest."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import LTX2Pipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniLTX2Pipeline"]

_ENCODERS = ("text_encoder", "prompt_enhancer", "connectors", "duration_head")


class OmniLTX2Pipeline(OmniOffloadMixin, LTX2Pipeline):
    """`LTX2Pipeline` that owns its offloading.

    One DiT makes video and sound, in up to three runs a step; two VAEs decode them, and a vocoder turns the second one's
    spectrograms into waves. The pipeline reads the VAEs' `latents_mean` and `latents_std` by itself, before it decodes: they are
    on the host then, and it copies them to where the latents are. `prompt_enhancer` and `duration_head` may be None.
    """

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = list(_ENCODERS)
    _vae_modules: ClassVar[list[str]] = ["vae", "audio_vae", "vocoder"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("transformer_blocks",)},
        encoder_block_attrs={
            "text_encoder": ("model.language_model.layers",),
            "prompt_enhancer": ("model.language_model.layers",),
            "connectors": ("video_connector.transformer_blocks", "audio_connector.transformer_blocks"),
        },
        encoder_component_types=dict.fromkeys(_ENCODERS, "text_encoder"),
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "audio_vae": ("encode", "decode"),
        "text_encoder": ("generate",),
        "prompt_enhancer": ("generate",),
        "duration_head": ("predict_num_frames",),
        "": ("encode_prompt", "enhance_prompt"),
    }

    @functools.wraps(LTX2Pipeline.enhance_prompt)
    def enhance_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Let the model write a longer prompt, on the device from the start: upstream moves it there by hand, which is idle then."""
        with self.on_device("text_encoder" if self.prompt_enhancer is None else "prompt_enhancer"):
            return super().enhance_prompt(*args, **kwargs)
