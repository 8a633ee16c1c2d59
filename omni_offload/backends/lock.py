"""The lock that serialises the calls on one pipeline, and refuses a wait that cannot end."""

import threading
from collections.abc import Callable
from typing import TypeVar

from omni_offload.backends.waits import awaited_by
from omni_offload.errors import OffloadStateError

__all__ = ["CallLock"]

#: Seconds after which a thread that waits looks again whether it waits in vain: the other may have begun to wait since.
_LOOK_AGAIN = 0.2

_TABLE = threading.Condition()
_WAITING: dict[int, "CallLock"] = {}

_Result = TypeVar("_Result")


class _Brief:
    """The token of a hold that is no call."""


class CallLock:
    """A reentrant lock. A thread that would wait for a thread that waits for it gets an error instead.

    Every hold has a token, so that giving one up twice, or after an interrupt, is harmless.

    Args:
        name: What it guards, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: int | None = None
        self._tokens: list[object] = []

    def in_call(self) -> bool:
        """Whether the current thread is in a call, or uses a component."""
        with _TABLE:
            return self._thread == threading.get_ident() and not all(isinstance(token, _Brief) for token in self._tokens)

    def holds(self, token: object) -> bool:
        """Whether a hold has begun and not ended."""
        return token in self._tokens

    def after(self, token: object) -> list[object]:
        """Return the tokens of the holds that began within another and have not ended, the last one first."""
        tokens = self._tokens
        return tokens[tokens.index(token) + 1 :][::-1] if token in tokens else []

    def acquire(self, token: object) -> None:
        """Take the lock, or take it once more; blocks while another thread holds it.

        Raises:
            OffloadStateError: That thread waits, directly or through others, for a lock that this thread holds, or for this thread.
        """
        me = threading.get_ident()
        with _TABLE:
            try:
                while self._thread not in (None, me):
                    self._refuse_deadlock(me)
                    _WAITING[me] = self
                    _TABLE.wait(_LOOK_AGAIN)
            finally:
                _WAITING.pop(me, None)
            self._thread = me
            self._tokens.append(token)

    def release(self, token: object) -> None:
        """Give up one hold. A token that holds nothing does nothing."""
        with _TABLE:
            if token in self._tokens:
                self._tokens.remove(token)
            if not self._tokens and self._thread is not None:
                self._thread = None
                _TABLE.notify_all()

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Do something while no other thread is in a call; an interrupt anywhere leaves the lock free.

        Raises:
            OffloadStateError: As `acquire`.
        """
        token = _Brief()
        try:
            try:
                self.acquire(token)
                return work()
            finally:
                self.release(token)
        finally:  # where the first was interrupted
            self.release(token)

    def _refuse_deadlock(self, me: int) -> None:
        """Follow who waits for whom, from the thread that holds the lock; a wait that leads back here could not end."""
        seen: set[int] = set()
        thread = self._thread
        while thread is not None and thread not in seen:
            if thread == me:
                raise OffloadStateError(
                    f"a call on {self.name} waits for another thread's call, which waits for this thread: neither could end; call the "
                    "pipelines in the same order in every thread, or from one thread, and do not join a thread that uses a component "
                    "from within a call"
                )
            seen.add(thread)
            lock = _WAITING.get(thread)
            thread = lock._thread if lock is not None else awaited_by(thread)  # noqa: SLF001  (another lock of this class)
