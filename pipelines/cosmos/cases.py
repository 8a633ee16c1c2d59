"""Cosmos cases: random weights, one or two hundred thousand parameters, nine or five frames of 32 x 32 pixels.

The DiT sees no mask of padding: that takes torchvision. So does the pipeline with a ControlNet, always: it is left out.
"""

import functools
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCosmos,
    CosmosTransformer3DModel,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import nn

from pipelines.cosmos.pipeline_cosmos import (
    OmniCosmos2_5_PredictBasePipeline,
    OmniCosmos2TextToImagePipeline,
    OmniCosmos2VideoToWorldPipeline,
    OmniCosmosTextToWorldPipeline,
    OmniCosmosVideoToWorldPipeline,
)
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, ready, t5_encoder
from pipelines.tiny.inputs import picture
from pipelines.tiny.language import qwen25_vl_encoder
from pipelines.tiny.tokenizers import qwen_tokenizer, t5_tokenizer
from pipelines.tiny.videos import WAN_LATENT_CHANNELS, autoencoder_wan, clip

__all__ = ["COSMOS2_5_PREDICT", "COSMOS2_TEXT_TO_IMAGE", "COSMOS2_VIDEO_TO_WORLD", "COSMOS_TEXT_TO_WORLD", "COSMOS_VIDEO_TO_WORLD"]

_LATENT_CHANNELS = WAN_LATENT_CHANNELS
_FRAMES = 5
_WORLD_FRAMES = 9
"""Of the first kind, whose VAE makes eight frames of a latent one: the second latent frame is the first that no picture gives."""

_QWEN_LAYERS = 2


class _PassesAll(nn.Module):
    """Stands for the safety checker, which loads models of a few gigabytes when it is made."""

    device, dtype = torch.device("cpu"), torch.float32

    def check_text_safety(self, _prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def _vae() -> Any:
    widths = (8, 8, 8, 8)
    return ready(
        AutoencoderKLCosmos(
            latent_channels=_LATENT_CHANNELS,
            encoder_block_out_channels=widths,
            decode_block_out_channels=widths,
            attention_resolutions=(8,),
            resolution=64,
            num_layers=1,
            patch_size=4,
            latents_mean=[0.1] * 16 * _LATENT_CHANNELS,
            latents_std=[1.5] * 16 * _LATENT_CHANNELS,
        )
    )


def _transformer(**settings: Any) -> Any:
    defaults = {
        "in_channels": _LATENT_CHANNELS,
        "out_channels": _LATENT_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "mlp_ratio": 2,
        "text_embed_dim": TEXT_WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "patch_size": (1, 2, 2),
        "concat_padding_mask": False,
    }
    return ready(CosmosTransformer3DModel(**{**defaults, **settings}))


def _pipeline(cls: Any, **parts: Any) -> Any:
    defaults = {"text_encoder": t5_encoder(layers=2), "tokenizer": t5_tokenizer(), "safety_checker": _PassesAll()}
    return cls(**{**defaults, **parts})


def _world(cls: Any, **settings: Any) -> Any:
    """Return a pipeline of the first kind, with learned positions and latents of each frame."""
    scheduler = EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", rho=7.0, final_sigmas_type="sigma_min"
    )
    return _pipeline(cls, vae=_vae(), transformer=_transformer(**settings), scheduler=scheduler)


def _second(cls: Any, **settings: Any) -> Any:
    transformer = _transformer(extra_pos_embed_type=None, **settings)
    return _pipeline(cls, vae=autoencoder_wan(), transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True))


def _second_and_a_half() -> Any:
    sees_frames = _transformer(
        extra_pos_embed_type=None,
        in_channels=_LATENT_CHANNELS + 1,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=_QWEN_LAYERS * TEXT_WIDTH,
        encoder_hidden_states_channels=TEXT_WIDTH,
    )
    return _pipeline(
        OmniCosmos2_5_PredictBasePipeline,
        text_encoder=qwen25_vl_encoder(layers=_QWEN_LAYERS),
        tokenizer=qwen_tokenizer(),
        vae=autoencoder_wan(),
        transformer=sees_frames,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
    )


_STANDS_IN = {"check_save_pretrained": "what stands for the safety checker of cosmos_guardrail cannot be loaded in its place"}

_case = functools.partial(prompted_case, negative_prompt="blurry", max_sequence_length=32, expected_failures=_STANDS_IN)

COSMOS_TEXT_TO_WORLD = _case("cosmos_text_to_world", lambda: _world(OmniCosmosTextToWorldPipeline), seed=175, num_frames=_WORLD_FRAMES)
"""Text to video: three blocks, run twice a step."""

COSMOS_VIDEO_TO_WORLD = _case(
    "cosmos_video_to_world",
    lambda: _world(OmniCosmosVideoToWorldPipeline, in_channels=_LATENT_CHANNELS + 1),
    seed=176,
    image=picture(),
    num_frames=_WORLD_FRAMES,
)
"""Text and the first frame to video."""

COSMOS2_TEXT_TO_IMAGE = _case("cosmos2_text_to_image", lambda: _second(OmniCosmos2TextToImagePipeline), seed=177)
"""Text to image, by a VAE of videos."""

COSMOS2_VIDEO_TO_WORLD = _case(
    "cosmos2_video_to_world",
    lambda: _second(OmniCosmos2VideoToWorldPipeline, in_channels=_LATENT_CHANNELS + 1),
    seed=178,
    image=picture(),
    num_frames=_FRAMES,
)
"""Text and the first frame to video, by the second model."""

COSMOS2_5_PREDICT = _case(
    "cosmos2_5_predict",
    _second_and_a_half,
    seed=179,
    max_sequence_length=160,
    video=clip(_FRAMES),
    num_latent_conditional_frames=1,
    num_frames=_FRAMES,
)
"""Text and the end of a video to what comes next, by a text encoder all layers of which are used."""
