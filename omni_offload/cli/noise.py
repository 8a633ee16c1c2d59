"""What libraries say on import, or of their own future, that no user of the command line can act on."""

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator

__all__ = ["without_noise"]

_NOISE = (
    ("torchao", "Failed to load"),  # kernels for other accelerators than this machine's
    ("torch.utils._pytree", "is an Enum subclass"),  # torchao's own business with torch
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao` Tensor objects"),
    ("transformers.utils.import_utils", "requires torchvision (not installed); falling back"),
    ("diffusers.models.modeling_utils", "that should be kept in float32: []"),  # none
)
"""Logger, and what tells its message. Nothing here is about the user's model; whatever else is logged is shown, once."""

_LIBRARIES = ("diffusers", "transformers")


class _Filter(logging.Filter):
    """Drops the messages that hold a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()


class _Once(logging.Filter):
    """Drops the messages that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._seen
        self._seen.add(text)
        return new


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Keep back known noise, what was said before, warnings of libraries about their own future, and bars without a terminal.

    Loggers, warning filters and bars are as before when the body ends, also by an exception.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        for name, text in _NOISE:
            logger, noise = logging.getLogger(name), _Filter(text)
            logger.addFilter(noise)
            stack.callback(logger.removeFilter, noise)
        for name in _LIBRARIES:
            if importlib.util.find_spec(name):
                _say_once(name, stack)
        yield


def _say_once(name: str, stack: contextlib.ExitStack) -> None:
    """Let a library say everything once, and show no bars where there is no terminal."""
    log = importlib.import_module(f"{name}.utils.logging")
    log.get_logger(name)  # makes the library's handlers
    for handler in logging.getLogger(name).handlers:
        once = _Once()
        handler.addFilter(once)
        stack.callback(handler.removeFilter, once)
    if not sys.stderr.isatty() and log.is_progress_bar_enabled():
        log.disable_progress_bar()
        stack.callback(log.enable_progress_bar)
