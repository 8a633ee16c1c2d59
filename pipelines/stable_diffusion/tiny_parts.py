"""Tiny components of the Stable Diffusion pipelines, and cases of the siblings."""

from collections.abc import Callable
from typing import Any

from diffusers import DDIMScheduler
from diffusers.pipelines.pipeline_utils import DeprecatedPipelineMixin

from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import autoencoder_kl, clip_text_encoder
from pipelines.tiny.logs import DEPRECATED, keep_back
from pipelines.tiny.tokenizers import clip_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["SIZE", "UNCHECKED", "Makers", "make_pipeline", "sibling_case"]

Makers = dict[str, Callable[[], Any] | None]
"""Makers of components by name; None: the pipeline has no such component."""

SIZE = 16
"""Height and width of the pictures, in pixels; latents have half of them."""

UNCHECKED: Makers = dict.fromkeys(("safety_checker", "feature_extractor", "requires_safety_checker"))
"""For the pipelines that know of no safety checker."""


def make_pipeline(cls: type, makers: Makers) -> Any:
    """Return a pipeline of the usual components, or of others.

    Args:
        cls: Its class.
        makers: Makers of further components by name, or of others in place of the usual ones; None: it has no such component.
    """
    usual: Makers = {
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


def sibling_case(name: str, cls: type, seed: int, makers: Makers, **arguments: Any) -> Any:
    """Return a case of a class of this family, with negative prompts; a picture has the size of the result.

    Args:
        name: Its name, after the family's.
        cls: The class.
        seed: Of the weights.
        makers: As for `make_pipeline`.
        arguments: Further arguments of a call, or others in place of the usual ones; None: the pipeline does not take it.
    """

    def make() -> Any:
        keep_back(DeprecatedPipelineMixin, DEPRECATED)
        return make_pipeline(cls, makers)

    usual = {"negative_prompt": "blurry", "height": SIZE, "width": SIZE}
    given = {**usual, **arguments}
    leave_out = {key for key, value in given.items() if value is None} | ({"height", "width"} - given.keys())
    kept = {key: value for key, value in given.items() if value is not None}
    return prompted_case(f"stable_diffusion_{name}", make, seed=seed, leave_out=leave_out, **kept)
