"""Stable Diffusion 3 cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3ControlNetModel, SD3Transformer2DModel

from omni_offload.testing import PipelineCase
from pipelines.sd3.pipeline_controlnet import OmniStableDiffusion3ControlNetInpaintingPipeline, OmniStableDiffusion3ControlNetPipeline
from pipelines.sd3.pipeline_pag import OmniStableDiffusion3PAGImg2ImgPipeline, OmniStableDiffusion3PAGPipeline
from pipelines.sd3.pipeline_sd3 import (
    OmniStableDiffusion3Img2ImgPipeline,
    OmniStableDiffusion3InpaintPipeline,
    OmniStableDiffusion3Pipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import SPREAD_IN_FLOAT64, TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready, t5_encoder, without_spread
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer

__all__ = [
    "SD3",
    "SD3_CONTROLNET",
    "SD3_CONTROLNET_INPAINT",
    "SD3_IMG2IMG",
    "SD3_INPAINT",
    "SD3_MULTI_CONTROLNET",
    "SD3_PAG",
    "SD3_PAG_IMG2IMG",
]

_BOTH_CLIPS = 2 * TEXT_WIDTH  # their outputs stand side by side; T5's is as wide

_BLOCKS: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": _BOTH_CLIPS,
    "caption_projection_dim": 32,
    "pooled_projection_dim": _BOTH_CLIPS,
    "pos_embed_max_size": 16,
    "qk_norm": "rms_norm",
}


def _transformer(*, layers: int, channels: int) -> Any:
    return ready(
        SD3Transformer2DModel(
            **{**_BLOCKS, "in_channels": channels, "out_channels": channels}, num_layers=layers, dual_attention_layers=(0,)
        )
    )


def _controlnet(**settings: Any) -> Any:
    """Return a ControlNet; `ready` fills its projections, which begin as zeros, with noise: it would have no effect otherwise."""
    return ready(SD3ControlNetModel(**_BLOCKS, num_layers=2, **settings))


def _controlnets() -> Any:
    return [_controlnet(), _controlnet()]


def _vae(*, channels: int = 4) -> Any:
    return autoencoder_kl(latent_channels=channels, widths=(8, 16), use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06)


def _pipeline(cls: type, *, layers: int, channels: int, **parts: Callable[[], Any]) -> Any:
    """Make a pipeline, with another VAE or further parts where they are given."""
    transformer = _transformer(layers=layers, channels=channels)
    makers: dict[str, Callable[[], Any]] = {"vae": functools.partial(_vae, channels=channels), **parts}
    made = {name: make() for name, make in makers.items()}
    return cls(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip_text_encoder(layers=2, projects=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(layers=2, width=_BOTH_CLIPS),
        tokenizer_3=t5_tokenizer(),
        **made,
    )


def _making(cls: type, seed: int, *, layers: int = 2, channels: int = 4, **parts: Callable[[], Any]) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, layers=layers, channels=channels, **parts))


def _vae_without_spread() -> Any:
    return without_spread(_vae())


_inputs = functools.partial(prompted_inputs, negative_prompt="blurry", guidance_scale=5.0, max_sequence_length=32)

SD3 = PipelineCase(name="sd3", make_pipeline=_making(OmniStableDiffusion3Pipeline, 20, layers=3), make_inputs=_inputs(), outputs=as_tensors)
"""Text to image with guidance: three encoders, of two layers each, and three blocks."""

SD3_IMG2IMG = PipelineCase(
    name="sd3_img2img",
    make_pipeline=_making(OmniStableDiffusion3Img2ImgPipeline, 70),
    make_inputs=_inputs(image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture and text to image: two of three steps."""

SD3_INPAINT = PipelineCase(
    name="sd3_inpaint",
    make_pipeline=_making(OmniStableDiffusion3InpaintPipeline, 71, channels=16),
    make_inputs=_inputs(image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture: two of three steps."""

SD3_CONTROLNET = PipelineCase(
    name="sd3_controlnet",
    make_pipeline=_making(OmniStableDiffusion3ControlNetPipeline, 72, vae=_vae_without_spread, controlnet=_controlnet),
    make_inputs=_inputs(control_image=picture(), controlnet_conditioning_scale=0.7),
    outputs=as_tensors,
    expected_failures=SPREAD_IN_FLOAT64,
)
"""Control picture and text to image."""

SD3_MULTI_CONTROLNET = PipelineCase(
    name="sd3_multi_controlnet",
    make_pipeline=_making(OmniStableDiffusion3ControlNetPipeline, 73, vae=_vae_without_spread, controlnet=_controlnets),
    make_inputs=_inputs(control_image=[picture(), picture()], controlnet_conditioning_scale=[0.7, 0.4]),
    outputs=as_tensors,
    expected_failures={
        **SPREAD_IN_FLOAT64,
        **dict.fromkeys(
            ("check_save", "check_save_pretrained"),
            "diffusers' SD3MultiControlNetModel has no save_config, so that no such pipeline can be saved",
        ),
    },
)
"""Two control pictures and text to image."""

SD3_CONTROLNET_INPAINT = PipelineCase(
    name="sd3_controlnet_inpaint",
    make_pipeline=_making(
        OmniStableDiffusion3ControlNetInpaintingPipeline,
        74,
        vae=_vae_without_spread,
        controlnet=functools.partial(_controlnet, extra_conditioning_channels=1),
    ),
    make_inputs=_inputs(control_image=picture(), control_mask=picture(), controlnet_conditioning_scale=0.7),
    outputs=as_tensors,
    expected_failures=SPREAD_IN_FLOAT64,
)
"""Into a masked picture, which is the control picture."""

SD3_PAG = PipelineCase(
    name="sd3_pag",
    make_pipeline=_making(OmniStableDiffusion3PAGPipeline, 75),
    make_inputs=_inputs(),
    outputs=as_tensors,
)
"""Text to image, with perturbed attention in the second block."""

SD3_PAG_IMG2IMG = PipelineCase(
    name="sd3_pag_img2img",
    make_pipeline=_making(OmniStableDiffusion3PAGImg2ImgPipeline, 76),
    make_inputs=_inputs(image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture and text to image, with perturbed attention in the second block: two of three steps."""
