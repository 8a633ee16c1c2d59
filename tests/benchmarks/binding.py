"""What binding the tensors of a module to its device copies and back costs the host, beside the bare assignments.

    python tests/benchmarks/binding.py [--device cuda]

The module has 26 tensors, as a block of a large transformer has. Times are the best of many rounds, in microseconds, of one run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from omni_offload import ModuleResidency

__all__ = ["measure"]

_LAYERS = 13
_WIDTH = 8


def measure(device: torch.device, *, rounds: int = 300) -> dict[str, float]:
    """Return the microseconds of `param.data = view` for every tensor and back, and of what a residency does instead.

    Args:
        device: The accelerator.
        rounds: How often each is done.

    Returns:
        `bare`: the assignments alone. `bind`: bind and unbind, with every check of what was written. `use`: a whole use of a module
        whose device copy is there: look for changes, bind, unbind.
    """
    module = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)).requires_grad_(requires_grad=False)
    residency = ModuleResidency(module, device)
    tensors = list(module.parameters())
    residency.fetch()
    residency.bind()
    on_device = [tensor.data for tensor in tensors]
    residency.unbind()
    on_host = [tensor.data for tensor in tensors]

    def bare() -> None:
        for views in (on_device, on_host):
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view

    def bind() -> None:
        residency.bind()
        residency.unbind()

    def use() -> None:
        residency.fetch()
        bind()

    times = {work.__name__: _best(work, rounds) for work in (bare, bind, use)}
    residency.restore()
    return times


def _best(work: Callable[[], None], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found) * 1e6


def main() -> int:
    """Print the times and their ratios to the bare assignments as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="sim")
    asked = parser.parse_args()
    if asked.device == "sim":
        from omni_offload.testing import sim

        sim.install(mode="virtual", races="off")
    times = measure(torch.device(asked.device))
    ratios = {f"{name}_to_bare": round(time / times["bare"], 2) for name, time in times.items() if name != "bare"}
    sys.stdout.write(json.dumps({**{name: round(value, 1) for name, value in times.items()}, **ratios}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
