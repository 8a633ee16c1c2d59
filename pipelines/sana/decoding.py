"""Sana's last step, in which upstream takes a lack of memory for a warning."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["raising_out_of_memory"]


def raising_out_of_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that raises the error where there is no room to decode.

    Upstream warns, and goes on without a picture, or with the one that it was given.

    Args:
        function: The `__call__` that it stands for, with its signature: its last steps are done here.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        output_type, return_dict = asked["output_type"], asked["return_dict"]
        if output_type == "latent":
            return function(*given.args, **given.kwargs)
        asked.update(output_type="latent", return_dict=True)
        result = function(*given.args, **given.kwargs)
        latents = result.images.to(self.vae.dtype)
        with torch.no_grad():
            image = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        if asked["use_resolution_binning"]:
            image = self.image_processor.resize_and_crop_tensor(image, asked["width"], asked["height"])
        result.images = self.image_processor.postprocess(image, output_type=output_type)
        return result if return_dict else (result.images,)

    return call
