"""Qwen-Image pipelines that edit pictures, and own their offloading."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import QwenImageEditInpaintPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImageLayeredPipeline

from pipelines.qwen_image.parts import QwenImageParts, letting_go

__all__ = ["OmniQwenImageEditInpaintPipeline", "OmniQwenImageEditPipeline", "OmniQwenImageEditPlusPipeline", "OmniQwenImageLayeredPipeline"]


class OmniQwenImageEditPipeline(QwenImageParts, QwenImageEditPipeline):
    """`QwenImageEditPipeline` that owns its offloading; text encoder and VAE see the picture before the DiT runs."""

    @functools.wraps(QwenImageEditPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageEditPlusPipeline(QwenImageParts, QwenImageEditPlusPipeline):
    """`QwenImageEditPlusPipeline` that owns its offloading; text encoder and VAE see the pictures before the DiT runs."""

    @functools.wraps(QwenImageEditPlusPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageEditInpaintPipeline(QwenImageParts, QwenImageEditInpaintPipeline):
    """`QwenImageEditInpaintPipeline` that owns its offloading; text encoder and VAE see the picture before the DiT runs."""

    @functools.wraps(QwenImageEditInpaintPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)


class OmniQwenImageLayeredPipeline(QwenImageParts, QwenImageLayeredPipeline):
    """`QwenImageLayeredPipeline` that owns its offloading.

    The text encoder sees the picture only where it is to describe it, as there is no prompt.
    """

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "text_encoder": ("generate",),
        "": ("encode_prompt", "get_image_caption"),
    }

    @functools.wraps(QwenImageLayeredPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, and let go of what it cached."""
        with letting_go(self.vae):
            return super().__call__(*args, **kwargs)
