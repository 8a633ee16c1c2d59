"""Qwen-Image cases: random weights, a few hundred thousand parameters, pictures of 32 x 32 pixels."""

import functools
from collections.abc import Callable
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageControlNetModel,
    QwenImageMultiControlNetModel,
    QwenImageTransformer2DModel,
)

from omni_offload.testing import PipelineCase
from pipelines.qwen_image.parts import forget_positions
from pipelines.qwen_image.pipeline_controlnet import OmniQwenImageControlNetInpaintPipeline, OmniQwenImageControlNetPipeline
from pipelines.qwen_image.pipeline_edit import (
    OmniQwenImageEditInpaintPipeline,
    OmniQwenImageEditPipeline,
    OmniQwenImageEditPlusPipeline,
    OmniQwenImageLayeredPipeline,
)
from pipelines.qwen_image.pipeline_qwen_image import (
    OmniQwenImageImg2ImgPipeline,
    OmniQwenImageInpaintPipeline,
    OmniQwenImagePipeline,
)
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import SPREAD_IN_FLOAT64, TEXT_WIDTH, ready, without_spread
from pipelines.tiny.inputs import as_tensors, miniature, picture
from pipelines.tiny.language import qwen25_vl_encoder, qwen25_vl_processor
from pipelines.tiny.seeding import seeded_pipeline
from pipelines.tiny.tokenizers import qwen_tokenizer

__all__ = [
    "QWEN_IMAGE",
    "QWEN_IMAGE_CONTROLNET",
    "QWEN_IMAGE_CONTROLNET_INPAINT",
    "QWEN_IMAGE_EDIT",
    "QWEN_IMAGE_EDIT_INPAINT",
    "QWEN_IMAGE_EDIT_PLUS",
    "QWEN_IMAGE_IMG2IMG",
    "QWEN_IMAGE_INPAINT",
    "QWEN_IMAGE_LAYERED",
    "QWEN_IMAGE_MULTI_CONTROLNET",
]

_BLOCKS: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 6, 6),
}


def _vae() -> Any:
    return ready(
        AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[1.5, 0.75, 2.0, 1.25],
        )
    )


def _transformer(**settings: Any) -> Any:
    return ready(QwenImageTransformer2DModel(**_BLOCKS, **{"num_layers": 3, **settings}))


def _controlnet(**settings: Any) -> Any:
    """Return a ControlNet; `ready` fills its projections, which begin as zeros, with noise: it would have no effect otherwise."""
    return ready(QwenImageControlNetModel(**_BLOCKS, num_layers=2, **settings))


def _union_controlnet() -> Any:
    """Return a ControlNet for several pictures: upstream's model of several takes a single one."""
    return QwenImageMultiControlNetModel([_controlnet()])


def _pipeline(cls: type, **parts: Callable[[], Any]) -> Any:
    """Make a pipeline, with other or further parts where they are given."""
    forget_positions()  # of whatever ran before in this process
    vae = parts.get("vae", _vae)()
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=qwen25_vl_encoder(layers=2),
        tokenizer=qwen_tokenizer(),
        transformer=parts.get("transformer", _transformer)(),
        **{name: make() for name, make in parts.items() if name not in ("vae", "transformer")},
    )


def _making(cls: type, seed: int, **parts: Callable[[], Any]) -> Callable[[], Any]:
    return functools.partial(seeded_pipeline, seed, functools.partial(_pipeline, cls, **parts))


