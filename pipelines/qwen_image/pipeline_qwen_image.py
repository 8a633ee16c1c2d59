"""Qwen-Image pipelines that own their offloading: from text, from a picture, into a masked picture."""

import functools
from typing import Any

from diffusers import QwenImageImg2ImgPipeline, QwenImageInpaintPipeline, QwenImagePipeline

from pipelines.qwen_image.parts import QwenImageParts, letting_go

__all__ = ["OmniQwenImageImg2ImgPipeline", "OmniQwenImageInpaintPipeline", "OmniQwenImagePipeline"]


class OmniQwenImagePipeline(QwenImageParts, QwenImagePipeline):
    """`QwenImagePipeline` that owns its offloading; the vision tower of its text encoder never runs, as the prompts are texts."""

    @functools.wraps(QwenImagePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageImg2ImgPipeline(QwenImageParts, QwenImageImg2ImgPipeline):
    """`QwenImageImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    @functools.wraps(QwenImageImg2ImgPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageInpaintPipeline(QwenImageParts, QwenImageInpaintPipeline):
    """`QwenImageInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    @functools.wraps(QwenImageInpaintPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)
