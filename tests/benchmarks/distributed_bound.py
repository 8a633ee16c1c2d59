"""Blocks gathered from W ranks in virtual time: beside their bound, in one piece and in chunks, and beside streaming them rank-locally.

    python tests/benchmarks/distributed_bound.py [--part grid|chunks|crossing|ranks] [--write]

Everything runs through the distributed layerwise backend on the simulated device, whose clock counts computation, copies and gathers,
so that every figure is the same on every machine. `--write` writes the page and its drawing into docs/benchmarks. The exit status is 1
where a requirement does not hold.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import attrs
import torch
from distributed_bound_drawing import draw
from distributed_bound_ranks import ring_of as ranks_ring
from distributed_bound_ranks import run_ranks
from distributed_bound_ring import CHUNKS, Links, RanksRing, absent_ranks
from layerwise_bound_ring import CLEAN, COSTLY

from omni_offload import DLOTransfer

__all__ = ["Cell", "Chunked", "Crossing", "Ranks", "main", "measure_cell", "measure_chunks", "measure_crossing", "measure_ranks", "report"]

BLOCKS, COMPUTE, SLOTS, STEPS = 40, 10e-3, 3, 5
SIZES, RATIOS, LOADS, SHARES = (2, 4), (0.5, 1.0, 2.0, 8.0), (0.5, 1.0, 2.0), (0.0, 0.5)
PIECES = (1, 2, 4, 8, 16, 32)
#: The link to the host is so slow that blocks which are copied whole take twice their computation.
LOCAL_LOAD, CROSSING_RATIOS = 2.0, (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
TARGET = Path(__file__).parents[2] / "docs" / "benchmarks" / "distributed_layerwise.md"
PARTS = ("grid", "chunks", "crossing", "ranks")

#: Most that a step may take over its bound; less than the least would be no step at all.
MOST, LEAST = 1.05, 0.99
#: How far the crossing point may lie from where it is expected.
MOST_OFF = 0.02


@attrs.frozen(kw_only=True)
class Cell:
    """Forty equal blocks on some links. Steps are over their bound.

    Attributes:
        ranks: How many ranks.
        ratio: The link to the peers over that to the host.
        load: What a block takes on the links over its computation.
        share: The part of the blocks that stays.
        bound: Seconds that no schedule goes below.
        clean: A step where only copies, gathers and computations take time.
        costly: With what launches, copies and gathers cost besides.
        unchunked: As `clean`, each block in one piece.
        two: As `clean`, with two slots; and with two slots in one piece.
        races: In all of these runs.
    """

    ranks: int
    ratio: float
    load: float
    share: float
    bound: float
    clean: float
    costly: float
    unchunked: float
    two: tuple[float, float]
    races: int

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        where = f"{self.ranks} ranks, peer / host {self.ratio}, links / computation {self.load}, {self.share:.0%} resident"
        figures = {"clean": self.clean, "costly": self.costly}
        found = [f"{where}: {what} {over:.4f} not in {LEAST} to {MOST}" for what, over in figures.items() if not LEAST <= over <= MOST]
        return [*found, f"{where}: {self.races} races"] if self.races else found


@attrs.frozen(kw_only=True)
class Chunked:
    """Blocks whose copies, gathers and computation take equally long, in so many pieces: slots, and with what -> a step over its bound."""

    ranks: int
    pieces: int
    steps: Mapping[tuple[int, str], float]


@attrs.frozen(kw_only=True)
class Crossing:
    """All-gather beside rank-local streaming.

    Attributes:
        ranks: How many ranks.
        steps: The link to the peers over that to the host -> a step over all computation.
        local: A step of blocks that each rank copies whole, likewise.
        expected: Where both are equally fast: (W - 1) / W.
        found: Where they are.
    """

    ranks: int
    steps: Mapping[float, float]
    local: float
    expected: float
    found: float

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        off = abs(self.found / self.expected - 1)
        return [f"{self.ranks} ranks: the crossing is at {self.found:.4f}, not at {self.expected}"] if off > MOST_OFF else []


@attrs.frozen(kw_only=True)
class Ranks:
    """Real processes: what a step took on each rank with each backend, what it takes where the others are not there, and races."""

    size: int
    steps: Sequence[Sequence[float]]
    alone: float
    races: int

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        races = [f"{self.size} processes: {self.races} races"] if self.races else []
        if all(step == self.alone for steps in self.steps for step in steps):
            return races
        return [*races, f"{self.size} processes: steps of {self.steps}, and of one that is alone {self.alone}"]


def _links(ranks: int, ratio: float, load: float) -> Links:
    return Links.of(ranks, ratio=ratio, seconds=load * COMPUTE)


def measure_cell(ranks: int, ratio: float, load: float, share: float) -> Cell:
    """Measure forty equal blocks."""
    links, residents = _links(ranks, ratio, load), round(share * BLOCKS)
    chunked, whole = (RanksRing(BLOCKS, compute=COMPUTE, links=links, chunks=chunks) for chunks in (CHUNKS, 1))
    with absent_ranks(ranks):
        runs = (
            chunked.run(CLEAN, steps=STEPS, residents=residents, slots=SLOTS),
            chunked.run(COSTLY, steps=STEPS, residents=residents, slots=SLOTS),
            whole.run(CLEAN, steps=STEPS, residents=residents, slots=SLOTS),
            chunked.run(CLEAN, steps=STEPS, residents=residents, slots=2),
            whole.run(CLEAN, steps=STEPS, residents=residents, slots=2),
        )
    clean, costly, unchunked, *two = (run.over for run in runs)
    return Cell(
        ranks=ranks,
        ratio=ratio,
        load=load,
        share=share,
        bound=runs[0].bound,
        clean=clean,
        costly=costly,
        unchunked=unchunked,
        two=(two[0], two[1]),
        races=sum(run.races for run in runs),
    )


def measure_chunks(ranks: int, pieces: int) -> Chunked:
    """Measure blocks in so many pieces, whose copies, gathers and computation take equally long."""
    ring = RanksRing(BLOCKS, compute=COMPUTE, links=_links(ranks, ranks - 1, 1.0), chunks=pieces)
    with absent_ranks(ranks):
        steps = {
            (slots, name): ring.run(conditions, steps=STEPS, slots=slots).over
            for slots in (2, 3)
            for name, conditions in (("clean", CLEAN), ("costly", COSTLY))
        }
    return Chunked(ranks=ranks, pieces=pieces, steps=steps)


def measure_crossing(ranks: int, ratios: Sequence[float] = CROSSING_RATIOS) -> Crossing:
    """Measure all-gather for some ratios of the links, and find the one at which it is as fast as rank-local streaming."""
    host = Links.of(ranks, ratio=1.0, seconds=LOCAL_LOAD * COMPUTE, transfer=DLOTransfer.RANK_LOCAL).host

    def step(ratio: float, transfer: DLOTransfer = DLOTransfer.ALLGATHER) -> float:
        links = Links(ranks=ranks, host=host, peer=ratio * host)
        return RanksRing(BLOCKS, compute=COMPUTE, links=links, transfer=transfer).run(CLEAN, steps=STEPS).step / (BLOCKS * COMPUTE)

    with absent_ranks(ranks):
        local = step(1.0, DLOTransfer.RANK_LOCAL)
        steps = {ratio: step(ratio) for ratio in ratios}
        slow, fast = 0.125, 8.0
        while fast / slow > 1 + MOST_OFF / 4:
            middle = (slow * fast) ** 0.5
            slow, fast = (slow, middle) if step(middle) <= local else (middle, fast)
    return Crossing(ranks=ranks, steps=steps, local=local, expected=(ranks - 1) / ranks, found=(slow * fast) ** 0.5)


def measure_ranks(size: int) -> Ranks:
    """Run the ring with real processes, and with one that is alone."""
    with absent_ranks(size):
        alone = ranks_ring(size).run(CLEAN).step
    ranks = run_ranks(size)
    races = sum(run.races for runs in ranks for run in runs)
    return Ranks(size=size, steps=[[run.step for run in runs] for runs in ranks], alone=alone, races=races)


def report(cells: Sequence[Cell], chunked: Sequence[Chunked], crossings: Sequence[Crossing], processes: Sequence[Ranks]) -> str:
    """Return the document."""
    lines = [*_HEAD]
    lines += [
        f"| {c.ranks} | {c.ratio:g} | {c.load:g} | {c.share:.0%} | {c.bound * 1e3:.1f} | {c.clean:.4f} | {c.costly:.4f} | {c.unchunked:.4f} | "
        f"{c.two[0]:.4f} | {c.two[1]:.4f} |"
        for c in cells
    ]
    lines += _CHUNKED
    lines += [f"| {c.ranks} | {c.pieces} | {' | '.join(f'{c.steps[key]:.4f}' for key in _COLUMNS)} |" for c in chunked]
    lines += _CROSSING
    lines += [
        f"| {c.ranks} | {ratio:g} | {step:.4f} | {c.local:.4f} | {_faster(step, c.local)} |"
        for c in crossings
        for ratio, step in c.steps.items()
    ]
    lines += ["", *(f"Equally fast with {c.ranks} ranks: at {c.found:.3f}; expected {c.expected:g}." for c in crossings)]
    lines += _RANKS
    lines += [
        f"| {p.size} | {rank} | {' | '.join(f'{1e3 * step:.6f}' for step in steps)} | {1e3 * p.alone:.6f} |"
        for p in processes
        for rank, steps in enumerate(p.steps)
    ]
    return "\n".join([*lines, ""])


def _faster(gathered: float, local: float) -> str:
    return "both" if abs(gathered / local - 1) < MOST_OFF else "all-gather" if gathered < local else "rank-local"


_COLUMNS = ((2, "clean"), (2, "costly"), (3, "clean"), (3, "costly"))
_HEAD = (
    "# Gathered blocks beside their bound",
    "",
    "Written by `python tests/benchmarks/distributed_bound.py --write`. Virtual time on the simulated device: the figures are the same on",
    "every machine, and nothing here was measured on a real accelerator or over a real link. Everything runs through the distributed",
    "layerwise backend. One process is one rank; the other ranks are not there (torch's `fake` backend), and the device takes the time that a",
    "gather of W ranks takes: (W - 1) / W of its bytes over the link to the peers, one gather after another, beside copies and kernels. The",
    "[last table](#real-processes) shows that real ranks take the same.",
    "",
    f"omni-offload {version('omni-offload')}, torch {torch.__version__.partition('+')[0]}; pinned host memory.",
    "",
    "## Equal blocks",
    "",
    f"{BLOCKS} blocks that compute for {COMPUTE * 1e3:.0f} ms each, in {CHUNKS} chunks, with {SLOTS} slots. A block of b bytes takes t = max(b / (W host), b (W - 1) / (W peer)) on the links where",
    "the copy of a chunk and the gather of the one before it overlap. A step (the mean of all after the first; after the second where some",
    "blocks stay) over its bound: all computation, or the t of all blocks that stream. *Peer / host*: the speeds of the two links. *Links /",
    "computation*: t over what a block computes. *Clean*: only copies, gathers and computations take time. *Costly*: each launch costs the",
    f"host {COSTLY['launch'] * 1e6:.0f} us, each copy {COSTLY['copy_latency'] * 1e6:.0f} us and each gather {COSTLY['collective_latency'] * 1e6:.0f} us more; the bound is that without them. *Unchunked*: a block is gathered once all of it was",
    "copied, clean. *Two slots*: clean, in chunks and unchunked.",
    "",
    f"Required: clean and costly <= {MOST}.",
    "",
    "| ranks | peer / host | links / computation | resident | bound, ms | clean | costly | unchunked | two slots | two slots, unchunked |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
_CHUNKED = (
    "",
    "## In chunks, and in one piece",
    "",
    "Blocks whose copies, gathers and computation take equally long, where waiting shows most. With three slots the third one hides what is",
    "not overlapped within a block, and chunks gain nothing; with two, a block in n chunks takes 1 / (2 n) of the shorter of copy and gather",
    "more. What each copy and each gather costs besides grows with n: few and large chunks.",
    "",
    "| ranks | chunks | two slots, clean | two slots, costly | three slots, clean | three slots, costly |",
    "|---|---|---|---|---|---|",
)
_CROSSING = (
    "",
    "## All-gather beside rank-local",
    "",
    f"The link to the host is so slow that a block which each rank copies whole takes {LOCAL_LOAD:g} times its computation. Steps over all computation. Every",
    "rank has a link to its host of its own, as fast as if the others did nothing; where they share one, all-gather gains more.",
    "",
    "All-gather is the faster one where the link to the peers is faster than (W - 1) / W of that to the host: below, what is not copied takes",
    "longer to come from the others than from the host. On either side of that point it keeps only 1 / W of the blocks in a rank's memory.",
    "",
    "![A step over the ratio of the links](distributed_crossing.svg)",
    "",
    f"Required: the point where both are equally fast is within {MOST_OFF:.0%} of (W - 1) / W.",
    "",
    "| ranks | peer / host | all-gather | rank-local | faster |",
    "|---|---|---|---|---|",
)
_RANKS = (
    "",
    "## Real processes",
    "",
    "Twelve blocks whose copies, gathers and computation take 1 ms each, gathered by real processes over gloo, each with a simulated device and a",
    "clock of its own. A gather takes as long as if the others came at the same moment, which they do: ranks are alike. *gloo*: as a backend",
    "that gathers on the host, before each gather ranks compare which block it is. *Device*: as a backend that gathers on the device, the host",
    "goes on. Outputs are a resident run's, bit for bit.",
    "",
    "Required: to the last bit the step of a rank that is alone, as in the tables above.",
    "",
    "| ranks | rank | gloo: step, ms | device: step, ms | alone: step, ms |",
    "|---|---|---|---|---|",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say what is not met."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write {TARGET} and its drawing")
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this part only; again for another")
    asked = parser.parse_args(arguments)
    parts = asked.part or PARTS
    if asked.write and asked.part:
        parser.error("the document has all parts: leave --part out")
    cells = [measure_cell(w, r, load, s) for w in SIZES for r in RATIOS for load in LOADS for s in SHARES] if "grid" in parts else []
    chunked = [measure_chunks(ranks, pieces) for ranks in SIZES for pieces in PIECES] if "chunks" in parts else []
    crossings = [measure_crossing(ranks) for ranks in SIZES] if "crossing" in parts else []
    processes = [measure_ranks(size) for size in SIZES] if "ranks" in parts else []
    text = report(cells, chunked, crossings, processes)
    sys.stdout.write(text)
    if asked.write:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
        draw(TARGET.with_name("distributed_crossing.svg"), crossings)
    problems = [problem for found in (*cells, *crossings, *processes) for problem in found.problems()]
    sys.stderr.write("".join(f"NOT MET {problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
