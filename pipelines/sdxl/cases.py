"""Stable Diffusion XL cases: random weights, less than a hundred thousand parameters a component, pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, ModelMixin, T2IAdapter

from omni_offload.testing import PipelineCase
from pipelines.sdxl.pipeline_controlnet import (
    OmniStableDiffusionXLControlNetImg2ImgPipeline,
    OmniStableDiffusionXLControlNetInpaintPipeline,
    OmniStableDiffusionXLControlNetPAGImg2ImgPipeline,
    OmniStableDiffusionXLControlNetPAGPipeline,
    OmniStableDiffusionXLControlNetPipeline,
    OmniStableDiffusionXLControlNetUnionImg2ImgPipeline,
    OmniStableDiffusionXLControlNetUnionInpaintPipeline,
    OmniStableDiffusionXLControlNetUnionPipeline,
)
from pipelines.sdxl.pipeline_pag import (
    OmniStableDiffusionXLPAGImg2ImgPipeline,
    OmniStableDiffusionXLPAGInpaintPipeline,
    OmniStableDiffusionXLPAGPipeline,
)
from pipelines.sdxl.pipeline_sdxl import (
    OmniStableDiffusionXLAdapterPipeline,
    OmniStableDiffusionXLImg2ImgPipeline,
    OmniStableDiffusionXLInpaintPipeline,
    OmniStableDiffusionXLInstructPix2PixPipeline,
    OmniStableDiffusionXLPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_text_encoder, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.logs import NOTHING_IN_FLOAT32, keep_back
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import control_net, control_net_union, unet_2d

__all__ = [
    "ADAPTER",
    "CONTROLNET",
    "CONTROLNET_IMG2IMG",
    "CONTROLNET_INPAINT",
    "CONTROLNET_PAG",
    "CONTROLNET_PAG_IMG2IMG",
    "CONTROLNET_UNION",
    "CONTROLNET_UNION_IMG2IMG",
    "CONTROLNET_UNION_INPAINT",
    "IMG2IMG_FP16",
    "INPAINT",
    "INSTRUCT_PIX2PIX",
    "MULTI_CONTROLNET",
    "PAG",
    "PAG_IMG2IMG",
    "PAG_INPAINT",
    "TEXT_TO_IMAGE",
    "TEXT_TO_IMAGE_FP16",
]

_TIME_WIDTH = 4


_SIZES: dict[str, Any] = {
    "block_out_channels": (8, 24),
    "cross_attention_dim": 2 * TEXT_WIDTH,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": _TIME_WIDTH,
    "projection_class_embeddings_input_dim": 6 * _TIME_WIDTH + TEXT_WIDTH,
}
"""As SDXL's: attention in the lower level, and six numbers of sizes beside the pooled text."""


def _unet(**settings: Any) -> Any:
    return unet_2d(**_SIZES, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **settings)


def _control_net() -> Any:
    return control_net(**_SIZES)


def _control_net_union() -> Any:
    return control_net_union(**_SIZES)


