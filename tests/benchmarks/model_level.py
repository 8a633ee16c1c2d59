"""Model level in virtual time: one generation of Flux, SDXL and Wan 2.2 shapes, beside diffusers' own model offload.

    python tests/benchmarks/model_level.py [--write] [--shape Flux]

Real pipelines with random weights run on the simulated device; its clock counts copies, kernels and launches, so that every
figure is the same on every machine. The links are as much slower than 25 GB/s as the weights are smaller than the real model's,
so that copies take as long as the real ones; `flops` is set so that a resident generation takes a quarter of the time that its
weights take to cross the link once. Each measured generation is the first after enabling.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import diffusers
import torch
from schedule_search import Use, best_schedule
from shapes import SHAPES, Shape, weight_bytes

from omni_offload.testing import sim

__all__ = ["Comparison", "Measured", "Row", "compare", "report"]

LINK_GBPS = 25.0
COMPUTE_SHARE = 0.25
SETTINGS = {"mode": "virtual", "races": "raise", "poison": True, "copy_latency": 10e-6, "launch": 5e-6, "memory_gbps": 0.0}
TARGET = Path(__file__).parents[2] / "docs" / "benchmarks" / "model_level.md"

#: What has to hold: ours over diffusers' weight bytes and time, and over the best schedule's time.
MOST_BYTES, MOST_TIME, MOST_OVER_BEST = 0.5, 0.6, 1.02
#: Latents on their way to a component whose weights are on the host make a detour; more would be weights that no report counts.
MOST_ACTIVATIONS = 1e-3


@attrs.frozen(kw_only=True)
class Measured:
    """One generation: virtual seconds, bytes over the link both ways, and what it made."""

    seconds: float
    link_bytes: int
    output: torch.Tensor


@attrs.frozen(kw_only=True)
class Row:
    """Our generation under one budget (bytes; None: none given), and the best schedule for it.

    Attributes:
        name: The budget in words.
        budget: Device bytes.
        seconds: The first generation after enabling, virtual.
        again: The second one, which knows the order of uses.
        best: The best schedule's makespan.
        weights_moved: Bytes of weights over the link both ways, without padding.
        activations_moved: Bytes over the link beyond those weights, their padding and what a resident run moves.
        peak: Most bytes of weights on the device at once.
        equal: Whether the output is that of a resident run, bit for bit.
    """

    name: str
    budget: int | None
    seconds: float
    again: float
    best: float
    weights_moved: int
    activations_moved: int
    peak: int
    equal: bool


@attrs.frozen(kw_only=True)
class Comparison:
    """One shape's figures. All seconds are virtual; diffusers' bytes are of weights, both ways."""

    shape: str
    sizes: dict[str, int]
    link_gbps: float
    flops: float
    resident: float
    theirs: float
    theirs_moved: int
    theirs_equal: bool
    rows: tuple[Row, ...]

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return sum(self.sizes.values())

    def problems(self) -> list[str]:
        """Return every requirement that does not hold."""
        found = [] if self.theirs_equal else [f"{self.shape}: diffusers' output differs from a resident run's"]
        for row in self.rows:
            figures = {
                "output equal": (0.0 if row.equal else 1.0, 0.0),
                "weight bytes over diffusers'": (row.weights_moved / self.theirs_moved, MOST_BYTES),
                "time over diffusers'": (row.seconds / self.theirs, MOST_TIME),
                "time over the best schedule": (row.seconds / row.best, MOST_OVER_BEST),
                "bytes that nobody accounts for, over the weights": (row.activations_moved / self.total, MOST_ACTIVATIONS),
                "peak over the budget": (row.peak / row.budget if row.budget else 0.0, 1.0),
            }
            found += [f"{self.shape}, {row.name}: {what} {x:.4f} > {most}" for what, (x, most) in figures.items() if x > most]
        return found


def compare(shape: Shape) -> Comparison:
    """Measure one shape: resident, offloaded by diffusers, and offloaded by itself under three budgets."""
    pipeline = shape.make(shape.omni)
    sizes = {name: weight_bytes(part) for name, part in _parts(pipeline)}
    total = sum(sizes.values())
    rate = LINK_GBPS * total / (sum(shape.real_gb.values()) * 1e9)
    device = sim.install(**SETTINGS, h2d_gbps=rate, d2h_gbps=rate, flops=1e14)
    flops = _calibrate(shape, device, seconds=COMPUTE_SHARE * total / (rate * 1e9))
    resident, uses = _run_resident(shape, device)
    theirs = _run_theirs(shape, device)
    budgets = {
        "none given": None,
        "largest + second": _with_padding(sum(sorted(sizes.values())[-2:])),
        "all fit": _with_padding(total),
    }
    loads = {name: nbytes / (rate * 1e9) + SETTINGS["copy_latency"] for name, nbytes in sizes.items()}
    rows = []
    for name, budget in budgets.items():
        best = best_schedule(uses, sizes, loads, budget=budget, together=pipeline._co_resident_modules).seconds
        rows.append(_run_ours(shape, pipeline, device, name=name, budget=budget, best=best, resident=resident))
    return Comparison(
        shape=shape.name,
        sizes=sizes,
        link_gbps=rate,
        flops=flops,
        resident=resident.seconds,
        theirs=theirs.seconds,
        theirs_moved=theirs.link_bytes - resident.link_bytes,
        theirs_equal=torch.equal(theirs.output, resident.output),
        rows=tuple(rows),
    )


def _parts(pipeline: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, part) for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module))


def _with_padding(nbytes: int) -> int:
    return nbytes + nbytes // 1000


def _measure(shape: Shape, pipeline: Any, device: torch.device) -> Measured:
    torch.accelerator.synchronize(device)
    sim.reset_counters()
    start = sim.clock()
    output = shape.call(pipeline).cpu()
    torch.accelerator.synchronize(device)
    return Measured(seconds=sim.clock() - start, link_bytes=sim.h2d_bytes() + sim.d2h_bytes(), output=output)


def _calibrate(shape: Shape, device: torch.device, *, seconds: float) -> float:
    """Set `flops` so that a resident generation takes so long (within 0.1 %); time is nearly linear in its inverse."""
    pipeline = shape.make(shape.upstream).to(device)
    tried: list[tuple[float, float]] = []
    inverse = 0.0
    for _ in range(8):
        sim.configure(flops=1 / inverse if inverse else 0.0)
        took = _measure(shape, pipeline, device).seconds
        if abs(took - seconds) <= 1e-3 * seconds:
            return 1 / inverse
        tried.append((inverse, took))
        if len(tried) == 1:
            if took > seconds:
                raise RuntimeError(f"{shape.name}: launches alone take {took:.4f} s, and {seconds:.4f} s was asked for")
            inverse = 1e-11
        else:
            (x0, y0), (x1, y1) = tried[-2:]
            inverse = x1 + (seconds - y1) * (x1 - x0) / (y1 - y0)
    raise RuntimeError(f"{shape.name}: no `flops` found for {seconds} s: {tried}")


def _run_resident(shape: Shape, device: torch.device) -> tuple[Measured, list[Use]]:
    """Measure a resident run, and how it is divided among the components' uses.

    The clock at a component's entry is when what has been queued so far is done; a use lasts until the next one's entry.
    """
    pipeline = shape.make(shape.upstream).to(device)
    entries: list[tuple[str, float]] = []
    with _noted(pipeline, lambda name: entries.append((name, sim.clock()))):
        torch.accelerator.synchronize(device)
        start = sim.clock()
        measured = _measure(shape, pipeline, device)
    times = [start, *(at for _, at in entries[1:]), start + measured.seconds]
    uses: list[Use] = []
    for (name, _), begin, end in zip(entries, times, times[1:], strict=False):
        before = uses.pop().seconds if uses and uses[-1].component == name else 0.0
        uses.append(Use(name, before + end - begin))
    return measured, uses


@contextmanager
def _noted(pipeline: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Tell of every entry into a component: its forward, or a VAE's decode."""
    wrapped = []
    for name, part in _parts(pipeline):
        method = "decode" if name == "vae" else "forward"
        inner = getattr(part, method)

        def outer(*args: Any, _inner: Any = inner, _name: str = name, **kwargs: Any) -> Any:
            note(_name)
            return _inner(*args, **kwargs)

        part.__dict__[method] = outer
        wrapped.append((part, method))
    try:
        yield
    finally:
        for part, method in wrapped:
            del part.__dict__[method]


