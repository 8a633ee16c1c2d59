"""Rings of blocks that only take time and memory, run by the layerwise backend on the simulated device in virtual time."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.schedule import BlockCost, bound
from omni_offload.testing import sim

__all__ = ["CLEAN", "COSTLY", "Ring", "Run", "equal_ring"]

#: Copies and kernels take only what they are said to take; and with what every launch, copy and collective costs besides.
CLEAN: Mapping[str, Any] = {"launch": 0.0, "copy_latency": 0.0, "collective_latency": 0.0}
COSTLY: Mapping[str, Any] = {"launch": 5e-6, "copy_latency": 10e-6, "collective_latency": 20e-6}
_SETTINGS: Mapping[str, Any] = {"mode": "virtual", "races": "record", "poison": False, "memory_gbps": 0.0, "flops": 0.0}
#: What the largest block of a ring takes here; the link is as slow as its copy is long.
_BLOCK_BYTES = 64 << 10


class _Block(nn.Module):
    """Takes the next of its times, then reads all of its weight, whose values add up to about one."""

    def __init__(self, nbytes: int, seed: int) -> None:
        super().__init__()
        count = nbytes // 4
        values = torch.rand(count, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(values * (2 / count), requires_grad=False)
        self.seconds: Iterator[float] = iter(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sim.spin(next(self.seconds))
        return torch.dot(self.weight, x.expand_as(self.weight)).view(1)


class _Stack(nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(nbytes, seed) for seed, nbytes in enumerate(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Pipeline(OmniOffloadMixin):
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

    def __init__(self, sizes: Sequence[int]) -> None:
        self.transformer = _Stack(sizes)

    def __call__(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self.transformer(x)
        return x


@attrs.frozen(kw_only=True)
class Run:
    """One call through the backend. All seconds are virtual.

    Attributes:
        step: Seconds of one step, over all steps after the first, or after the second where residents could be chosen anew in that.
        bound: What no schedule of these residents can go below: all computation as it was, or all copies, over the same steps.
        residents: Indices of the blocks that stayed.
        device_bytes: Most bytes of weights on the device at once.
        races: How many pairs of operations nothing ordered.
        output: What it returned.
    """

    step: float
    bound: float
    residents: tuple[int, ...]
    device_bytes: int
    races: int
    output: float

    @property
    def over(self) -> float:
        """The step over its bound."""
        return self.step / self.bound


class Ring:
    """Blocks with their costs, of which only the proportions of the bytes are kept.

    Attributes:
        costs: The blocks in execution order, with the bytes that they take here.

    Args:
        costs: The blocks in execution order; copies are proportional to bytes.
    """

    def __init__(self, costs: Sequence[BlockCost]) -> None:
        largest = max(cost.nbytes for cost in costs)
        seconds = sum(cost.copy for cost in costs)
        sizes = [max(round(cost.nbytes / largest * _BLOCK_BYTES / 64), 1) * 64 for cost in costs]
        self._rate = sum(sizes) / seconds
        self.costs = tuple(BlockCost(cost.compute, size / self._rate, size) for cost, size in zip(costs, sizes, strict=True))
        self._pipeline = _Pipeline(sizes)

    def run(self, conditions: Mapping[str, Any] = CLEAN, *, steps: int = 8, jitter: float = 0.0, seed: int = 0, **keys: Any) -> Run:
        """Run one call.

        Args:
            conditions: Settings of the simulated device.
            steps: How often the blocks run.
            jitter: Each computation takes its time times a number from 1 - jitter to 1 + jitter, drawn anew.
            seed: Of what is drawn.
            **keys: What offload is enabled with.
        """
        device = sim.install(**_SETTINGS, **conditions, **self._links())
        draw = random.Random(seed)
        times = [[cost.compute * draw.uniform(1 - jitter, 1 + jitter) for cost in self.costs] for _ in range(steps)]
        for block, seconds in zip(self._pipeline.transformer.blocks, zip(*times, strict=True), strict=True):
            block.seconds = iter(seconds)
        sim.reset_races()
        x = torch.ones(1, device=device)
        with self._enabled(device, **keys) as backend, torch.no_grad():
            with sim.trace() as spans:
                output = self._pipeline(x, steps)
                torch.accelerator.synchronize(device)
            residents = _residents(backend)
            peak = backend.report().peak_device_bytes
        ends = [span.end for span in spans if span.what == "spin"]
        last = ends[len(self.costs) - 1 :: len(self.costs)]
        first = int(0 < len(residents) < len(self.costs))  # then the first step is timed, and in the second others may be fetched
        taken = sum(itertools.chain(*times[first + 1 :])) / (steps - 1 - first)
        return Run(
            step=(last[-1] - last[first]) / (steps - 1 - first),
            bound=max(taken, bound([attrs.evolve(cost, compute=0.0) for cost in self.costs], residents)),
            residents=residents,
            device_bytes=peak,
            races=len(sim.races()),
            output=output.item(),
        )

    def resident_output(self, *, steps: int = 8) -> float:
        """Return what a call returns without offload."""
        sim.install(**_SETTINGS)
        for block in self._pipeline.transformer.blocks:
            block.seconds = itertools.repeat(0.0)
        with torch.no_grad():
            return float(self._pipeline(torch.ones(1), steps).item())

    def _links(self) -> Mapping[str, float]:
        """Return the speeds of the links, as settings of the simulated device."""
        return {"h2d_gbps": self._rate / 1e9}

    def _enabled(self, device: torch.device, **keys: Any) -> contextlib.AbstractContextManager[Any]:
        """Enable offload; leaving the context disables it."""
        return self._pipeline.enable_omni_offload("layer", device=device, **keys)


def _residents(backend: Any) -> tuple[int, ...]:
    residency = backend._rotation.members["transformer"].owner.residency
    return tuple(index for index in range(len(residency.blocks)) if index not in residency.ring.blocks)


def equal_ring(blocks: int, *, compute: float, copy: float) -> Ring:
    """Return a ring of equal blocks."""
    return Ring([BlockCost(compute, copy, _BLOCK_BYTES)] * blocks)
