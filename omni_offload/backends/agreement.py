"""What the ranks of a gather group tell one another on the host: whether a step went well, and whether all did the same."""

import datetime as dt
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist

from omni_offload.errors import OffloadStateError
from omni_offload.ranks import gather_into

__all__ = ["Agreement", "Message"]

#: Characters of an error that other ranks are told.
_TOLD = 2000

_Result = TypeVar("_Result")


@attrs.frozen
class Message:
    """What a rank says at a step.

    Attributes:
        step: The step that it is at.
        error: What failed there; "" where nothing did.
        fact: What is to be equal on all ranks.
    """

    step: str
    error: str = ""
    fact: str = ""


class Agreement:
    """The ranks of a group go through the same steps; where one fails, all fail, each with the error of that one.

    Args:
        group: A communicator of its own, on the host.
        ranks: The global ranks of the group, for messages.
        limit: How long a rank waits for the others at a step.

    Attributes:
        ranks: As the argument.
        limit: As the argument.
        over: Whether a step failed, so that nothing more is agreed on.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], limit: dt.timedelta) -> None:
        self._group = group
        self.ranks = tuple(ranks)
        self.limit = limit
        self.over = False

    def run(self, step: str, work: Callable[[], _Result], fact: Callable[[], Sequence[str]] = tuple) -> _Result:
        """Do a step; it has gone well once it has on every rank.

        Args:
            step: Its name.
            work: What is done.
            fact: Gives lines that are to be equal on all ranks afterwards.

        Raises:
            OffloadStateError: It failed on another rank, or the lines differ. What `work` or `fact` raise is raised as it is, after
                the others were told.
        """
        try:
            result = work()
            lines = fact()
        except BaseException as error:
            self.tell(step, error)
            raise
        self.agree(step, lines)
        return result

    def agree(self, step: str, lines: Sequence[str] = ()) -> None:
        """Find all ranks at the end of a step, with equal lines.

        Raises:
            OffloadStateError: The step failed on another rank, or the lines differ, or a rank does not come within the limit.
        """
        messages = self._exchange(Message(step, fact=hashlib.sha256("\n".join(lines).encode()).hexdigest()))
        self._raise_failures(step, messages)
        if len({message.fact for message in messages}) > 1:
            self.over = True
            told = [message.fact.split("\n") for message in self._exchange(Message(step, fact="\n".join(lines)))]
            raise OffloadStateError(f"{step}: the ranks do not do the same; {self._difference(told)}")

    def compare(self, step: str, fact: str, error: BaseException | None = None) -> list[Message]:
        """Return what every rank says at a step, in the order of ranks, whether it is equal or not.

        Raises:
            OffloadStateError: A rank does not come within the limit, or did not before.
        """
        if self.over:
            raise OffloadStateError(f"nothing is agreed on any more at {step!r}: a step failed before")
        return self._exchange(Message(step, _told(error), fact))

    def tell(self, step: str, error: BaseException) -> None:
        """Tell the others that a step failed here; what they say, or that they cannot be told, is noted on the error."""
        if self.over:
            return
        self.over = True
        try:
            messages = self._exchange(Message(step, _told(error)))
        except OffloadStateError as second:
            error.add_note(f"the other ranks could not be told: {second}")
            return
        for rank, message in enumerate(messages):
            if message.error and rank != self._group.rank():
                error.add_note(f"{self.name(rank)} failed too: {message.error}")

    def name(self, rank: int) -> str:
        """How messages call a rank of the group."""
        return f"rank {self.ranks[rank]}"

    def _raise_failures(self, step: str, messages: Sequence[Message]) -> None:
        failed = [f"{self.name(rank)} ({message.error})" for rank, message in enumerate(messages) if message.error]
        elsewhere = [f"{self.name(rank)} is at {m.step!r}" for rank, m in enumerate(messages) if m.step != step and not m.error]
        if failed or elsewhere:
            self.over = True
        if failed:
            raise OffloadStateError(f"{step} failed on {', '.join(failed)}, and so on all ranks")
        if elsewhere:
            raise OffloadStateError(f"this rank is at {step!r}, and {', '.join(elsewhere)}; do the same on all ranks, in the same order")

    def _difference(self, told: Sequence[Sequence[str]]) -> str:
        own = told[self._group.rank()]
        pairs = ((rank, pair) for rank, lines in enumerate(told) for pair in itertools.zip_longest(own, lines, fillvalue="(nothing)"))
        rank, (here, there) = next((rank, pair) for rank, pair in pairs if pair[0] != pair[1])
        return f"here is {here!r}, and on {self.name(rank)} {there!r}; load and configure the pipeline alike on all ranks"

    def _exchange(self, message: Message) -> list[Message]:
        """Hear every rank; the host blocks until all have come."""
        over, self.over = self.over, True  # an interrupt leaves nobody knows what behind
        try:
            own = torch.frombuffer(bytearray(json.dumps(attrs.astuple(message)).encode()), dtype=torch.uint8)
            lengths = torch.zeros(self._group.size(), dtype=torch.int64)
            gather_into(lengths, torch.tensor([own.numel()]), self._group)
            longest = int(lengths.max())
            everything = torch.zeros(longest * self._group.size(), dtype=torch.uint8)
            gather_into(everything, torch.cat([own, own.new_zeros(longest - own.numel())]), self._group)
            parts = everything.reshape(-1, longest)
            self.over = over
            return [Message(*json.loads(bytes(part[:length].tolist()))) for part, length in zip(parts, lengths.tolist(), strict=True)]
        except Exception as error:
            ranks, limit = ", ".join(map(str, self.ranks)), self.limit.total_seconds()
            raise OffloadStateError(
                f"not all of the ranks {ranks} came to {message.step!r} within {limit:g} s: {type(error).__name__}: {error}"
            ) from error


def _told(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"[:_TOLD]
