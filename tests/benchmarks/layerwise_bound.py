"""Layerwise streaming in virtual time: beside its bound, beside the best placement, and beside the other ways to offload.

    python tests/benchmarks/layerwise_bound.py [--part grid|rings|peers] [--write]

Everything runs through the layerwise backend on the simulated device, whose clock counts computation, copies and launches, so that
every figure is the same on every machine. `--write` writes the page and its drawings into docs/benchmarks. The exit status is 1
where a requirement does not hold.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import attrs
import diffusers
import torch
from layerwise_bound_drawing import draw_grid, draw_peers
from layerwise_bound_models import MODELS, Model
from layerwise_bound_peers import LINK_GBPS, Comparison, compare
from layerwise_bound_ring import CLEAN, COSTLY, Ring, equal_ring
from layerwise_bound_search import Best, best_residents

from omni_offload.schedule import bound, least_bytes

__all__ = ["RATIOS", "SHARES", "Cell", "Placed", "main", "measure_cell", "place", "report"]

BLOCKS, COMPUTE = 40, 1e-3
RATIOS, SHARES = (0.25, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0), (0.0, 0.25, 0.5, 0.75)
RING_RATIOS, RING_BUDGETS = (1.0, 1.5, 2.0, 4.0), (0.1, 0.25, 0.5, 0.75)
PEER_RATIOS = (1.0, 2.0, 4.0)
SLOTS, JITTER, JITTERED_STEPS = 3, 0.4, 40
TARGET = Path(__file__).parents[2] / "docs" / "benchmarks" / "layerwise.md"
PARTS = ("grid", "rings", "peers")

#: Most that a step may take over its bound: without what launches cost, with it, and with computations that vary; and over the best.
MOST_CLEAN, MOST_COSTLY, MOST_JITTERED, MOST_OVER_BEST = 1.01, 1.02, 1.03, 1.02
#: Less than this would be no step at all: the steps measured may begin with a few copies ahead.
LEAST = 0.99


@attrs.frozen(kw_only=True)
class Cell:
    """Forty equal blocks: one ratio of a block's copy to its computation, one part of them resident.

    Attributes:
        ratio: The copy over the computation.
        share: The part of the blocks that stays.
        bound: Seconds that no schedule goes below.
        clean: A step over its bound where only copies and computations take time.
        costly: With what launches and copies cost besides, over the same bound.
        jittered: With computations that vary, over the bound of what they took.
        leading: As `clean`, with the first blocks resident.
        races: In all of these runs.
    """

    ratio: float
    share: float
    bound: float
    clean: float
    costly: float
    jittered: float
    leading: float
    races: int

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        figures = {"clean": (self.clean, MOST_CLEAN), "costly": (self.costly, MOST_COSTLY), "jittered": (self.jittered, MOST_JITTERED)}
        where = f"copy / computation {self.ratio}, {self.share:.0%} resident"
        found = [
            f"{where}: {what} {over:.4f} not in {LEAST} to {most}" for what, (over, most) in figures.items() if not LEAST <= over <= most
        ]
        return [*found, f"{where}: {self.races} races"] if self.races else found


@attrs.frozen(kw_only=True)
class Placed:
    """A ring of unequal blocks under a budget.

    Attributes:
        model: Whose blocks.
        ratio: All copies over all computation.
        budget: Part of the way from the least memory to everything.
        memory: The budget over the bytes of all blocks.
        step: A step over all computation.
        best: The best step found by search, likewise, and how.
        best_step: Over all computation.
        bound: What no schedule of our residents goes below, likewise.
        residents: How many blocks we kept.
        fits: Whether the weights on the device stayed within the budget.
        races: In the run.
    """

    model: str
    ratio: float
    budget: float
    memory: float
    step: float
    best: Best
    best_step: float
    bound: float
    residents: int
    fits: bool
    races: int

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        where = f"{self.model}, copies / computation {self.ratio}, budget {self.budget}"
        over = self.step / self.best_step
        found = [f"{where}: {over:.4f} > {MOST_OVER_BEST} of the best"] if over > MOST_OVER_BEST else []
        found += [] if self.fits else [f"{where}: more memory than the budget"]
        return [*found, f"{where}: {self.races} races"] if self.races else found


def measure_cell(ratio: float, share: float) -> Cell:
    """Measure forty equal blocks."""
    ring = equal_ring(BLOCKS, compute=COMPUTE, copy=ratio * COMPUTE)
    spread = {"resident_layers": round(share * BLOCKS)}
    options = {"layer_options": {"dit": spread}, "slots": SLOTS}
    leading = {"layer_options": {"dit": {**spread, "resident_placement": "leading"}}, "slots": SLOTS}
    runs = (
        ring.run(CLEAN, **options),
        ring.run(COSTLY, **options),
        ring.run(CLEAN, jitter=JITTER, steps=JITTERED_STEPS, **options),
        ring.run(CLEAN, **leading),
    )
    clean, costly, jittered, first = (run.over for run in runs)
    races = sum(run.races for run in runs)
    return Cell(
        ratio=ratio,
        share=share,
        bound=runs[0].bound,
        clean=clean,
        costly=costly,
        jittered=jittered,
        leading=first,
        races=races,
    )


def place(model: Model, ratio: float, budget: float) -> Placed:
    """Run a real model's ring under a budget, and search for the best placement."""
    ring = Ring(model.costs(ratio))
    costs = ring.costs
    total, least = sum(cost.nbytes for cost in costs), least_bytes(costs, SLOTS)
    nbytes = round(least + budget * (total - least))
    run = ring.run(CLEAN, device_memory=nbytes, slots=SLOTS)
    compute, copy, sizes = ([getattr(cost, name) for cost in costs] for name in ("compute", "copy", "nbytes"))
    best = best_residents(compute, copy, sizes, slots=SLOTS, nbytes=nbytes)
    work = sum(compute)
    return Placed(
        model=model.name,
        ratio=ratio,
        budget=budget,
        memory=nbytes / total,
        step=run.step / work,
        best=best,
        best_step=best.step / work,
        bound=bound(costs, run.residents) / work,
        residents=len(run.residents),
        fits=run.device_bytes <= nbytes,
        races=run.races,
    )


