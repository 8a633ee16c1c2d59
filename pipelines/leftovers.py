"""What upstream keeps on the device after an error."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["leaving_nothing"]


def leaving_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` that lets go, where upstream's ends in an error, of tensors on the device that upstream keeps then.

    Wan's VAE and those made after it keep features of the last frames on themselves while they work through a video; the pipeline
    keeps the present time. Both let go of them when they are done, and not where an exception ends the work.

    Args:
        function: The `__call__` that it stands for, with its signature.
    """
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except BaseException:
            self._current_timestep = None
            if hasattr(self.vae, "clear_cache"):
                self.vae.clear_cache()
            raise

    return call
