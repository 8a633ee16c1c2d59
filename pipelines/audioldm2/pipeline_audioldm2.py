"""AudioLDM pipelines that own their offloading: the second and the first."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import AudioLDM2Pipeline, AudioLDMPipeline

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["OmniAudioLDM2Pipeline", "OmniAudioLDMPipeline"]

_UNET_BLOCKS = ("down_blocks", "mid_block", "up_blocks")
_CLAP_BLOCKS = ("text_model.encoder.layer",)


class OmniAudioLDM2Pipeline(OmniOffloadMixin, AudioLDM2Pipeline):
    """`AudioLDM2Pipeline` that owns its offloading.

    Prompts go through two text encoders, a projection, and a language model that writes a few hidden states more, one by one. The
    first encoder is a CLAP, of which `get_text_features` uses the half for text; the whole of it runs only to score several
    sounds. The second is a T5, or the encoder of a VITS model, which is called by itself.
    """

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "projection_model", "language_model"]
    _vae_modules: ClassVar[list[str]] = ["vae", "vocoder"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": _UNET_BLOCKS},
        encoder_block_attrs={
            "text_encoder": _CLAP_BLOCKS,
            "text_encoder_2": ("encoder.block",),
            "language_model": ("transformer.h",),
        },
        encoder_component_types={"projection_model": "text_encoder", "language_model": "text_encoder"},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text_encoder": ("get_text_features",),
        "vae": ("encode", "decode"),
        "": ("encode_prompt", "generate_language_model", "mel_spectrogram_to_waveform", "score_waveforms"),
    }


class OmniAudioLDMPipeline(OmniOffloadMixin, AudioLDMPipeline):
    """`AudioLDMPipeline` that owns its offloading; its text encoder is the half of a CLAP that reads text."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae", "vocoder"]

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"unet": _UNET_BLOCKS}, encoder_block_attrs={"text_encoder": _CLAP_BLOCKS}
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "": ("decode_latents", "mel_spectrogram_to_waveform"),
    }
