"""What streaming costs the host per block and step, beside diffusers' group offload with streams.

    python tests/benchmarks/layerwise_overhead.py [--device cuda] [--rounds 60] [--write]

Three copies of one stack of blocks of 26 small tensors take turns in one process: on the device, streamed by this framework, and
under diffusers' group offload (block level, with a stream, pinned). A block does nothing with its weights, so that a pass takes
what the host takes around the blocks. A figure is the median pass less the resident one's, over the number of blocks, in
microseconds of processor time of the calling thread, so that what else runs on the machine does not count; what happens once a
pass is in it. The exit status says whether ours is at most half of theirs.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from diffusers.hooks import apply_group_offloading
from typing_extensions import override

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["MOST_RATIO", "measure"]

#: Ours over theirs.
MOST_RATIO = 0.5
_TARGET = Path(__file__).parents[2] / "docs" / "benchmarks" / "layerwise_overhead.md"
_PAGE = """# What streaming costs the host

Written by `tests/benchmarks/layerwise_overhead.py --write`, which also checks that ours is at most half of theirs: a stack of {depth} blocks of {tensors} small tensors, on the device, streamed, and under
diffusers' group offload (block level, with a stream, pinned), taking turns in one process. A block does nothing with its weights. A figure is the median pass less the resident one's, over the number of blocks: processor time of the calling thread. On a
faster host all are smaller; the ratio is what is compared.

| device `{device}`, torch {torch}, diffusers {diffusers} | microseconds a block and step |
| --- | --- |
| ours | {ours:.0f} |
| theirs | {theirs:.0f} |
| ratio | {ratio:.2f} |

In theirs each tensor is copied by itself and the host waits for the copy stream at every block, which is not counted here. In ours, a pass asks each tensor whether it was moved, replaced or written since, binds it and lets go of it again; where the time goes is in
[the design](../layerwise_design.md).
"""
_DEPTH = 20
_LAYERS = 13
_WIDTH = 8


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Block() for _ in range(_DEPTH))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Pipeline(OmniOffloadMixin):
    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = []
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer

    def __call__(self, x: torch.Tensor, steps: int, seconds: list[float]) -> None:
        for _ in range(steps):
            start = time.thread_time()
            self.transformer(x)
            seconds.append(time.thread_time() - start)


def measure(device: torch.device, *, rounds: int = 60, steps: int = 5) -> dict[str, float]:
    """Return the microseconds per block and step of ours and of theirs.

    Args:
        device: The accelerator.
        rounds: How often each of the three runs.
        steps: Passes each time; the first of them is left out.
    """
    stack = _Stack().requires_grad_(requires_grad=False)
    x = torch.randn(2, _WIDTH).to(device)
    resident, theirs, ours = copy.deepcopy(stack).to(device), copy.deepcopy(stack), stack
    apply_group_offloading(theirs, onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=True)
    pipeline = _Pipeline(ours)
    seconds: dict[str, list[float]] = {"resident": [], "ours": [], "theirs": []}
    runs: dict[str, Callable[[list[float]], None]] = {
        "resident": lambda found: _Pipeline(resident)(x, steps, found),
        "ours": lambda found: pipeline(x, steps, found),
        "theirs": lambda found: _Pipeline(theirs)(x, steps, found),
    }
    with torch.no_grad(), pipeline.enable_omni_offload("layer", device=device):
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                for name, run in runs.items():
                    found: list[float] = []
                    run(found)
                    torch.accelerator.synchronize(device)
                    seconds[name] += found[1:]
        finally:
            gc.enable()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {name: (medians[name] - medians["resident"]) / _DEPTH * 1e6 for name in ("ours", "theirs")}


def _page(times: dict[str, float], device: str) -> str:
    return _PAGE.format(
        ours=times["ours"],
        theirs=times["theirs"],
        ratio=times["ours"] / times["theirs"],
        device=device,
        torch=version("torch"),
        diffusers=version("diffusers"),
        depth=_DEPTH,
        tensors=2 * _LAYERS,
    )


def main() -> int:
    """Print the figures and their ratio as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="sim")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--write", action="store_true", help=f"write {_TARGET.name} too")
    asked = parser.parse_args()
    if asked.device == "sim":
        from omni_offload.testing import sim

        sim.install(mode="virtual", races="off")
    times = measure(torch.device(asked.device), rounds=asked.rounds)
    ratio = times["ours"] / times["theirs"]
    sys.stdout.write(json.dumps({**{name: round(value, 1) for name, value in times.items()}, "ratio": round(ratio, 3)}) + "\n")
    if asked.write:
        _TARGET.write_text(_page(times, asked.device), encoding="utf-8")
    return 0 if ratio <= MOST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