def _run_theirs(shape: Shape, device: torch.device) -> Measured:
    pipeline = shape.make(shape.upstream)
    pipeline.enable_model_cpu_offload(device=device)
    return _measure(shape, pipeline, device)


def _run_ours(shape: Shape, pipeline: Any, device: torch.device, *, name: str, budget: int | None, best: float, resident: Measured) -> Row:
    with pipeline.enable_omni_offload("module", device=device, device_memory=budget) as backend:
        first = _measure(shape, pipeline, device)
        report = backend.report()
        weights = sum(part.loads * part.weight_bytes + part.bytes_out for part in report.components)
        copied = report.totals["bytes_in"] + report.totals["bytes_out"]
        again = _measure(shape, pipeline, device)
    return Row(
        name=name,
        budget=budget,
        seconds=first.seconds,
        again=again.seconds,
        best=best,
        weights_moved=weights,
        activations_moved=first.link_bytes - copied - resident.link_bytes,
        peak=report.peak_device_bytes,
        equal=torch.equal(first.output, resident.output) and torch.equal(again.output, resident.output),
    )


def report(found: list[Comparison]) -> str:
    """Return the document."""
    rows = [
        f"| {c.shape} | {row.name} | {_ms(row.seconds)} | {_ms(c.theirs)} | {_ms(c.resident)} | {_ms(row.best)} | {row.seconds / c.theirs:.3f} | "
        f"{row.seconds / row.best:.3f} | {_mib(row.weights_moved)} | {_mib(c.theirs_moved)} | {row.weights_moved / c.theirs_moved:.3f} | {_mib(row.peak)} |"
        for c in found
        for row in c.rows
    ]
    shapes = [
        f"| {c.shape} | {_mib(c.total)} | {', '.join(f'{n} {_mib(b)}' for n, b in c.sizes.items())} | {c.link_gbps:.4f} | {c.flops / 1e12:.4f} |"
        for c in found
    ]
    return "\n".join([*_HEAD, *shapes, "", *_TABLE, *rows, "", *_TAIL, ""])


