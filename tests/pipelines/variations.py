"""Changes of a case's call that its signature, or its VAE, allows: how each is made, and what it takes."""

import inspect
import re

import attrs
import torch
from PIL import Image

_PER_PROMPT = re.compile(r"num_\w+_per_prompt")

_BATCHED = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2", "class_labels")
"""Arguments that have an entry for each sample."""

_PICTURES = ("image", "images")
"""What a batch is of where there are no prompts."""

_ALONG = (*_PICTURES, "original_image", "mask_image", "control_image", "hint", "video", "control_video", "mask")
_ALONG = (*_ALONG, "image_embeds", "negative_image_embeds")
"""What some pipelines want as often as prompts, and others once for all."""


TILED = ("tiled_decode", "_tiled_decode", "tiled_encode", "_tiled_encode")
"""Methods of VAEs that work in tiles; without one, `use_tiling` is there and nothing reads it."""


class StopError(Exception):
    """Raised in a callback."""


@attrs.define
class Call:
    """A call that is to be made on a pipeline.

    Attributes:
        steps: The steps at whose end the callback was called.
        error: What the callback raises.
        along: Whether a batch of prompts has pictures for each.
        doubled: Whether it is a batch already.
    """

    pipeline: object
    inputs: dict
    steps: list = attrs.field(factory=list)
    error: Exception | None = None
    along: bool = False
    doubled: bool = False

    @property
    def parameters(self):
        return inspect.signature(type(self.pipeline).__call__).parameters

    @property
    def per_prompt(self):
        """The argument that says how many samples are made of each prompt."""
        return next((name for name in self.parameters if _PER_PROMPT.fullmatch(name)), None)

    @property
    def batched(self):
        """The arguments of which a batch takes two."""
        given = [name for name in _BATCHED if self.inputs.get(name) is not None]
        return given or [name for name in _PICTURES if self.inputs.get(name) is not None]

    @property
    def callback(self):
        """The argument that takes what is called at the end of a step."""
        return next((name for name in ("callback_on_step_end", "callback") if name in self.parameters), None)

    def vaes(self, attribute):
        """The VAEs that can work in tiles, or one sample after the other."""
        parts = (getattr(self.pipeline, path) for path in self.pipeline._vae_modules)
        able = [part for part in parts if part is not None and hasattr(part, attribute)]
        return [part for part in able if attribute != "use_tiling" or any(hasattr(part, name) for name in TILED)]


def per_prompt(call):
    """Two samples of every prompt."""
    call.inputs[call.per_prompt] = 2


def batch(call):
    """Two samples, of different prompts where there are prompts."""
    if call.doubled:
        return
    call.doubled = True
    if "batch_size" in call.parameters:
        call.inputs["batch_size"] = 2
    for name in call.batched:
        call.inputs[name] = _two(call.inputs[name])
    for name in _ALONG if call.along else ():
        if call.inputs.get(name) is not None and name not in call.batched:
            video = isinstance(call.inputs[name], list)
            call.inputs[name] = [call.inputs[name]] * 2 if video else _two(call.inputs[name])


def _two(value):
    if isinstance(value, list) and len(value) > 1:
        return value
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value.flip(-1)])
    value = value[0] if isinstance(value, list) else value
    if isinstance(value, Image.Image):
        return [value, value.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    return [value, f"{value} twice"] if isinstance(value, str) else [value, value]


def callback(call):
    """A callback at the end of every step."""
    if call.callback == "callback":
        call.inputs["callback"] = lambda step, *_: _end_step(call, step)
    else:
        call.inputs["callback_on_step_end"] = lambda _, step, _time, values: (_end_step(call, step), values)[1]


def _end_step(call, step):
    call.steps.append(step)
    if call.error is not None:
        raise call.error


def failure(call):
    """A callback that raises at the end of the first step."""
    call.error = StopError()
    callback(call)


def tiling(call):
    """VAEs that work in tiles, smaller than what they work on."""
    for vae in call.vaes("use_tiling"):
        vae.enable_tiling()


def slicing(call):
    """VAEs that work on one sample after the other, of two."""
    batch(call)
    for vae in call.vaes("use_slicing"):
        vae.enable_slicing()


def shrink_tiles(vae, latent, sample):
    """Make a VAE's tiles smaller than what it decoded: two or three a side, which overlap where it is large enough for that.

    Args:
        vae: A VAE that can work in tiles.
        latent: The shape of what it decoded.
        sample: The shape of what it made of it.
    """
    axes = {"length": -1} if len(latent) == len(("batch", "channels", "length")) else {"height": -2, "width": -1}
    for name, axis in axes.items():
        size, ratio = latent[axis], sample[axis] // latent[axis]
        tile, overlap = (size * 3 // 16 * 4, 0.25) if size >= 8 else (max(size // 2, 1), 0.0)
        step = int(tile * (1 - overlap))
        sizes = {
            f"tile_latent_min_{name}": tile,
            f"tile_sample_min_{name}": tile * ratio,
            f"tile_sample_stride_{name}": step * ratio,
            f"tile_overlap_factor_{name}": overlap,
            "tile_latent_min_size": tile,
            "tile_sample_min_size": tile * ratio,
            "tile_overlap_factor": overlap,
            "tile_latent_overlap": tile - step,
            "tile_sample_overlap": (tile - step) * ratio,
        }
        for attribute, value in sizes.items():
            if hasattr(vae, attribute):
                setattr(vae, attribute, value)


VARIATIONS = {change.__name__: change for change in (tiling, slicing, batch, per_prompt, callback, failure)}


def why_not(name, call):
    """What is missing for a variation in a call's signature, its arguments or the pipeline's VAEs; None where it applies."""
    batches = bool(call.batched) or "batch_size" in call.parameters
    return {
        "tiling": None if call.vaes("use_tiling") else "no VAE that works in tiles",
        "slicing": None if call.vaes("use_slicing") and batches else "no VAE that works on one sample after the other, or no batch",
        "batch": None if batches else "no prompt, class label, picture or batch_size in its call",
        "per_prompt": None if call.per_prompt else "no num_..._per_prompt in its signature",
        "callback": None if call.callback else "no callback in its signature",
        "failure": None if call.callback else "no callback in its signature",
    }[name]