def _adapter() -> Any:
    """Return an adapter for the UNet, whose two levels have a quarter of the pictures' height and width when it is added to them."""
    return ready(T2IAdapter(channels=[8, 24], num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"))


def _making(cls: type, seed: int, dtype: torch.dtype = torch.float32, **parts: Callable[[], Any]) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, lambda: _pipeline(cls, dtype, **parts))


def _pipeline(cls: type, dtype: torch.dtype, **parts: Callable[[], Any]) -> Any:
    """Make a pipeline, with another UNet or further parts where they are given."""
    with torch.inference_mode(mode=False):  # the CPU's float16 kernels take inference tensors in that mode only
        components: dict[str, Any] = {
            "vae": autoencoder_kl(widths=(8, 16)),
            "text_encoder": clip_text_encoder(layers=2),
            "text_encoder_2": clip_text_encoder(layers=2, projects=True, hidden_act="gelu"),
            "tokenizer": clip_tokenizer(),
            "tokenizer_2": clip_tokenizer(),
            "unet": parts.get("unet", _unet)(),
            "scheduler": DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            **{name: make() for name, make in parts.items() if name != "unet"},
        }
        if cls is not OmniStableDiffusionXLAdapterPipeline:
            components["add_watermarker"] = False
        pipeline: Any = cls(**components)
        keep_back(ModelMixin, NOTHING_IN_FLOAT32)
        for name in ("vae", "text_encoder", "text_encoder_2", "unet"):
            getattr(pipeline, name).to(dtype)
    return pipeline


_inputs = functools.partial(prompted_inputs, leave_out=("height", "width"), negative_prompt="blurry")

TEXT_TO_IMAGE = PipelineCase(
    name="sdxl",
    make_pipeline=_making(OmniStableDiffusionXLPipeline, 20),
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

INPAINT = PipelineCase(
    name="sdxl_inpaint",
    make_pipeline=_making(OmniStableDiffusionXLInpaintPipeline, 80, unet=functools.partial(_unet, in_channels=9)),
    make_inputs=_inputs(
        image=picture(width=16, height=16),
        mask_image=picture(width=16, height=16),
        height=16,
        width=16,
        strength=0.7,
        num_inference_steps=3,
    ),
    outputs=as_tensors,
)
"""Into a masked picture, with a UNet that sees mask and picture: two of three steps."""

INSTRUCT_PIX2PIX = PipelineCase(
    name="sdxl_instruct_pix2pix",
    make_pipeline=_making(OmniStableDiffusionXLInstructPix2PixPipeline, 81, unet=functools.partial(_unet, in_channels=8)),
    make_inputs=_inputs(image=picture(width=16, height=16), height=16, width=16),
    outputs=as_tensors,
)
"""Editing a picture, with a UNet that sees it."""

ADAPTER = PipelineCase(
    name="sdxl_adapter",
    make_pipeline=_making(OmniStableDiffusionXLAdapterPipeline, 82, adapter=_adapter),
    make_inputs=_inputs(image=picture(width=16, height=16), height=16, width=16),
    outputs=as_tensors,
)
"""Text and a control picture to image, by an adapter."""

CONTROLNET = PipelineCase(
    name="sdxl_controlnet",
    make_pipeline=_making(OmniStableDiffusionXLControlNetPipeline, 83, controlnet=_control_net),
    make_inputs=_inputs(image=picture(width=16, height=16)),
    outputs=as_tensors,
)
"""Text and a control picture to image."""

MULTI_CONTROLNET = PipelineCase(
    name="sdxl_multi_controlnet",
    make_pipeline=_making(OmniStableDiffusionXLControlNetPipeline, 84, controlnet=lambda: [_control_net() for _ in range(2)]),
    make_inputs=_inputs(image=[picture(width=16, height=16), picture(width=16, height=16)], controlnet_conditioning_scale=[1.0, 0.5]),
    outputs=as_tensors,
)
"""Text and two control pictures to image, by two ControlNets."""

CONTROLNET_IMG2IMG = PipelineCase(
    name="sdxl_controlnet_img2img",
    make_pipeline=_making(OmniStableDiffusionXLControlNetImg2ImgPipeline, 85, controlnet=_control_net),
    make_inputs=_inputs(
        image=picture(width=16, height=16), control_image=picture(width=16, height=16), strength=0.7, num_inference_steps=3
    ),
    outputs=as_tensors,
)
"""Picture, text and a control picture to image: two of three steps."""

CONTROLNET_INPAINT = PipelineCase(
    name="sdxl_controlnet_inpaint",
    make_pipeline=_making(OmniStableDiffusionXLControlNetInpaintPipeline, 86, controlnet=_control_net),
    make_inputs=_inputs(
        image=picture(width=16, height=16),
        mask_image=picture(width=16, height=16),
        control_image=picture(width=16, height=16),
        height=16,
        width=16,
        strength=0.7,
        num_inference_steps=3,
    ),
    outputs=as_tensors,
)
"""Into a masked picture, with a control picture: two of three steps."""

CONTROLNET_UNION = PipelineCase(
    name="sdxl_controlnet_union",
    make_pipeline=_making(OmniStableDiffusionXLControlNetUnionPipeline, 87, controlnet=_control_net_union),
    make_inputs=_inputs(control_image=[picture(width=16, height=16), picture(width=16, height=16)], control_mode=[0, 1]),
    outputs=as_tensors,
)
"""Text and two control pictures of different kinds to image, by one ControlNet."""

CONTROLNET_UNION_IMG2IMG = PipelineCase(
    name="sdxl_controlnet_union_img2img",
    make_pipeline=_making(OmniStableDiffusionXLControlNetUnionImg2ImgPipeline, 88, controlnet=_control_net_union),
    make_inputs=_inputs(
        image=picture(width=16, height=16),
        control_image=[picture(width=16, height=16)],
        control_mode=[1],
        strength=0.7,
        num_inference_steps=3,
    ),
    outputs=as_tensors,
)
"""The same from a picture, with one control picture: two of three steps."""

CONTROLNET_UNION_INPAINT = PipelineCase(
    name="sdxl_controlnet_union_inpaint",
    make_pipeline=_making(OmniStableDiffusionXLControlNetUnionInpaintPipeline, 89, controlnet=_control_net_union),
    make_inputs=_inputs(
        image=picture(width=16, height=16),
        mask_image=picture(width=16, height=16),
        control_image=[picture(width=16, height=16)],
        control_mode=[1],
        height=16,
        width=16,
        strength=0.7,
        num_inference_steps=3,
    ),
    outputs=as_tensors,
)
"""The same into a masked picture, with one control picture: two of three steps."""

PAG = PipelineCase(
    name="sdxl_pag",
    make_pipeline=_making(OmniStableDiffusionXLPAGPipeline, 90),
    make_inputs=_inputs(height=16, width=16),
    outputs=as_tensors,
)
"""Text to image, with perturbed attention in the middle block."""

PAG_IMG2IMG = PipelineCase(
    name="sdxl_pag_img2img",
    make_pipeline=_making(OmniStableDiffusionXLPAGImg2ImgPipeline, 91),
    make_inputs=_inputs(image=picture(width=16, height=16), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture to image, with perturbed attention: two of three steps."""

PAG_INPAINT = PipelineCase(
    name="sdxl_pag_inpaint",
    make_pipeline=_making(OmniStableDiffusionXLPAGInpaintPipeline, 92, unet=functools.partial(_unet, in_channels=9)),
    make_inputs=_inputs(
        image=picture(width=16, height=16),
        mask_image=picture(width=16, height=16),
        height=16,
        width=16,
        strength=0.7,
        num_inference_steps=3,
    ),
    outputs=as_tensors,
)
"""Into a masked picture, with perturbed attention: two of three steps."""

CONTROLNET_PAG = PipelineCase(
    name="sdxl_controlnet_pag",
    make_pipeline=_making(OmniStableDiffusionXLControlNetPAGPipeline, 93, controlnet=_control_net),
    make_inputs=_inputs(image=picture(width=16, height=16)),
    outputs=as_tensors,
)
"""Text and a control picture to image, with perturbed attention."""

CONTROLNET_PAG_IMG2IMG = PipelineCase(
    name="sdxl_controlnet_pag_img2img",
    make_pipeline=_making(OmniStableDiffusionXLControlNetPAGImg2ImgPipeline, 94, controlnet=_control_net),
    make_inputs=_inputs(
        image=picture(width=16, height=16), control_image=picture(width=16, height=16), strength=0.7, num_inference_steps=3
    ),
    outputs=as_tensors,
)
"""Picture, text and a control picture to image, with perturbed attention: two of three steps."""