_HEAD = (
    "# Model level beside diffusers' model offload",
    "",
    "Written by `python tests/benchmarks/model_level.py --write`. Virtual time on the simulated device: the figures are the same on",
    "every machine, and nothing here was measured on a real accelerator.",
    "",
    f"omni-offload {version('omni-offload')}, torch {torch.__version__.partition('+')[0]}, diffusers {diffusers.__version__}; float32, one generation of four steps, the first",
    "after enabling; pinned host memory for ours, and as diffusers has it for theirs (the simulated link is as fast for pageable memory,",
    "which is kind to it).",
    f"Copies take {SETTINGS['copy_latency'] * 1e6:.0f} us and the link's time; a launch costs the host {SETTINGS['launch'] * 1e6:.0f} us; device memory is as fast as asked. The components have the",
    f"size ratios of the real models, and the link is as much slower than {LINK_GBPS:.0f} GB/s as the weights are smaller, so that copies take as long",
    f"as the real ones. `flops` is set so that a resident generation takes {COMPUTE_SHARE} of the time its weights take to cross the link once.",
    "Small copies from pageable memory (64 KiB at most: timesteps, token ids, a scheduler's coefficients) do not queue for the copy engine;",
    "whether they do on a card, `python tests/benchmarks/copy_order.py` measures. Races raise; the outputs of all runs are equal bit for bit.",
    "SDXL runs without a negative prompt, so that each encoder is used once.",
    "",
    "| shape | weights, MiB | components, MiB | link, GB/s | TFLOP/s |",
    "|---|---|---|---|---|",
)
_TABLE = (
    "Times in ms, sizes in MiB. *Best* is the makespan of the best schedule for the same budget, found by exhaustive search over all",
    "orders of loads and all choices of what stays (`tests/benchmarks/schedule_search.py`). *Moved* counts weights in both directions,",
    "without padding. *Peak* is what the framework held on the device. Without a budget one component is there at a time.",
    "",
    "| shape | `device_memory` | ours | diffusers | resident | best | ours / diffusers | ours / best | moved | diffusers moved | moved ratio | peak |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
_TAIL = (f"Required: ours / diffusers <= {MOST_TIME}, ours / best <= {MOST_OVER_BEST}, moved ratio <= {MOST_BYTES}.",)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Print the document, and with `--write` put it into `docs`; returns 1 where a requirement does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], help="measure only this one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [compare(shape) for shape in SHAPES if options.shape in (None, shape.name)]
    text = report(found)
    sys.stdout.write(text)
    if options.write:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(text, encoding="utf-8")
    problems = [problem for comparison in found for problem in comparison.problems()]
    for comparison in found:
        for row in comparison.rows:
            sys.stderr.write(
                f"{comparison.shape}, {row.name}: second generation {_ms(row.again)} ms, {row.again / row.best:.4f} of the best\n"
            )
    sys.stderr.write("".join(f"NOT MET {problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
