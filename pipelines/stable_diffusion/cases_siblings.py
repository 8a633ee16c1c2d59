"""Cases of the pipelines over the components of Stable Diffusion: random weights, pictures of 16 x 16 pixels."""

import functools
from typing import Any

import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, LCMScheduler, T2IAdapter, UNet2DConditionModel
from transformers import DPTConfig, DPTForDepthEstimation

from pipelines.stable_diffusion.pipeline_controlnet import (
    OmniStableDiffusionControlNetImg2ImgPipeline,
    OmniStableDiffusionControlNetInpaintPipeline,
    OmniStableDiffusionControlNetPAGInpaintPipeline,
    OmniStableDiffusionControlNetPAGPipeline,
)
from pipelines.stable_diffusion.pipeline_guidance import (
    OmniStableDiffusionPAGImg2ImgPipeline,
    OmniStableDiffusionPAGInpaintPipeline,
    OmniStableDiffusionPAGPipeline,
    OmniStableDiffusionSAGPipeline,
)
from pipelines.stable_diffusion.pipeline_pictures import (
    OmniStableDiffusionDepth2ImgPipeline,
    OmniStableDiffusionImageVariationPipeline,
    OmniStableDiffusionInstructPix2PixPipeline,
    OmniStableDiffusionLatentUpscalePipeline,
    OmniStableDiffusionUpscalePipeline,
)
from pipelines.stable_diffusion.pipeline_variants import (
    OmniLatentConsistencyModelImg2ImgPipeline,
    OmniLatentConsistencyModelPipeline,
    OmniStableDiffusionAdapterPipeline,
    OmniStableDiffusionGLIGENPipeline,
    OmniStableDiffusionLDM3DPipeline,
    OmniStableDiffusionPanoramaPipeline,
)
from pipelines.stable_diffusion.tiny_parts import SIZE, UNCHECKED, Makers, sibling_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, clip_image_processor, clip_vision_encoder, ready
from pipelines.tiny.inputs import picture
from pipelines.tiny.unets import control_net, unet_2d

__all__ = [
    "ADAPTER",
    "CONTROLNET_IMG2IMG",
    "CONTROLNET_INPAINT",
    "CONTROLNET_PAG",
    "CONTROLNET_PAG_INPAINT",
    "DEPTH2IMG",
    "GLIGEN",
    "IMAGE_VARIATION",
    "INSTRUCT_PIX2PIX",
    "LATENT_CONSISTENCY",
    "LATENT_CONSISTENCY_IMG2IMG",
    "LATENT_UPSCALE",
    "LDM3D",
    "PAG",
    "PAG_IMG2IMG",
    "PAG_INPAINT",
    "PANORAMA",
    "SAG",
    "UPSCALE",
]

_SIZES: dict[str, Any] = {"height": SIZE, "width": SIZE}
_PICTURE = picture(width=SIZE, height=SIZE)
_SMALL = picture(width=SIZE // 2, height=SIZE // 2)
_IMAGE_ENCODER: Makers = {
    "image_encoder": lambda: clip_vision_encoder(layers=2, projects=True),
    "feature_extractor": clip_image_processor,
}


#: Arguments that these do not take.
_WITHOUT_SIZE: dict[str, Any] = {"height": None, "width": None}


def _masked_unet() -> Any:
    """Return a UNet that sees mask and picture."""
    return unet_2d(in_channels=9)


def _depth_estimator() -> Any:
    config = DPTConfig(
        hidden_size=TEXT_WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=TEXT_WIDTH,
        image_size=32,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5],
    )
    estimator = ready(DPTForDepthEstimation(config))
    with torch.no_grad():
        estimator.head.head[-2].weight.mul_(1000)  # else all depths are one in bfloat16, and the pipeline divides by their range
        estimator.head.head[-2].bias.add_(1)
    return estimator


def _latent_upscaling_unet() -> Any:
    """Return a UNet that takes what the text encoder pools, and noise levels, beside the time."""
    return ready(
        UNet2DConditionModel(
            act_fn="gelu",
            attention_head_dim=8,
            norm_num_groups=None,
            block_out_channels=(32, 32, 64, 64),
            layers_per_block=1,
            time_cond_proj_dim=128 + TEXT_WIDTH,
            conv_in_kernel=1,
            conv_out_kernel=1,
            cross_attention_dim=TEXT_WIDTH,
            down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
            in_channels=8,
            mid_block_type=None,
            only_cross_attention=False,
            out_channels=5,
            resnet_time_scale_shift="scale_shift",
            time_embedding_type="fourier",
            timestep_post_act="gelu",
            up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        )
    )


