"""In which order the blocks of a ring run: the declared order at first, then what the last pass did."""

from collections.abc import Iterator, Sequence
from itertools import islice

__all__ = ["BlockOrder"]


class BlockOrder:
    """The expected sequence of blocks, which wraps, and where in it the present pass stands. It is only a hint.

    Args:
        blocks: How many blocks there are; their indices are their declared order.
        expected: What is expected first, where more is known than what was declared.
    """

    def __init__(self, blocks: int, expected: Sequence[int] = ()) -> None:
        self._declared = list(range(blocks))
        self._expected = [*expected] or self._declared
        self._next = 0
        self._seen: list[int] = []

    def begin(self) -> None:
        """Start a pass."""
        self._next, self._seen = 0, []

    def use(self, block: int) -> None:
        """Note that a block runs, and find the place in the sequence again; a block that is not in it makes the declared one expected."""
        self._seen.append(block)
        expected, at = self._expected, self._next
        if at < len(expected) and expected[at] == block:
            self._next = at + 1
            return
        if block not in expected:
            self._expected = expected = self._declared
            at = 0
        try:
            self._next = expected.index(block, at) + 1
        except ValueError:
            self._next = expected.index(block) + 1

    def end(self, *, learn: bool) -> None:
        """End a pass; what it did is expected next time, unless it was cut short."""
        if learn and self._seen:
            self._expected = self._seen
        self.begin()

    def upcoming(self) -> Iterator[int]:
        """Yield the blocks expected from here on, in order: to the end of the pass, and from the start of the next to here."""
        expected, at = self._expected, self._next
        yield from islice(expected, at, None)
        yield from islice(expected, at)