def report(cells: Sequence[Cell], placed: Sequence[Placed], compared: Sequence[Comparison]) -> str:
    """Return the document."""
    lines = [*_HEAD]
    lines += [
        f"| {c.ratio:g} | {c.share:.0%} | {c.bound * 1e3:.1f} | {c.clean:.4f} | {c.costly:.4f} | {c.jittered:.4f} | {c.leading:.4f} |"
        for c in cells
    ]
    lines += _RINGS
    lines += [
        f"| {p.model} | {p.ratio:g} | {p.memory:.3f} | {p.residents} | {p.bound:.4f} | {p.best_step:.4f} | {p.step:.4f} | "
        f"{p.step / p.best_step:.4f}{'' if p.step <= MOST_OVER_BEST * p.best_step else ', **not met**'} |"
        for p in placed
    ]
    lines += _PEERS
    for comparison in compared:
        lines += _peer_rows(comparison)
    return "\n".join([*lines, ""])


def _peer_rows(found: Comparison) -> list[str]:
    rows = [
        f"| {found.ratio:g} | everything resident | {_mib(found.resident.peak)} | {_ms(found.resident.step)} | {_ms(found.resident.call)} | | |"
    ]
    for point in found.theirs:
        ours = found.beside.get(point.name)
        beside = f"{_ms(ours.step)} | {_ms(ours.call)}" if ours else "less than two slots | "
        rows.append(f"| {found.ratio:g} | {point.name} | {_mib(point.peak)} | {_ms(point.step)} | {_ms(point.call)} | {beside} |")
    rows += [f"| {found.ratio:g} | omni-offload, {p.name} | {_mib(p.peak)} | {_ms(p.step)} | {_ms(p.call)} | | |" for p in found.ours]
    return rows


