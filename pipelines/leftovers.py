"""What upstream keeps on the device after an error."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["leaving_nothing"]

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
