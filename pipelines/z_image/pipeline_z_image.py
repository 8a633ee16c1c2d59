"""Z-Image pipelines that own their offloading: from text, from a picture, into a masked picture."""

from diffusers import ZImageImg2ImgPipeline, ZImageInpaintPipeline, ZImagePipeline

from pipelines.z_image.parts import ZImageParts, with_own_positions

__all__ = ["OmniZImageImg2ImgPipeline", "OmniZImageInpaintPipeline", "OmniZImagePipeline"]


class OmniZImagePipeline(ZImageParts, ZImagePipeline):
    """`ZImagePipeline` that owns its offloading."""

    __call__ = with_own_positions(ZImagePipeline.__call__)


class OmniZImageImg2ImgPipeline(ZImageParts, ZImageImg2ImgPipeline):
    """`ZImageImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = with_own_positions(ZImageImg2ImgPipeline.__call__)


class OmniZImageInpaintPipeline(ZImageParts, ZImageInpaintPipeline):
    """`ZImageInpaintPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = with_own_positions(ZImageInpaintPipeline.__call__)
