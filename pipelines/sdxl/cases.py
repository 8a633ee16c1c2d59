"""Stable Diffusion XL cases: random weights, less than a hundred thousand parameters a component, pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, ModelMixin

from omni_offload.testing import PipelineCase
from pipelines.sdxl.pipeline_sdxl import OmniStableDiffusionXLImg2ImgPipeline, OmniStableDiffusionXLPipeline
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.logs import log_errors_only
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["IMG2IMG_FP16", "TEXT_TO_IMAGE", "TEXT_TO_IMAGE_FP16"]

_TIME_WIDTH = 4


def _unet() -> Any:
    """As SDXL's: attention in the lower level, and six numbers of sizes beside the pooled text."""
    return unet_2d(
        block_out_channels=(8, 24),
        cross_attention_dim=2 * TEXT_WIDTH,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_WIDTH,
        projection_class_embeddings_input_dim=6 * _TIME_WIDTH + TEXT_WIDTH,
    )


def _making(cls: type, seed: int, dtype: torch.dtype) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, lambda: _pipeline(cls, dtype))


def _pipeline(cls: type, dtype: torch.dtype) -> Any:
    with torch.inference_mode(mode=False):  # the CPU's float16 kernels take inference tensors in that mode only
        pipeline: Any = cls(
            vae=autoencoder_kl(widths=(8, 16)),
            text_encoder=clip_text_encoder(layers=2),
            text_encoder_2=clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
            tokenizer=clip_tokenizer(),
            tokenizer_2=clip_tokenizer(),
            unet=_unet(),
            scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            add_watermarker=False,
        )
        log_errors_only(ModelMixin)  # it warns of every cast, also where nothing must keep its type
        for name in ("vae", "text_encoder", "text_encoder_2", "unet"):
            getattr(pipeline, name).to(dtype)
    return pipeline


def _inputs(**arguments: Any) -> Callable[[Any], dict[str, Any]]:
    def make_inputs(_pipeline: Any) -> dict[str, Any]:
        common = {
            "prompt": "a red cat",
            "negative_prompt": "blurry",
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": generator(),
        }
        return {**common, **arguments}

    return make_inputs


TEXT_TO_IMAGE = PipelineCase(
    name="sdxl",
    make_pipeline=_making(OmniStableDiffusionXLPipeline, 20, torch.float32),
    make_inputs=_inputs(height=16, width=16),
    outputs=as_tensors,
)
"""Text to image, in float32."""

TEXT_TO_IMAGE_FP16 = PipelineCase(
    name="sdxl_fp16",
    make_pipeline=_making(OmniStableDiffusionXLPipeline, 20, torch.float16),
    make_inputs=_inputs(height=16, width=16),
    outputs=as_tensors,
)
"""Text to image in float16: the VAE is cast to float32 in mid-call, and back."""

IMG2IMG_FP16 = PipelineCase(
    name="sdxl_img2img_fp16",
    make_pipeline=_making(OmniStableDiffusionXLImg2ImgPipeline, 21, torch.float16),
    make_inputs=_inputs(image=picture(width=16, height=16), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture to image in float16: the VAE is cast twice in a call."""
