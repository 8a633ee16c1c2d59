"""Cases of Stable unCLIP: random weights, pictures of 16 x 16 pixels."""

import functools
from typing import Any

from diffusers import DDPMScheduler
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer

from pipelines.stable_diffusion.pipeline_unclip import OmniStableUnCLIPImg2ImgPipeline, OmniStableUnCLIPPipeline
from pipelines.stable_diffusion.tiny_parts import SIZE, UNCHECKED, Makers, sibling_case
from pipelines.tiny.components import (
    TEXT_WIDTH,
    clip_image_processor,
    clip_text_encoder,
    clip_vision_encoder,
    prior_transformer,
    ready,
)
from pipelines.tiny.inputs import picture
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["UNCLIP", "UNCLIP_IMG2IMG"]

_Noising = functools.partial(DDPMScheduler, beta_schedule="squaredcos_cap_v2")


def _unet() -> Any:
    """Return a UNet that takes an embedding of a picture, and the level of noise in it, beside the time."""
    return unet_2d(class_embed_type="projection", projection_class_embeddings_input_dim=2 * TEXT_WIDTH)


_PARTS: Makers = {
    **UNCHECKED,
    "unet": _unet,
    "image_normalizer": lambda: ready(StableUnCLIPImageNormalizer(embedding_dim=TEXT_WIDTH)),
    "image_noising_scheduler": _Noising,
}

UNCLIP = sibling_case(
    "unclip",
    OmniStableUnCLIPPipeline,
    223,
    {
        **_PARTS,
        "prior_tokenizer": clip_tokenizer,
        "prior_text_encoder": lambda: clip_text_encoder(layers=2, projects=True),
        "prior": prior_transformer,
        "prior_scheduler": functools.partial(_Noising, variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0),
    },
    prior_num_inference_steps=2,
    noise_level=10,
)
"""Text to image, by way of the embedding of a picture."""

UNCLIP_IMG2IMG = sibling_case(
    "unclip_img2img",
    OmniStableUnCLIPImg2ImgPipeline,
    224,
    {
        **_PARTS,
        "image_encoder": lambda: clip_vision_encoder(layers=2, projects=True),
        "feature_extractor": clip_image_processor,
    },
    image=picture(width=SIZE, height=SIZE),
    noise_level=10,
)
"""Text and a picture to one like it."""