_HEAD = (
    "# Layerwise streaming beside its bound",
    "",
    "Written by `python tests/benchmarks/layerwise_bound.py --write`. Virtual time on the simulated device: the figures are the same on",
    "every machine, and nothing here was measured on a real accelerator. Everything runs through the layerwise backend. What the bound is,",
    "and why residents are spread, stands in [the schedule](../schedule.md).",
    "",
    f"omni-offload {version('omni-offload')}, torch {torch.__version__.partition('+')[0]}, diffusers {diffusers.__version__}; pinned host memory, {SLOTS} slots.",
    "",
    "## Equal blocks",
    "",
    f"{BLOCKS} blocks that compute for {COMPUTE * 1e3:.0f} ms each. A step (the mean of all after the first; after the second where some blocks stay and others stream: the",
    "first step is timed then, and others may come to stay in the second) over its bound: all computation, or all copies of what streams.",
    f"*Clean*: only copies and computations take time. *Costly*: each launch costs the host {COSTLY['launch'] * 1e6:.0f} us, and each copy {COSTLY['copy_latency'] * 1e6:.0f} us more; the bound",
    f"is that without them. *Jitter*: each computation takes 1 - {JITTER} to 1 + {JITTER} times as long, at random; the bound is that of what they took.",
    "*Leading*: the first blocks are resident instead of spread ones, clean.",
    "",
    f"Required: clean <= {MOST_CLEAN}, costly <= {MOST_COSTLY}, jitter <= {MOST_JITTERED}.",
    "",
    "![A step over its bound, spread and leading](layerwise_bound.svg)",
    "",
    "| copy / computation | resident | bound, ms | clean | costly | jitter | leading |",
    "|---|---|---|---|---|---|---|",
)
_RINGS = (
    "",
    "## Unequal blocks",
    "",
    "The blocks of real models: their bytes in 16 bits, and their arithmetic, counted operation by operation ("
    + "; ".join(f"{model.name}: {model.what}" for model in MODELS)
    + ").",
    "At first the backend knows the bytes, and not how long a block computes: it times the first step, and at the start of the second it keeps other blocks where",
    "that pays. Steps are from the third on. Memory, for residents and slots, as part of all blocks' bytes: 10, 25, 50",
    "and 75 % of the way from the least that it takes to everything. Bound, best and ours are steps over all computation. *Best* is the best",
    "placement within the same bytes and slots that a search over the recurrence finds, which is told the computations (`tests/benchmarks/layerwise_bound_search.py`:",
    "exhaustive for up to 14 blocks, else some 100,000 placements in 128 annealings). *Bound* is that of our residents.",
    "",
    f"Required: ours / best <= {MOST_OVER_BEST}. `by levels` is how the",
    "pipelines declare them: of these few and large blocks, three slots take as much memory as keeping nearly all.",
    "",
    "| blocks | copies / computation | memory | resident | bound | best | ours | ours / best |",
    "|---|---|---|---|---|---|---|---|",
)
_PEERS = (
    "",
    "## Beside the other ways to offload",
    "",
    "The denoising loop of a Flux of 4 + 8 blocks with random weights, float32, prompt embeddings given; real modules and kernels, so that each way",
    f"to offload is what its library makes of it. The link is as much slower than {LINK_GBPS:.0f} GB/s as the weights are smaller than the real ones; launches and",
    "copies cost as above; pageable memory is as fast as pinned (which is kind to the ways that use it), but blocks the host. *Peak* counts all device",
    "bytes in use: activations too, and what was freed while a recorded stream may still read it. *Step*: the mean of steps 3 to 6. *Call*: until the output of six steps is on the host; not the first two calls, in which",
    "some ways still learn the order, and ours what blocks take. All outputs are equal bit for bit. *Group* is `enable_group_offload`, *sequential* `enable_sequential_cpu_offload` (accelerate's",
    "hooks), *model* `enable_model_cpu_offload`. *Ours*: with as much memory as the line's way took at its peak, where that holds the rest and two slots.",
    "",
    "Required: our step and our call take no longer than theirs, wherever they hold at least two slots and the rest. Below that, leaves with `record_stream`",
    "are faster than ours with two slots where copies and computation are even: their host queues copies far ahead, in small pieces.",
    "",
    "![Seconds of a step over device memory](layerwise_memory.svg)",
    "",
    "| copies / computation | way | peak, MiB | step, ms | call, ms | ours: step, ms | ours: call, ms |",
    "|---|---|---|---|---|---|---|",
)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Print the document, and with `--write` put it and its drawings into `docs`; returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name} and its drawings")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; not with --write")
    options = parser.parse_args(arguments)
    if options.part and options.write:
        parser.error("--write writes the whole page: give no --part")
    parts = options.part or PARTS
    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns of what a comparison does on purpose
    cells = [measure_cell(ratio, share) for ratio in RATIOS for share in SHARES] if "grid" in parts else []
    placed = (
        [place(model, ratio, budget) for model in MODELS for ratio in RING_RATIOS for budget in RING_BUDGETS] if "rings" in parts else []
    )
    compared = [compare(ratio) for ratio in PEER_RATIOS] if "peers" in parts else []
    text = report(cells, placed, compared)
    sys.stdout.write(text)
    if options.write:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
        steps = {(c.ratio, c.share, "spread"): c.clean for c in cells} | {(c.ratio, c.share, "leading"): c.leading for c in cells}
        draw_grid(TARGET.with_name("layerwise_bound.svg"), steps)
        draw_peers(TARGET.with_name("layerwise_memory.svg"), compared)
    problems = [problem for found in (*cells, *placed, *compared) for problem in found.problems()]
    sys.stderr.write("".join(f"NOT MET {problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
