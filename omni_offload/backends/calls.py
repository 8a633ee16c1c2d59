"""Which pipeline's call the current thread is in."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_offload.backends.rotation import Rotation

__all__ = ["current_rotation", "enter_call", "leave_call"]

_LOCAL = threading.local()


def _stack() -> list[tuple[object, "Rotation"]]:
    stack: list[tuple[object, Rotation]] = _LOCAL.__dict__.setdefault("stack", [])
    return stack


def current_rotation() -> "Rotation | None":
    """Return the rotation of the innermost call that runs in this thread, or None."""
    stack = _stack()
    return stack[-1][1] if stack else None


def enter_call(call: object, rotation: "Rotation") -> None:
    """Note that a call has begun in this thread."""
    _stack().append((call, rotation))


def leave_call(call: object) -> None:
    """Note that it has ended, and with it what an interrupt left inside. Idempotent."""
    stack = _stack()
    for index, (known, _) in enumerate(stack):
        if known is call:
            del stack[index:]
            return
