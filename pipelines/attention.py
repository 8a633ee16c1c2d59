"""Pipelines that replace their denoiser's attention for the time of a call."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["keeping_attention"]


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
