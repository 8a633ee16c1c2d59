"""What is told of a device's copies, waits and uses while somebody records them."""

from typing import Protocol

import torch

__all__ = ["Meter", "Observer"]


class Meter(Protocol):
    """Counts device bytes."""

    @property
    def current(self) -> int:
        """Bytes held now."""


class Observer(Protocol):
    """Notes moments; the host does not block for it."""

    def call_begins(self) -> None:
        """Note that the outermost call on the pipeline begins in this thread."""

    def call_ends(self) -> None:
        """Note that it ends."""

    def begins(self, name: str, *, whole: bool = False) -> None:
        """Note that a component (`whole`) or a block runs from here on, on the current stream."""

    def ends(self, name: str) -> None:
        """Note that it has run; what it ran in goes on."""

    def copies_for(self, name: str) -> None:
        """Say whose weights this thread copies from here on."""

    def copy_begins(self, stream: torch.Stream, source: torch.Tensor, *, blocks: bool) -> None:
        """Note a copy to the device, or (where the source is there) to the host, and whether it keeps the host waiting."""

    def copy_ends(self, stream: torch.Stream, source: torch.Tensor) -> None:
        """Note that it is queued, or done where it keeps the host waiting."""

    def copies_wait(self, stream: torch.Stream) -> None:
        """Note that copies wait from here on, until what is overwritten is not in use any more."""

    def copies_go_on(self, stream: torch.Stream) -> None:
        """Note that they do not."""

    def gather_begins(self, stream: torch.Stream, work: object, nbytes: int) -> None:
        """Note a collective that may begin when the stream has done what is queued on it, and how much comes from other ranks."""

    def gather_ends(self, stream: torch.Stream, work: object) -> None:
        """Note that it is done when the stream has done what is queued on it."""

    def waits(self, name: str) -> None:
        """Note that the current stream waits for the copies of a component or a block from here on."""

    def has_waited(self) -> None:
        """Note that the current stream has waited."""

    def host_waits(self) -> None:
        """Note that the host waits from here on."""

    def host_goes_on(self) -> None:
        """Note that it does not."""

    def holds(self, meter: Meter) -> None:
        """Note what a meter counts now."""
