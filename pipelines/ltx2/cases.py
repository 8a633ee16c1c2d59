"""LTX-2 cases: random weights, a few hundred thousand parameters, nine frames of 64 x 32 pixels and their sound."""

import functools
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

from pipelines.ltx2.pipeline_ltx2 import (
    OmniLTX2ConditionPipeline,
    OmniLTX2ImageToVideoPipeline,
    OmniLTX2InContextPipeline,
    OmniLTX2LatentUpsamplePipeline,
    OmniLTX2Pipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready
from pipelines.tiny.inputs import picture
from pipelines.tiny.language import gemma3_encoder
from pipelines.tiny.tokenizers import gemma_tokenizer
from pipelines.tiny.videos import clip

__all__ = ["LTX2", "LTX2_CONDITION", "LTX2_IMAGE_TO_VIDEO", "LTX2_IN_CONTEXT", "LTX2_LATENT_UPSAMPLE"]

_TEXT_LAYERS = 2
_VIDEO_CHANNELS = 8
_AUDIO_CHANNELS = 2
_MEL_BINS = 16
_AUDIO_WIDTH = _AUDIO_CHANNELS * _MEL_BINS // 4  # the audio VAE halves the bins twice


def _vae() -> Any:
    return _with_statistics(
        AutoencoderKLLTX2Video(
            latent_channels=_VIDEO_CHANNELS,
            block_out_channels=(4, 8, 16, 32),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
            decoder_spatial_padding_mode="zeros",  # the default reflects, and a latent of one row has nothing to
        )
    )


def _audio_vae() -> Any:
    return _with_statistics(
        AutoencoderKLLTX2Audio(
            base_channels=_AUDIO_WIDTH,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            latent_channels=_AUDIO_CHANNELS,
            mel_bins=_MEL_BINS,
        )
    )


def _with_statistics(vae: Any) -> Any:
    """Give a VAE a mean and a deviation that matter: they begin as zeros and ones."""
    vae.latents_mean.normal_(std=0.3)
    vae.latents_std.uniform_(0.5, 1.5)
    return ready(vae)


def _connectors() -> Any:
    sizes = {"num_attention_heads": 2, "num_layers": 2, "num_learnable_registers": 8}
    both = {f"{kind}_connector_{name}": size for kind in ("video", "audio") for name, size in sizes.items()}
    return ready(
        LTX2TextConnectors(
            caption_channels=TEXT_WIDTH,
            text_proj_in_factor=_TEXT_LAYERS + 1,
            video_connector_attention_head_dim=TEXT_WIDTH // 2,
            audio_connector_attention_head_dim=TEXT_WIDTH // 2,
            connector_rope_base_seq_len=64,
            **both,
        )
    )


def _transformer() -> Any:
    return ready(
        LTX2VideoTransformer3DModel(
            in_channels=_VIDEO_CHANNELS,
            out_channels=_VIDEO_CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_in_channels=_AUDIO_WIDTH,
            audio_out_channels=_AUDIO_WIDTH,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=2,
            caption_channels=TEXT_WIDTH,
            rope_double_precision=True,
        )
    )


def _vocoder() -> Any:
    return ready(
        LTX2Vocoder(
            in_channels=2 * _MEL_BINS,
            hidden_channels=16,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        )
    )


def _pipeline(cls: Any) -> Any:
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(),
        audio_vae=_audio_vae(),
        text_encoder=gemma3_encoder(layers=_TEXT_LAYERS),
        tokenizer=gemma_tokenizer(),
        connectors=_connectors(),
        transformer=_transformer(),
        vocoder=_vocoder(),
    )


def _upsample() -> OmniLTX2LatentUpsamplePipeline:
    upsampler = LTX2LatentUpsamplerModel(in_channels=_VIDEO_CHANNELS, mid_channels=32, num_blocks_per_stage=2)
    return OmniLTX2LatentUpsamplePipeline(vae=_vae(), latent_upsampler=ready(upsampler))


def _outputs(result: Any) -> list[torch.Tensor]:
    return [result.frames, result.audio]


_case = functools.partial(
    prompted_case,
    negative_prompt="blurry",
    width=64,
    num_frames=9,
    spatio_temporal_guidance_blocks=[1],
    max_sequence_length=32,
    outputs=_outputs,
)
_ONE_GUIDANCE: dict[str, Any] = {"stg_scale": 0.0, "modality_scale": 1.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}

LTX2 = _case("ltx2", lambda: _pipeline(OmniLTX2Pipeline), seed=26)
"""Text to video and sound, with all guidance: the DiT of two blocks runs three times a step."""

LTX2_IMAGE_TO_VIDEO = _case(
    "ltx2_i2v",
    lambda: _pipeline(OmniLTX2ImageToVideoPipeline),
    seed=210,
    image=picture(width=64),
    image_crf=0,
    **_ONE_GUIDANCE,
)
"""Text and the first frame to video and sound."""

LTX2_CONDITION = _case(
    "ltx2_condition",
    lambda: _pipeline(OmniLTX2ConditionPipeline),
    seed=211,
    conditions=[LTX2VideoCondition(frames=picture(width=64), index=1, strength=0.8, crf=0)],
    **_ONE_GUIDANCE,
)
"""Text and the last frame to video and sound."""

LTX2_IN_CONTEXT = _case(
    "ltx2_in_context",
    lambda: _pipeline(OmniLTX2InContextPipeline),
    seed=212,
    reference_conditions=[LTX2ReferenceCondition(frames=clip(9, width=64))],
    **_ONE_GUIDANCE,
)
"""Text and a video to refer to, to video and sound."""

LTX2_LATENT_UPSAMPLE = prompted_case(
    "ltx2_latent_upsample",
    _upsample,
    seed=213,
    leave_out=("prompt", "num_inference_steps"),
    video=clip(9, width=64),
    width=64,
    num_frames=9,
    adain_factor=0.5,
)
"""A video of twice the height and width: the VAE encodes and decodes."""
