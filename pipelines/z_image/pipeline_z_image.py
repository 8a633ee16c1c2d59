"""Z-Image pipelines that own their offloading: from text, from a picture, into a masked picture."""

import functools
from typing import Any

from diffusers import ZImageImg2ImgPipeline, ZImageInpaintPipeline, ZImagePipeline

from pipelines.z_image.parts import ZImageParts, positions_of_a_call

__all__ = ["OmniZImageImg2ImgPipeline", "OmniZImageInpaintPipeline", "OmniZImagePipeline"]


class OmniZImagePipeline(ZImageParts, ZImagePipeline):
    """`ZImagePipeline` that owns its offloading."""

    @functools.wraps(ZImagePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with positions of its own."""
        with positions_of_a_call(self.transformer):
            return super().__call__(*args, **kwargs)


class OmniZImageImg2ImgPipeline(ZImageParts, ZImageImg2ImgPipeline):
    """`ZImageImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    @functools.wraps(ZImageImg2ImgPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with positions of its own."""
        with positions_of_a_call(self.transformer):
            return super().__call__(*args, **kwargs)


class OmniZImageInpaintPipeline(ZImageParts, ZImageInpaintPipeline):
    """`ZImageInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    @functools.wraps(ZImageInpaintPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline with positions of its own."""
        with positions_of_a_call(self.transformer):
            return super().__call__(*args, **kwargs)
