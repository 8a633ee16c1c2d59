"""Qwen-Image pipelines that own their offloading: from text, from a picture, into a masked picture."""

from diffusers import QwenImageImg2ImgPipeline, QwenImageInpaintPipeline, QwenImagePipeline

from pipelines.qwen_image.parts import QwenImageParts, letting_go

__all__ = ["OmniQwenImageImg2ImgPipeline", "OmniQwenImageInpaintPipeline", "OmniQwenImagePipeline"]


class OmniQwenImagePipeline(QwenImageParts, QwenImagePipeline):
    """`QwenImagePipeline` that owns its offloading; the vision tower of its text encoder never runs, as the prompts are texts."""

    __call__ = letting_go(QwenImagePipeline.__call__)


class OmniQwenImageImg2ImgPipeline(QwenImageParts, QwenImageImg2ImgPipeline):
    """`QwenImageImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = letting_go(QwenImageImg2ImgPipeline.__call__)


class OmniQwenImageInpaintPipeline(QwenImageParts, QwenImageInpaintPipeline):
    """`QwenImageInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = letting_go(QwenImageInpaintPipeline.__call__)
