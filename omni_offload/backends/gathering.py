"""The ranks that gather blocks with one another: their communicators, whether they are in step, and what is lost where they are not."""

import datetime as dt
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from omni_offload.accelerator import Accelerator
from omni_offload.backends.agreement import Agreement, Message
from omni_offload.backends.communicators import Communicators, World, backend_of_group, current_world
from omni_offload.backends.failures import raise_error
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.errors import OffloadStateError
from omni_offload.ranks import begin_gather, gather_into
from omni_offload.residency.shards import Landing

__all__ = ["Gathering"]

_ADVICE = "disable the offload, load the weights and enable it again on all ranks"

_Result = TypeVar("_Result")


class Gathering:
    """A gather group, as long as one backend is enabled.

    It has two communicators of its own: one for weights on the device, and one on the host for what ranks tell one another, and
    for making blocks whole again. Neither is used by anyone else.

    Args:
        communicators: Those two.
        world: Where they go afterwards.
        agreement: What ranks tell one another.
        accelerator: The device.
        chunk_bytes: Most bytes that are gathered in one go.

    Attributes:
        rank: This rank's place in the group.
        size: How many ranks there are.
        chunk_bytes: As the argument.
        agreement: As the argument.
        ended: Why nothing is gathered any more; "" while the ranks are in step.
        failed: Whether it ended because the ranks came out of step.
        lost: The blocks that could not be made whole.
    """

    def __init__(
        self, communicators: Communicators, world: World, agreement: Agreement, accelerator: Accelerator, *, chunk_bytes: int
    ) -> None:
        self.rank, self.size = communicators.host.rank(), communicators.host.size()
        self.chunk_bytes = chunk_bytes
        self.agreement = agreement
        self.ended = ""
        self.failed = False
        self.lost: list[str] = []
        self._communicators = communicators
        self._world = world
        self._weights = communicators.weights
        self._host = communicators.host
        self._accelerator = accelerator
        self._on_host = backend_of_group(communicators.weights, accelerator.device) == "gloo"
        self._gathers = hashlib.sha256()
        self._count = 0

    @classmethod
    def open(cls, ranks: Sequence[int], accelerator: Accelerator, *, chunk_bytes: int, limit: dt.timedelta) -> "Gathering":
        """Take communicators that an earlier backend has given back, or make them; the ranks of the group wait for one another.

        Raises:
            OffloadStateError: Not all of them come within the limit, or torch has made another communicator for each.
        """
        try:
            world = current_world()
            communicators = world.take(ranks, accelerator.device, limit=limit)
        except Exception as error:
            raise OffloadStateError(
                f"not all of the ranks {', '.join(map(str, ranks))} came to enable offload within {limit.total_seconds():g} s: "
                f"{type(error).__name__}: {error}"
            ) from error
        one = cls(communicators, world, Agreement(communicators.host, ranks, limit), accelerator, chunk_bytes=chunk_bytes)
        if not one._on_host:
            one.agreement.agree("open a communicator", [f"torch's name of it, by how many the process has: {one._weights.group_name}"])
        return one

    # ---- gathers -----------------------------------------------------------------------------------------------------------

    def gather_block(self, name: str, work: Callable[[], None]) -> None:
        """Do what gathers a block on the device. However it fails, nothing is gathered any more.

        Raises:
            OffloadStateError: The ranks are not in step any more.
        """
        if self.ended:
            raise OffloadStateError(f"{name} cannot be gathered: {self.ended}")
        self._together(name, self._weights if self._on_host else None, work)

    def make_whole(self, name: str, work: Callable[[], _Result]) -> _Result:
        """Do what gathers a block on the host, which blocks. However it fails, nothing is gathered any more."""
        return self._together(name, self._host, work)

    def _together(self, name: str, checked: dist.ProcessGroup | None, work: Callable[[], _Result]) -> _Result:
        self._gathers.update(f"{name}\n".encode())
        self._count += 1

        def steps() -> _Result:
            if checked is not None:
                self._check_next(name, checked)
            return work()

        return self._stepping(steps)

    def _check_next(self, name: str, group: dist.ProcessGroup) -> None:
        """Find all ranks before the same gather: gloo ends the process where ranks gather other sizes."""
        own = torch.frombuffer(bytearray(self._gathers.digest()), dtype=torch.uint8)
        found = torch.zeros(own.numel() * self.size, dtype=torch.uint8)
        gather_into(found, own, group)
        others = [self.agreement.name(rank) for rank, one in enumerate(found.reshape(self.size, -1)) if not torch.equal(one, own)]
        if others:
            raise OffloadStateError(f"gather {self._count} is of {name} here, and of another block on {', '.join(others)}")

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> Landing:
        """Gather a chunk on the device, into which this rank's piece was copied last."""
        begin = functools.partial(begin_gather, whole, own, self._weights)
        return self._accelerator.gather(begin, whole.numel() - own.numel())

    def landed(self, landings: Sequence[Landing]) -> torch.Event:
        """Return an event that fires when chunks are there; the host blocks where their backend runs on the host."""
        return self._stepping(functools.partial(self._accelerator.end_gather, landings))

    def collect(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Gather a chunk on the host, which blocks."""
        gather_into(whole, own, self._host)

    def _stepping(self, work: Callable[[], _Result]) -> _Result:
        """Do what all ranks do together. However it fails, nobody knows how far the others are."""
        try:
            return work()
        except BaseException as error:
            self.end(f"a gather of weights failed ({type(error).__name__}: {error})", failed=True)
            self._stop(error)
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                raise OffloadStateError(f"{self.ended}; {_ADVICE}") from error
            raise

    def _stop(self, error: BaseException) -> None:
        """Let nothing write to memory that is given up next: end what is under way, and wait for the device.

        What fails in that is noted on the error that it is done for; an interrupt is raised.
        """
        steps = [("abort the gathers", self._weights.abort), ("wait for the device", self._accelerator.block)]
        second = run_cleanup_steps(steps)
        try:
            if second is not None:
                error.add_note(f"ending the gathers failed too: {second!r}")
            if not isinstance(second, Exception):
                raise_error(second)
        finally:
            del second  # no cycle with its traceback

    # ---- in step -----------------------------------------------------------------------------------------------------------

    def end(self, reason: str, *, failed: bool = False) -> None:
        """Gather nothing from here on; the first reason counts."""
        self.failed = self.failed or failed
        self.ended = self.ended or reason

    def lose(self, name: str) -> bool:
        """Whether a block cannot become whole again; its name is noted then."""
        if self.ended:
            self.lost.append(name)
        return bool(self.ended)

    def compare(self, step: str, error: BaseException | None = None) -> OffloadStateError | None:
        """Find out whether all ranks have made the same gathers; where they have not, nothing is gathered any more.

        Args:
            step: Where the ranks are.
            error: What this rank's call ended with.

        Returns:
            What is wrong; None where all ranks are in step.
        """
        try:
            messages = self.agreement.compare(step, f"{self._count} gathers, {self._gathers.hexdigest()}", error)
        except OffloadStateError as missing:
            self.end(str(missing), failed=True)
            return OffloadStateError(f"{step}: {self.ended}; {_ADVICE}")
        except BaseException:
            self.end(f"what the ranks say at {step} was not heard, for an interrupt", failed=True)
            raise
        facts = {(message.step, message.fact) for message in messages}
        if len(facts) > 1:
            counts = ", ".join(f"{self.agreement.name(r)} {m.fact.partition(',')[0]} ({m.step})" for r, m in enumerate(messages))
            self.end(f"the ranks have gathered other blocks, or in another order: {counts}", failed=True)
        if not self.failed:
            return None
        self.ended += "".join(self._reasons(messages))
        return OffloadStateError(f"{step}: {self.ended}; {_ADVICE}")

    def _reasons(self, messages: Sequence[Message]) -> Iterator[str]:
        """Yield what ranks failed with; not this one's, where that says nothing more."""
        for rank, message in enumerate(messages):
            if message.error and not (rank == self.rank and self.ended in message.error):
                yield f"; {self.agreement.name(rank)}: {message.error.removesuffix(f'; {_ADVICE}')}"

    def close(self) -> None:
        """Gather nothing any more, and leave the communicators to the next backend of these ranks. Idempotent.

        Those of ranks that came out of step are of no use to anyone: they stay, unused, until the world of processes is destroyed.
        """
        if not self.ended and not self.agreement.over:
            self._world.give_back(self._communicators, self.agreement.ranks, self.agreement.limit)
        self.end("the offload was disabled")
