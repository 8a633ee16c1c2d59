"""The ring of gathered blocks with real processes over gloo: their outputs are a resident run's, and their virtual time is the benchmark's."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from distributed_bound_ring import Links, RanksRing
from layerwise_bound_ring import CLEAN, Run

from omni_offload.testing import sim

__all__ = ["BACKENDS", "BLOCKS", "COMPUTE", "ring_of", "run_ranks"]

BLOCKS, COMPUTE = 12, 1e-3
#: Gathers that the host waits for, and gathers that are the device's own: with a backend for the device other than gloo, the simulated
#: device runs them all the same.
BACKENDS = ("gloo", "cpu:gloo,sim:fake")
_SECONDS = 300


def ring_of(ranks: int) -> RanksRing:
    """Return the ring: copies, gathers and computation take the same time."""
    return RanksRing(BLOCKS, compute=COMPUTE, links=Links.of(ranks, ratio=ranks - 1, seconds=COMPUTE))


def run_ranks(size: int) -> list[list[Run]]:
    """Start the ranks, and return of each what it ran with each of the backends; outputs that are not a resident run's end it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, folder, str(size)]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
        try:
            told = [process.communicate(timeout=_SECONDS)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in ranks]}")
    return [[Run(**{**run, "residents": tuple(run["residents"])}) for run in json.loads(one)] for one in told]


def _main(folder: str, size: int, rank: int) -> Sequence[Run]:
    torch.set_num_threads(1)
    sim.install()
    runs = []
    for number, backend in enumerate(BACKENDS):
        dist.init_process_group(backend, init_method=f"file://{Path(folder, str(number))}", rank=rank, world_size=size)
        ring = ring_of(size)
        runs.append(ring.run(CLEAN))
        if runs[-1].output != ring.resident_output():
            raise RuntimeError(f"rank {rank} of {size}, {backend}: {runs[-1].output} is not a resident run's {ring.resident_output()}")
        dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    found = _main(sys.argv[1], *map(int, sys.argv[2:]))
    sys.stdout.write(json.dumps([attrs.asdict(run) for run in found]))
