"""Qwen-Image pipelines that edit pictures, and own their offloading."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import QwenImageEditInpaintPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageLayeredPipeline

from pipelines.qwen_image.parts import QwenImageParts, letting_go

__all__ = ["OmniQwenImageEditInpaintPipeline", "OmniQwenImageEditPipeline", "OmniQwenImageEditPlusPipeline", "OmniQwenImageLayeredPipeline"]


class OmniQwenImageEditPipeline(QwenImageParts, QwenImageEditPipeline):
    """`QwenImageEditPipeline` that owns its offloading; text encoder and VAE see the picture before the DiT runs."""

    __call__ = letting_go(QwenImageEditPipeline.__call__)


class OmniQwenImageEditPlusPipeline(QwenImageParts, QwenImageEditPlusPipeline):
    """`QwenImageEditPlusPipeline` that owns its offloading; text encoder and VAE see the pictures before the DiT runs."""

    __call__ = letting_go(QwenImageEditPlusPipeline.__call__)


class OmniQwenImageEditInpaintPipeline(QwenImageParts, QwenImageEditInpaintPipeline):
    """`QwenImageEditInpaintPipeline` that owns its offloading; text encoder and VAE see the picture before the DiT runs."""

    __call__ = letting_go(QwenImageEditInpaintPipeline.__call__)


class OmniQwenImageLayeredPipeline(QwenImageParts, QwenImageLayeredPipeline):
    """`QwenImageLayeredPipeline` that owns its offloading.

    The text encoder sees the picture only where it is to describe it, as there is no prompt.
    """

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "text_encoder": ("generate",),
        "": ("encode_prompt", "get_image_caption"),
    }

    __call__ = letting_go(QwenImageLayeredPipeline.__call__)
