"""In which order a pipeline uses its components: the declared order at first, then what the last call did."""

import math
from collections.abc import Iterator, Sequence

__all__ = ["UseOrder"]


class UseOrder:
    """The expected sequence of uses, and where in it the present call stands. It is only a hint.

    Args:
        declared: Names in declared order.
    """

    def __init__(self, declared: Sequence[str]) -> None:
        self._expected = list(declared)
        self._next = 0
        self._seen: list[str] = []

    def begin(self) -> None:
        """Start a call."""
        self._next, self._seen = 0, []

    def use(self, name: str) -> None:
        """Note a use, and find the place in the expected sequence again."""
        if not self._seen or self._seen[-1] != name:
            self._seen.append(name)
        for index in (*range(max(self._next - 1, 0), len(self._expected)), *range(max(self._next - 1, 0))):
            if self._expected[index] == name:
                self._next = index + 1
                return

    def end(self) -> None:
        """Expect next time what this call, which went well, has done."""
        if self._seen:
            self._expected = self._seen
        self.begin()

    def upcoming(self) -> Iterator[str]:
        """Yield the names expected from here on, in order."""
        yield from self._expected[self._next :]

    def distance(self, name: str) -> float:
        """Return how many uses from now a name is expected; infinity where it is not."""
        try:
            return self._expected.index(name, self._next) - self._next
        except ValueError:
            return math.inf
