"""DeepFloyd IF cases: random weights, a few ten thousand parameters a component, pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.pipelines.deepfloyd_if.safety_checker import IFSafetyChecker
from diffusers.pipelines.deepfloyd_if.watermark import IFWatermarker
from transformers import CLIPConfig

from omni_offload.testing import PipelineCase
from pipelines.deepfloyd_if.pipeline_if import (
    OmniIFImg2ImgPipeline,
    OmniIFImg2ImgSuperResolutionPipeline,
    OmniIFInpaintingPipeline,
    OmniIFInpaintingSuperResolutionPipeline,
    OmniIFPipeline,
    OmniIFSuperResolutionPipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, ready, t5_encoder
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import t5_tokenizer

__all__ = [
    "IF",
    "IF_IMG2IMG",
    "IF_IMG2IMG_SUPER_RESOLUTION",
    "IF_INPAINTING",
    "IF_INPAINTING_SUPER_RESOLUTION",
    "IF_SUPER_RESOLUTION",
    "IF_WATERMARK",
]

_SIZE = 16


def _unet(**settings: Any) -> Any:
    defaults = {
        "sample_size": _SIZE,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "in_channels": 3,
        "out_channels": 6,
        "cross_attention_dim": TEXT_WIDTH,
        "encoder_hid_dim": TEXT_WIDTH,
        "attention_head_dim": 8,
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "resnet_time_scale_shift": "scale_shift",
        "act_fn": "gelu",
        "norm_num_groups": 4,
    }
    return ready(UNet2DConditionModel(**{**defaults, **settings}))


def _upscaling_unet() -> Any:
    """Return a UNet that sees the smaller picture beside the noise, and how much noise that one has."""
    return _unet(in_channels=6, class_embed_type="timestep")


def _scheduler() -> Any:
    return DDPMScheduler(beta_schedule="squaredcos_cap_v2", variance_type="learned_range", thresholding=True)


def _safety_checker() -> Any:
    """Return a checker that objects to nothing."""
    tower = {"hidden_size": TEXT_WIDTH, "intermediate_size": 2 * TEXT_WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8, "projection_dim": TEXT_WIDTH}
    checker = ready(IFSafetyChecker(CLIPConfig(text_config=tower, vision_config=vision, projection_dim=TEXT_WIDTH)))
    with torch.no_grad():
        checker.p_head.bias -= 64
        checker.w_head.bias -= 64
    return checker


def _watermarker() -> Any:
    watermarker = IFWatermarker()
    watermarker.watermark_image.fill_(255)
    return watermarker.eval()


def _pipeline(cls: type, parts: dict[str, Callable[[], Any]]) -> Any:
    defaults: dict[str, Callable[[], Any]] = {"unet": _unet, "scheduler": _scheduler}
    without = dict.fromkeys(("safety_checker", "feature_extractor", "watermarker"))
    made = {**without, **{name: make() for name, make in {**defaults, **parts}.items()}}
    return cls(
        tokenizer=t5_tokenizer(max_length=77),
        text_encoder=t5_encoder(layers=2),
        requires_safety_checker=False,
        **made,
    )


_inputs = functools.partial(prompted_inputs, leave_out=("height", "width"), negative_prompt="blurry", clean_caption=False)


#: Cases that diffusers does not load from the folder that it has saved them in.
_NOT_LOADED = {
    "deepfloyd_if_watermark": "diffusers' IFSafetyChecker is not made for the loading of transformers 5",
    "deepfloyd_if_img2img_super_resolution": "upstream's class can be made without a watermark, but not loaded without one",
}


def _case(name: str, cls: type, seed: int, parts: dict[str, Callable[[], Any]], **arguments: Any) -> PipelineCase:
    failures = {"check_save_pretrained": _NOT_LOADED[name]} if name in _NOT_LOADED else {}
    make_pipeline = functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, parts))
    return PipelineCase(
        name=name, make_pipeline=make_pipeline, make_inputs=_inputs(**arguments), outputs=as_tensors, expected_failures=failures
    )


_UPSCALING: dict[str, Callable[[], Any]] = {"unet": _upscaling_unet, "image_noising_scheduler": DDPMScheduler}
_PICTURE = picture(width=_SIZE, height=_SIZE)
_SMALL = picture(width=_SIZE // 2, height=_SIZE // 2)

IF = _case("deepfloyd_if", OmniIFPipeline, 65, {})
"""Text to image with guidance: two blocks down, one in the middle, two up."""

IF_WATERMARK = _case(
    "deepfloyd_if_watermark",
    OmniIFPipeline,
    66,
    {"safety_checker": _safety_checker, "feature_extractor": clip_image_processor, "watermarker": _watermarker},
    output_type="pil",
    height=32,
    width=32,
)
"""Text to image, which the safety checker looks at before it is given a watermark."""

IF_SUPER_RESOLUTION = _case("deepfloyd_if_super_resolution", OmniIFSuperResolutionPipeline, 67, _UPSCALING, image=_SMALL, noise_level=100)
"""The second stage: a picture of twice the size."""

IF_IMG2IMG = _case("deepfloyd_if_img2img", OmniIFImg2ImgPipeline, 68, {}, image=_PICTURE, num_inference_steps=3)
"""Picture and text to image: two of three steps."""

IF_IMG2IMG_SUPER_RESOLUTION = _case(
    "deepfloyd_if_img2img_super_resolution",
    OmniIFImg2ImgSuperResolutionPipeline,
    69,
    _UPSCALING,
    image=_SMALL,
    original_image=_PICTURE,
    noise_level=100,
    num_inference_steps=3,
)
"""The second stage after a picture: of twice the size."""

IF_INPAINTING = _case("deepfloyd_if_inpainting", OmniIFInpaintingPipeline, 70, {}, image=_PICTURE, mask_image=_PICTURE, strength=1.0)
"""Into a masked picture."""

IF_INPAINTING_SUPER_RESOLUTION = _case(
    "deepfloyd_if_inpainting_super_resolution",
    OmniIFInpaintingSuperResolutionPipeline,
    71,
    _UPSCALING,
    image=_SMALL,
    original_image=_PICTURE,
    mask_image=_PICTURE,
    noise_level=100,
    strength=1.0,
)
"""The second stage into a masked picture: of twice the size."""
