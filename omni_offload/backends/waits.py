"""Which thread another one waits for, where that can be told: it joins it, or wants the result of the future that it works on."""

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
from types import FrameType

__all__ = ["awaited_by"]

_JOIN = threading.Thread.join.__code__
_WANT = (Future.result.__code__, Future.exception.__code__)
_WORK = _WorkItem.run.__code__


def awaited_by(thread: int) -> int | None:
    """Return the thread without which another one cannot go on; None where there is none, or none can be told.

    It is told from the stacks of the threads. Waits with a timeout end by themselves and do not count.

    Args:
        thread: Identifier of the thread that waits.
    """
    frames = sys._current_frames()  # noqa: SLF001  (documented, for just this)
    try:
        for frame in _stack(frames.get(thread)):
            if frame.f_code is _JOIN and frame.f_locals.get("timeout") is None:
                joined: threading.Thread = frame.f_locals["self"]
                return joined.ident
            if frame.f_code in _WANT and frame.f_locals.get("timeout") is None:
                return _worker(frame.f_locals.get("self"), frames)
        return None
    finally:
        del frames  # it holds this frame, and what the others hold


def _worker(future: object, frames: Mapping[int, FrameType]) -> int | None:
    """Return the thread that works on a future of a thread pool."""
    for thread, innermost in frames.items():
        for frame in _stack(innermost):
            if frame.f_code is _WORK and getattr(frame.f_locals.get("self"), "future", None) is future is not None:
                return thread
    return None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
