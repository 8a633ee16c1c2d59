"""The last step of Sana and Sana Video, in which upstream takes a lack of memory for a warning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["raising_out_of_memory"]


def raising_out_of_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that raises the error where there is no room to decode.

    Upstream warns, and goes on without a picture or video, or with the picture that it was given. That warning is an error here,
    for the time of the call; the filters of warnings are the process's, so that two such calls in two threads may miss it.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="(?s).*Try to use VAE tiling")
            try:
                return function(self, *args, **kwargs)
            except UserWarning as warning:
                if isinstance(warning.__context__, torch.OutOfMemoryError):
                    raise warning.__context__ from None
                raise

    return call
