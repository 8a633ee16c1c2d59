"""The best resident blocks for given slots and bytes, by search over the recurrence: it knows nothing of the framework.

Streamed blocks are numbered k = 0, 1, ... over all steps. A copy starts when the engine is free and the slot's last block is done;
a block runs when its copy has landed and the blocks before it are done::

    A[k] = max(A[k-1], C[k-slots]) + t[k]
    C[k] = max(C[k-1] + residents between, A[k]) + c[k]

Where no more blocks stream than there are slots, each keeps its slot, and nothing is copied after the first step. Small rings are
searched exhaustively; for others many annealings run side by side, from placements at random, at even distances, and of even flow.
"""

from collections.abc import Sequence

import attrs
import numpy as np

__all__ = ["Best", "best_residents", "step_times"]

#: Rings up to so many blocks are searched exhaustively.
_EXHAUSTIVE = 14
#: Annealings side by side, their moves, and the first and the last temperature as parts of a step.
_CHAINS, _MOVES, _HOT, _COLD = 128, 800, 0.03, 1e-4


@attrs.frozen(kw_only=True)
class Best:
    """What was found.

    Attributes:
        step: Seconds of a step in steady state.
        residents: Indices of the blocks that stay.
        tried: How many placements were simulated.
        exhaustive: Whether these were all that fit.
    """

    step: float
    residents: tuple[int, ...]
    tried: int
    exhaustive: bool


def step_times(
    compute: Sequence[float], copy: Sequence[float], residents: np.ndarray, slots: int, *, warm_up: int = 6, measured: int = 12
) -> np.ndarray:
    """Return the seconds of a step in steady state, for many placements at once.

    Args:
        compute: Seconds of each block, [N].
        copy: Seconds of each block's copy, [N].
        residents: Whether each block stays, [B, N].
        slots: Device buffers.
        warm_up: Steps before time is taken.
        measured: Steps that it is taken over: a multiple of the slots, as long as the pattern of slots needs to repeat.
    """
    copied = np.ascontiguousarray((~residents & (np.count_nonzero(~residents, axis=1) > slots)[:, None]).T)
    freed = [np.zeros(len(residents)) for _ in range(slots)]  # when the last blocks in the slots were done, in the order of use
    landed, now, start = np.zeros(len(residents)), np.zeros(len(residents)), np.zeros(len(residents))
    for step in range(warm_up + measured):
        if step == warm_up:
            start = now
        for streams, busy, seconds in zip(copied, compute, copy, strict=True):
            arrival = np.maximum(landed, freed[0]) + seconds
            landed = np.where(streams, arrival, landed)
            now = np.where(streams, np.maximum(now, arrival), now) + busy
            freed = [np.where(streams, later, earlier) for earlier, later in zip(freed, [*freed[1:], now], strict=True)]
    return (now - start) / measured


def device_bytes(sizes: np.ndarray, residents: np.ndarray, slots: int) -> np.ndarray:
    """Return the bytes of residents and slots, for many placements: a slot holds the largest streamed block."""
    largest = np.where(residents, 0, sizes).max(axis=1)
    return residents @ sizes + largest * np.minimum(slots, np.count_nonzero(~residents, axis=1))


def best_residents(
    compute: Sequence[float], copy: Sequence[float], sizes: Sequence[int], *, slots: int, nbytes: int, seed: int = 0
) -> Best:
    """Return the best placement within some bytes.

    Raises:
        ValueError: None fits.
    """
    search = _Search(np.array(compute), np.array(copy), np.array(sizes), slots, nbytes, np.random.default_rng(seed))
    return search.all() if len(sizes) <= _EXHAUSTIVE else search.anneal()


