"""What upstream leaves behind where a call ends in an error: tensors on the device, the VAE in another type, other attention."""

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["casting_back", "keeping_attention", "leaving_nothing"]

_CLEARING = ("clear_cache", "_clear_conv_cache")
"""Methods of VAEs that let go of what they keep: of Wan's and those made after it, of EasyAnimate's."""


def leaving_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that lets go, where upstream's ends in an error, of tensors on the device that upstream keeps then.

    Some VAEs keep features of the last frames on themselves while they work through a video; the pipeline keeps the present time.
    Both let go of them when they are done, and not where an exception ends the work. A guider keeps its last time until the next.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except BaseException:
            self._current_timestep = None
            if (guider := getattr(self, "guider", None)) is not None:
                guider.set_state(step=None, num_inference_steps=None, timestep=None)
            for name in _CLEARING:
                if hasattr(self.vae, name):
                    getattr(self.vae, name)()
            raise

    return call


def casting_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` after whose errors the VAE has the type that it had before, and not the one that it works in.

    In float16 upstream casts the VAE to float32 before it works, where the VAE's configuration asks for it, and back where all
    went well.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        vae, dtype = self.vae, self.vae.dtype
        try:
            return function(self, *args, **kwargs)
        except BaseException:
            if dtype is torch.float16:  # the only type that is left
                vae.to(dtype)
            raise

    return call


def keeping_attention(function: Callable[..., Any], denoiser: str) -> Callable[..., Any]:
    """Return a `__call__` that puts back the attention of the denoiser where upstream's ends in an error.

    Upstream puts it back after the last step only. After an error the denoiser would go on with the other attention, in the next
    pipeline that uses it too.

    Args:
        function: The `__call__` that it stands for, with its signature.
        denoiser: Name of the component.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = getattr(self, denoiser)
        processors = model.attn_processors
        try:
            return function(self, *args, **kwargs)
        except BaseException:
            model.set_attn_processor(processors)
            raise

    return call
