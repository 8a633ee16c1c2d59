"""One use of a component, from entry to exit."""

import threading
from typing import TYPE_CHECKING

import torch

from omni_offload.backends.failures import run_repeatable_steps
from omni_offload.backends.owners import Member

if TYPE_CHECKING:
    from omni_offload.backends.rotation import Rotation

__all__ = ["Activation"]


class Activation:
    """One use of a component. It holds the pipeline's lock, so that uses on one pipeline take turns.

    Attributes:
        rotation: The rotation of the pipeline that uses it.
        member: The component.
        thread: The thread that uses it.
    """

    def __init__(self, rotation: "Rotation", member: Member) -> None:
        self.rotation = rotation
        self.member = member
        self.thread = threading.get_ident()
        self._cached_casts = False

    def enter(self) -> bool:
        """Bring the component to the device and bind it there.

        Returns:
            Whether it is managed: another thread may have disabled the offload while this one waited.
        """
        self.rotation.lock.acquire(self)
        if self.rotation.manages(self.member):
            kind = self.rotation.accelerator.device.type
            if torch.is_autocast_enabled(kind):  # else nothing is cast, and a compiled graph would be made anew for the switch
                self._cached_casts = torch.is_autocast_cache_enabled()
                torch.set_autocast_cache_enabled(False)  # what is made of weights would stay on the device until the context ends
            self.rotation.onload(self.member, self)
            return True
        self.rotation.lock.release(self)
        return False

    def leave(self, error: BaseException | None = None) -> BaseException | None:
        """End the use. Idempotent; returns the first failure, after every step ran.

        Args:
            error: What ends it, if it ends by an error.
        """
        if error is not None:
            self.rotation.note_failure(error, self.member.owner.residency)
        return run_repeatable_steps(
            [
                (f"end the use of {self.member.name}", lambda: self.rotation.offload_when_done(self.member, self)),
                ("let autocast keep what it casts", self._cache_casts),
                ("let the next use in", lambda: self.rotation.lock.release(self)),
            ]
        )

    def _cache_casts(self) -> None:
        if self._cached_casts and self.thread == threading.get_ident():
            torch.set_autocast_cache_enabled(True)
        self._cached_casts = False