@attrs.define
class _Search:
    compute: np.ndarray
    copy: np.ndarray
    sizes: np.ndarray
    slots: int
    nbytes: int
    draw: np.random.Generator
    tried: int = 0

    def all(self) -> Best:
        """Try every placement."""
        blocks = len(self.sizes)
        every = (np.arange(2**blocks)[:, None] >> np.arange(blocks) & 1).astype(bool)
        return self._finish(every[self._fits(every)], exhaustive=True)

    def anneal(self) -> Best:
        """Improve many placements by adding, removing and swapping residents."""
        now = self._starts()
        seconds = self._quick(now)
        kept, record = now.copy(), seconds.copy()
        for temperature in np.geomspace(_HOT, _COLD, _MOVES) * seconds.min():
            if record.min() <= self._least() * 1.0005:
                break
            tried = self._moved(now)
            took = np.where(self._fits(tried), self._quick(tried), np.inf)
            accepted = took <= seconds - temperature * np.log(self.draw.random(len(now)))
            now[accepted], seconds[accepted] = tried[accepted], took[accepted]
            better = seconds < record
            kept[better], record[better] = now[better], seconds[better]
        return self._finish(kept[record <= record.min() * 1.01], exhaustive=False)

    def _least(self) -> float:
        """Return what no placement goes below: all computation, or the copies of what there is no room for beside the smallest slots."""
        room = self.nbytes - self.slots * self.sizes.min()
        return max(self.compute.sum(), (self.copy / self.sizes).min() * (self.sizes.sum() - room))

    def _quick(self, placements: np.ndarray) -> np.ndarray:
        self.tried += len(placements)
        return step_times(self.compute, self.copy, placements, self.slots, warm_up=2, measured=3)

    def _finish(self, placements: np.ndarray, *, exhaustive: bool) -> Best:
        if not len(placements):
            raise ValueError(f"no placement fits into {self.nbytes} bytes")
        seconds = step_times(self.compute, self.copy, placements, self.slots)
        self.tried += len(placements)
        best = int(seconds.argmin())
        return Best(
            step=float(seconds[best]), residents=tuple(np.flatnonzero(placements[best]).tolist()), tried=self.tried, exhaustive=exhaustive
        )

    def _fits(self, placements: np.ndarray) -> np.ndarray:
        return device_bytes(self.sizes, placements, self.slots) <= self.nbytes

    def _starts(self) -> np.ndarray:
        """Return placements that fit: for every size of slot, what is larger stays, and others in the order of one of the rules."""
        found = []
        rules = (self._at_random, self._evenly, self._flowing)
        for size in {0, *self.sizes.tolist()}:
            least = (self.sizes > size)[None]
            if not self._fits(least)[0]:
                continue
            for start in range(_CHAINS):
                residents = least.copy()
                for index in rules[start % len(rules)]():
                    residents[0, index] = True
                    residents[0, index] = self._fits(residents)[0] or least[0, index]
                found.append(residents[0])
        if not found:
            raise ValueError(f"no placement fits into {self.nbytes} bytes")
        return np.array([found[index] for index in self.draw.permutation(len(found))[:_CHAINS]])

    def _at_random(self) -> np.ndarray:
        return self.draw.permutation(len(self.sizes))

    def _evenly(self) -> np.ndarray:
        """Return golden steps around the ring: even at any number."""
        return np.argsort((np.arange(len(self.sizes)) * 0.618033988749895 + self.draw.random()) % 1)

    def _flowing(self) -> np.ndarray:
        """Return first the blocks at which copies are ahead of computation times some number, then the others at random."""
        rate = self.copy.sum() / self.compute.sum() * self.draw.random()
        sent, due, ahead = 0.0, self.draw.random() * self.copy.max(), []
        for copy, compute in zip(self.copy, self.compute, strict=True):
            due += rate * compute
            ahead.append(sent + copy > due)
            sent += 0.0 if ahead[-1] else copy
        order = self._at_random()
        chosen = np.array(ahead)[order]
        return np.concatenate((order[chosen], order[~chosen]))

    def _moved(self, placements: np.ndarray) -> np.ndarray:
        """Return placements with one block turned over, or with two: a resident leaves for another, mostly near by."""
        moved = placements.copy()
        rows, blocks = np.arange(len(moved)), moved.shape[1]
        first = self.draw.integers(blocks, size=len(moved))
        near = self.draw.geometric(0.3, size=len(moved)) * self.draw.choice([-1, 1], size=len(moved))
        second = np.where(self.draw.random(len(moved)) < 0.7, first + near, self.draw.integers(blocks, size=len(moved))) % blocks
        moved[rows, first] ^= True
        swapped = self.draw.random(len(moved)) < 0.7
        moved[rows[swapped], second[swapped]] = ~moved[rows[swapped], first[swapped]]
        third = self.draw.integers(blocks, size=len(moved))
        filled = self.draw.random(len(moved)) < 0.3
        moved[rows[filled], third[filled]] = True
        return moved
