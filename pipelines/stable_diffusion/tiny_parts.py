"""Tiny components of the Stable Diffusion pipelines, for their cases."""

from collections.abc import Callable
from typing import Any

from diffusers import DDIMScheduler

from pipelines.tiny.components import autoencoder_kl, clip_text_encoder
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["SIZE", "make_pipeline"]

SIZE = 16
"""Height and width of the pictures, in pixels; latents have half of them."""


def make_pipeline(cls: type, makers: dict[str, Callable[[], Any] | None]) -> Any:
    """Return a pipeline of the usual components, or of others.

    Args:
        cls: Its class.
        makers: Makers of further components by name, or of others in place of the usual ones; None: it has no such component.
    """
    usual: dict[str, Callable[[], Any] | None] = {
        "vae": lambda: autoencoder_kl(widths=(8, 16)),
        "text_encoder": lambda: clip_text_encoder(layers=2),
        "tokenizer": clip_tokenizer,
        "unet": unet_2d,
        "scheduler": lambda: DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        "safety_checker": lambda: None,
        "feature_extractor": lambda: None,
        "requires_safety_checker": lambda: False,
    }
    others = {name: make for name, make in usual.items() if name not in makers}
    return cls(**{name: make() for name, make in {**makers, **others}.items() if make is not None})
