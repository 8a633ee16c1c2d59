"""What video autoencoders keep between the frames of one video."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["forgetting_frames"]


def forgetting_frames(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pipeline's `__call__` after an error of which the VAE lets go of the features that it keeps between frames.

    Wan's VAE and those made after it keep features of the last frames on themselves while they work through a video, on the
    device. They let go of them when they are done, and not where an exception ends the work.
    """

    @functools.wraps(call)
    def forgetting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except BaseException:
            self.vae.clear_cache()
            raise

    return forgetting