def _adapter() -> Any:
    return ready(T2IAdapter(in_channels=3, channels=[8, 16], num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter"))


def _few_steps() -> Makers:
    return {"unet": lambda: unet_2d(time_cond_proj_dim=32), "scheduler": LCMScheduler}


CONTROLNET_IMG2IMG = sibling_case(
    "controlnet_img2img",
    OmniStableDiffusionControlNetImg2ImgPipeline,
    85,
    {"controlnet": control_net},
    image=_PICTURE,
    control_image=_PICTURE,
    strength=0.7,
    num_inference_steps=3,
    **_WITHOUT_SIZE,
)
"""Text, a picture and a control picture to image."""

CONTROLNET_INPAINT = sibling_case(
    "controlnet_inpaint",
    OmniStableDiffusionControlNetInpaintPipeline,
    86,
    {"controlnet": control_net, "unet": _masked_unet},
    image=_PICTURE,
    mask_image=_PICTURE,
    control_image=_PICTURE,
)
"""Text and a control picture into a masked picture."""

CONTROLNET_PAG = sibling_case(
    "controlnet_pag",
    OmniStableDiffusionControlNetPAGPipeline,
    87,
    {"controlnet": control_net},
    image=_PICTURE,
    pag_scale=2.0,
)
"""Text and a control picture to image with both kinds of guidance."""

CONTROLNET_PAG_INPAINT = sibling_case(
    "controlnet_pag_inpaint",
    OmniStableDiffusionControlNetPAGInpaintPipeline,
    88,
    {"controlnet": control_net, "unet": _masked_unet},
    image=_PICTURE,
    mask_image=_PICTURE,
    control_image=_PICTURE,
    pag_scale=2.0,
)
"""Text and a control picture into a masked picture with both kinds of guidance."""

PAG = sibling_case("pag", OmniStableDiffusionPAGPipeline, 89, {}, pag_scale=2.0)
"""Text to image with both kinds of guidance."""

PAG_IMG2IMG = sibling_case(
    "pag_img2img",
    OmniStableDiffusionPAGImg2ImgPipeline,
    90,
    {},
    image=_PICTURE,
    strength=0.7,
    num_inference_steps=3,
    pag_scale=2.0,
    **_WITHOUT_SIZE,
)
"""Picture and text to image with both kinds of guidance."""

PAG_INPAINT = sibling_case(
    "pag_inpaint", OmniStableDiffusionPAGInpaintPipeline, 91, {"unet": _masked_unet}, image=_PICTURE, mask_image=_PICTURE, pag_scale=2.0
)
"""Into a masked picture with both kinds of guidance."""

SAG = sibling_case("sag", OmniStableDiffusionSAGPipeline, 92, {}, sag_scale=0.7)
"""Text to image; the UNet runs again on latents that are blurred where it looked."""

DEPTH2IMG = sibling_case(
    "depth2img",
    OmniStableDiffusionDepth2ImgPipeline,
    93,
    {
        **UNCHECKED,
        "unet": lambda: unet_2d(in_channels=5),
        "depth_estimator": _depth_estimator,
        "feature_extractor": clip_image_processor,
    },
    image=_PICTURE,
    strength=0.7,
    num_inference_steps=3,
    **_WITHOUT_SIZE,
)
"""Text, a picture and its depth to image."""

INSTRUCT_PIX2PIX = sibling_case(
    "instruct_pix2pix",
    OmniStableDiffusionInstructPix2PixPipeline,
    94,
    {"unet": lambda: unet_2d(in_channels=8)},
    image=_PICTURE,
    **_WITHOUT_SIZE,
)
"""A picture as a text says."""

UPSCALE = sibling_case(
    "upscale",
    OmniStableDiffusionUpscalePipeline,
    95,
    {
        **UNCHECKED,
        "vae": lambda: autoencoder_kl(widths=(8, 16), scaling_factor=0.08333),
        "unet": lambda: unet_2d(in_channels=7, num_class_embeds=1000),
        "low_res_scheduler": DDPMScheduler,
    },
    image=_SMALL,
    **_WITHOUT_SIZE,
)
"""Text and a picture to one of twice the size."""

LATENT_UPSCALE = sibling_case(
    "latent_upscale",
    OmniStableDiffusionLatentUpscalePipeline,
    96,
    {
        **UNCHECKED,
        "unet": _latent_upscaling_unet,
        "scheduler": functools.partial(EulerDiscreteScheduler, prediction_type="sample"),
    },
    image=_PICTURE,
    **_WITHOUT_SIZE,
)
"""Text and a picture to one of twice the size, by way of latents."""

IMAGE_VARIATION = sibling_case(
    "image_variation",
    OmniStableDiffusionImageVariationPipeline,
    97,
    {"text_encoder": None, "tokenizer": None, **_IMAGE_ENCODER},
    prompt=None,
    negative_prompt=None,
    image=_PICTURE,
)
"""A picture to one like it."""

ADAPTER = sibling_case(
    "adapter",
    OmniStableDiffusionAdapterPipeline,
    98,
    {"vae": lambda: autoencoder_kl(widths=(8, 8, 8, 8)), "adapter": _adapter},
    image=picture(width=64, height=64),
    height=64,
    width=64,
)
"""Text and a control picture to image, by an adapter: of 64 x 64 pixels, an eighth of which is the latents' size."""

LATENT_CONSISTENCY = sibling_case(
    "latent_consistency", OmniLatentConsistencyModelPipeline, 99, {**_few_steps(), "image_encoder": lambda: None}, negative_prompt=None
)
"""Text to image in two steps, with guidance as an input of the UNet."""

LATENT_CONSISTENCY_IMG2IMG = sibling_case(
    "latent_consistency_img2img",
    OmniLatentConsistencyModelImg2ImgPipeline,
    100,
    _few_steps(),
    negative_prompt=None,
    image=_PICTURE,
    **_WITHOUT_SIZE,
)
"""Picture and text to image in two steps."""

PANORAMA = sibling_case("panorama", OmniStableDiffusionPanoramaPipeline, 101, {}, circular_padding=True)
"""Text to a picture without a seam at its sides."""

LDM3D = sibling_case(
    "ldm3d",
    OmniStableDiffusionLDM3DPipeline,
    102,
    {"vae": lambda: autoencoder_kl(widths=(8, 16), in_channels=6, out_channels=6), "image_encoder": lambda: None},
    output_type="np",
)
"""Text to a picture and its depth."""

GLIGEN = sibling_case(
    "gligen",
    OmniStableDiffusionGLIGENPipeline,
    103,
    {"unet": lambda: unet_2d(attention_type="gated")},
    gligen_phrases=["a hat"],
    gligen_boxes=[[0.1, 0.1, 0.6, 0.6]],
    gligen_scheduled_sampling_beta=1.0,
)
"""Text, and phrases each in a box, to image."""
