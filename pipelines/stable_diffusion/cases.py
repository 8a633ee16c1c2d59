"""Stable Diffusion cases: random weights, less than a hundred thousand parameters a component, most pictures of 16 x 16 pixels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderTiny, ModelMixin
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import CLIPConfig

from omni_offload.testing import PipelineCase
from pipelines.stable_diffusion.pipeline_controlnet import OmniStableDiffusionControlNetPipeline
from pipelines.stable_diffusion.pipeline_stable_diffusion import (
    OmniStableDiffusionImg2ImgPipeline,
    OmniStableDiffusionInpaintPipeline,
    OmniStableDiffusionPipeline,
)
from pipelines.stable_diffusion.tiny_parts import make_pipeline
from pipelines.tiny.cases import prompted_inputs
from pipelines.tiny.components import TEXT_WIDTH, clip_image_processor, clip_vision_encoder, ready
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.logs import NOTHING_IN_FLOAT32, keep_back
from pipelines.tiny.seeding import seeded, seeded_pipeline
from pipelines.tiny.tokenizers import CLIP_BOS, CLIP_EOS, CLIP_VOCABULARY_SIZE
from pipelines.tiny.unets import control_net, ip_adapter, unet_2d

__all__ = ["CONTROLNET", "IMG2IMG", "INPAINT", "IP_ADAPTER", "MULTI_CONTROLNET", "SAFETY_CHECKER", "TEXT_TO_IMAGE", "TINY_AUTOENCODER"]


def _pipeline(cls: type, seed: int, **parts: Callable[[], Any]) -> Any:
    return seeded_pipeline(seed, lambda: make_pipeline(cls, dict(parts)))


def _safety_checker() -> Any:
    """Make a checker that finds one of its concepts in the first picture of the case, and none in the second."""
    keep_back(StableDiffusionSafetyChecker, "Potential NSFW content was detected")
    tower = {"hidden_size": TEXT_WIDTH, "intermediate_size": 2 * TEXT_WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": CLIP_VOCABULARY_SIZE, "bos_token_id": CLIP_BOS, "eos_token_id": CLIP_EOS}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    checker = ready(
        StableDiffusionSafetyChecker(CLIPConfig(text_config={**tower, **tokens}, vision_config=vision, projection_dim=TEXT_WIDTH))
    )
    with torch.no_grad():
        checker.concept_embeds.normal_()
        checker.concept_embeds_weights[3] = 0.034  # half way between the two pictures
    return checker


def _make_text_to_image() -> Any:
    return _pipeline(OmniStableDiffusionPipeline, 10)


def _make_img2img() -> Any:
    return _pipeline(OmniStableDiffusionImg2ImgPipeline, 11)


def _make_inpaint() -> Any:
    """Nine channels into the UNet: noise, mask, masked picture."""
    return _pipeline(OmniStableDiffusionInpaintPipeline, 12, unet=lambda: unet_2d(in_channels=9))


def _make_controlnet() -> Any:
    return _pipeline(OmniStableDiffusionControlNetPipeline, 13, controlnet=control_net)


def _make_multi_controlnet() -> Any:
    return _pipeline(OmniStableDiffusionControlNetPipeline, 14, controlnet=lambda: [control_net() for _ in range(2)])


def _make_ip_adapter() -> Any:
    pipeline = _pipeline(
        OmniStableDiffusionPipeline,
        15,
        image_encoder=lambda: clip_vision_encoder(layers=2, projects=True),
        feature_extractor=clip_image_processor,
    )
    keep_back(ModelMixin, NOTHING_IN_FLOAT32)
    with seeded(16):
        pipeline.load_ip_adapter(ip_adapter(pipeline.unet), subfolder="", weight_name="")
    return pipeline


def _make_safety_checker() -> Any:
    return _pipeline(OmniStableDiffusionPipeline, 17, safety_checker=_safety_checker, feature_extractor=clip_image_processor)


def _tiny_autoencoder() -> Any:
    """Return one of four levels: in tiles it counts on a factor of eight."""
    widths, blocks = (8, 8, 8, 8), (1, 1, 1, 1)
    return ready(
        AutoencoderTiny(
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            num_encoder_blocks=blocks,
            num_decoder_blocks=blocks,
        )
    )


def _make_tiny_autoencoder() -> Any:
    return _pipeline(OmniStableDiffusionPipeline, 18, vae=_tiny_autoencoder)


_inputs = functools.partial(prompted_inputs, leave_out=("height", "width"), negative_prompt="blurry")


def _images_and_findings(result: Any) -> list[torch.Tensor]:
    return [*as_tensors(result), torch.tensor(result.nsfw_content_detected).float()]


TEXT_TO_IMAGE = PipelineCase(
    name="stable_diffusion", make_pipeline=_make_text_to_image, make_inputs=_inputs(height=16, width=16), outputs=as_tensors
)
"""Text to image."""

IP_ADAPTER = PipelineCase(
    name="stable_diffusion_ip_adapter",
    make_pipeline=_make_ip_adapter,
    make_inputs=_inputs(height=16, width=16, ip_adapter_image=picture(width=16, height=16)),
    outputs=as_tensors,
    expected_failures={"check_save_pretrained": "diffusers does not load an adapter of pictures with the UNet; it is to be loaded again"},
)
"""Text and a picture prompt to image."""

SAFETY_CHECKER = PipelineCase(
    name="stable_diffusion_safety_checker",
    make_pipeline=_make_safety_checker,
    make_inputs=_inputs(prompt=["a red cat", "two blue dogs"], negative_prompt=["blurry", "grey"], height=32, width=32),
    outputs=_images_and_findings,
)
"""Two texts to images, one of which the safety checker blackens; of 32 x 32 pixels, as it sees."""

TINY_AUTOENCODER = PipelineCase(
    name="stable_diffusion_tiny_autoencoder",
    make_pipeline=_make_tiny_autoencoder,
    make_inputs=_inputs(height=64, width=64),
    outputs=as_tensors,
)
"""Text to image, with the small autoencoder that is for previews."""

IMG2IMG = PipelineCase(
    name="stable_diffusion_img2img",
    make_pipeline=_make_img2img,
    make_inputs=_inputs(image=picture(width=16, height=16), strength=0.7, num_inference_steps=3),
    outputs=as_tensors,
)
"""Picture to image: two of three steps."""

INPAINT = PipelineCase(
    name="stable_diffusion_inpaint",
    make_pipeline=_make_inpaint,
    make_inputs=_inputs(image=picture(width=16, height=16), mask_image=picture(width=16, height=16), height=16, width=16),
    outputs=as_tensors,
)
"""Into a masked picture, with a UNet that sees mask and picture."""

CONTROLNET = PipelineCase(
    name="stable_diffusion_controlnet",
    make_pipeline=_make_controlnet,
    make_inputs=_inputs(image=picture(width=16, height=16)),
    outputs=as_tensors,
)
"""Text and a control picture to image."""

MULTI_CONTROLNET = PipelineCase(
    name="stable_diffusion_multi_controlnet",
    make_pipeline=_make_multi_controlnet,
    make_inputs=_inputs(image=[picture(width=16, height=16), picture(width=16, height=16)], controlnet_conditioning_scale=[1.0, 0.5]),
    outputs=as_tensors,
)
"""Text and two control pictures to image, by two ControlNets."""