def _small(cls: type, seed: int, **parts: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes a pipeline with a DiT of two blocks, which runs once a step."""
    smaller: dict[str, Callable[[], Any]] = {"transformer": functools.partial(_transformer, num_layers=2)}
    return _making(cls, seed, **{**smaller, **parts})


_inputs = functools.partial(prompted_inputs, leave_out=("height", "width"), true_cfg_scale=1.0, max_sequence_length=256)

_POSITIONS_STAY = {"check_release": "outside of calls upstream's cache of positions, which belongs to no object, stays on the device"}

_EDITING = {
    **_POSITIONS_STAY,
    "check_save_pretrained": "transformers does not save a processor that has no part for videos, which takes torchvision",
}
_NO_LIST = {
    **_POSITIONS_STAY,
    "check_save_pretrained": "upstream's ControlNet of several pictures is saved as the one it holds, and not made of it when it is loaded",
}

_SIZED: dict[str, Any] = {"height": 32, "width": 32}
_GUIDED: dict[str, Any] = {"negative_prompt": "blurry", "true_cfg_scale": 2.0}

QWEN_IMAGE = PipelineCase(
    name="qwen_image", make_pipeline=_making(OmniQwenImagePipeline, 25), make_inputs=_inputs(**_SIZED, **_GUIDED), outputs=as_tensors
)
"""Text to image with negative prompts: three blocks, each run twice a step."""

QWEN_IMAGE_IMG2IMG = PipelineCase(
    name="qwen_image_img2img",
    make_pipeline=_small(OmniQwenImageImg2ImgPipeline, 50),
    make_inputs=_inputs(**_SIZED, image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture and text to image: two of three steps."""

QWEN_IMAGE_INPAINT = PipelineCase(
    name="qwen_image_inpaint",
    make_pipeline=_small(OmniQwenImageInpaintPipeline, 51),
    make_inputs=_inputs(**_SIZED, image=picture(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Into a masked picture: two of three steps."""

QWEN_IMAGE_EDIT = PipelineCase(
    name="qwen_image_edit",
    make_pipeline=_small(OmniQwenImageEditPipeline, 52, processor=qwen25_vl_processor),
    make_inputs=_inputs(**_SIZED, **_GUIDED, image=miniature()),
    outputs=as_tensors,
    expected_failures=_EDITING,
)
"""Editing a picture with negative prompts: text encoder and DiT run twice."""

QWEN_IMAGE_EDIT_PLUS = PipelineCase(
    name="qwen_image_edit_plus",
    make_pipeline=_small(OmniQwenImageEditPlusPipeline, 53, processor=qwen25_vl_processor),
    make_inputs=_inputs(**_SIZED, image=[miniature(), miniature()]),
    outputs=as_tensors,
    expected_failures=_EDITING,
)
"""Editing two pictures."""

QWEN_IMAGE_EDIT_INPAINT = PipelineCase(
    name="qwen_image_edit_inpaint",
    make_pipeline=_small(OmniQwenImageEditInpaintPipeline, 54, processor=qwen25_vl_processor),
    make_inputs=_inputs(image=miniature(), mask_image=picture(), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
    expected_failures=_EDITING,
)
"""Editing a picture within a mask: two of three steps."""

QWEN_IMAGE_LAYERED = PipelineCase(
    name="qwen_image_layered",
    make_pipeline=_small(
        OmniQwenImageLayeredPipeline,
        55,
        processor=qwen25_vl_processor,
        transformer=functools.partial(_transformer, num_layers=2, use_layer3d_rope=True, use_additional_t_cond=True),
    ),
    make_inputs=_inputs(image=miniature(), layers=2),
    outputs=as_tensors,
    expected_failures=_EDITING,
)
"""A picture into two layers."""

QWEN_IMAGE_CONTROLNET = PipelineCase(
    name="qwen_image_controlnet",
    make_pipeline=_small(OmniQwenImageControlNetPipeline, 56, controlnet=_controlnet),
    make_inputs=_inputs(**_SIZED, control_image=picture(), controlnet_conditioning_scale=0.7),
    outputs=as_tensors,
    expected_failures=_POSITIONS_STAY,
)
"""Control picture and text to image."""

QWEN_IMAGE_MULTI_CONTROLNET = PipelineCase(
    name="qwen_image_multi_controlnet",
    make_pipeline=_small(OmniQwenImageControlNetPipeline, 57, controlnet=_union_controlnet),
    make_inputs=_inputs(**_SIZED, control_image=[picture(), picture()], controlnet_conditioning_scale=[0.7, 0.4]),
    outputs=as_tensors,
    expected_failures=_NO_LIST,
)
"""Two control pictures and text to image, by one ControlNet."""

QWEN_IMAGE_CONTROLNET_INPAINT = PipelineCase(
    name="qwen_image_controlnet_inpaint",
    make_pipeline=_small(
        OmniQwenImageControlNetInpaintPipeline,
        58,
        vae=lambda: without_spread(_vae()),
        controlnet=functools.partial(_controlnet, extra_condition_channels=4),
    ),
    make_inputs=_inputs(**_SIZED, control_image=picture(), control_mask=picture(), controlnet_conditioning_scale=0.7),
    outputs=as_tensors,
    expected_failures={**_POSITIONS_STAY, **SPREAD_IN_FLOAT64},
)
"""Into a masked picture, which is the control picture."""
