"""What collectives take in virtual time: the bytes of their algorithm over the link to the other ranks, beside copies and kernels."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload.testing import sim

LINK, BYTES = 1.0, 8 << 20
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextlib.contextmanager
def world(size, rank=0):
    """One rank of a world whose other ranks are not there: what they would send is made up."""
    dist.init_process_group("cpu:fake,sim:fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def seconds(device, collective):
    torch.accelerator.synchronize(device)
    start = sim.clock()
    collective()
    torch.accelerator.synchronize(device)
    return sim.clock() - start


def collectives(size, device):
    """Collectives of `BYTES` bytes in all, and how many of them travel over a rank's link."""
    whole, piece = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (BYTES, BYTES // size))
    parts = [*torch.zeros(size, BYTES // size, dtype=torch.uint8, device=device).unbind()]
    share = (size - 1) / size
    return {
        "all-gather": (lambda: all_gather(whole, piece), share),
        "all-gather in place": (lambda: all_gather(whole, whole[: BYTES // size]), share),
        "all-gather into parts": (lambda: dist.all_gather(parts, piece), share),
        "reduce-scatter": (lambda: reduce_scatter(piece, whole), share),
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "all-to-all": (lambda: dist.all_to_all_single(whole, whole.clone()), share),
        "broadcast": (lambda: dist.broadcast(whole, 0), float(size > 1)),
        "reduce": (lambda: dist.reduce(whole, 0), float(size > 1)),
        "scatter, of the root": (lambda: dist.scatter(piece, parts, 0), share),
        "scatter, of another": (lambda: dist.scatter(piece, None, size - 1), share if size > 1 else None),
        "gather": (lambda: dist.gather(piece, parts, 0), share),
        "barrier": (dist.barrier, 0.0),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_collective_takes_the_bytes_of_its_algorithm(device, size):
    """(W - 1) / W of the whole for a gather, twice that for an all-reduce; of one rank nothing travels."""
    sim.configure(mode="virtual", launch=0.0, memory_gbps=0.0, flops=0.0, collective_gbps=LINK)
    with world(size):
        for name, (collective, share) in collectives(size, device).items():
            if share is not None:
                assert seconds(device, collective) == pytest.approx(share * BYTES / 1e9, abs=1e-9), name


def test_every_collective_has_a_latency(device):
    """However few bytes it carries; not where there is nobody to wait for."""
    sim.configure(mode="virtual", launch=0.0, memory_gbps=0.0, flops=0.0, collective_gbps=LINK, collective_latency=1e-3)
    for size, expected in ((1, 0.0), (2, 1e-3 + BYTES / 2 / 1e9)):
        with world(size):
            assert seconds(device, collectives(size, device)["all-gather"][0]) == pytest.approx(expected, abs=1e-9)


def test_gathers_run_beside_copies_and_kernels_and_one_after_another(device):
    """A device has an engine for collectives, one for copies in each direction, and one for kernels."""
    sim.configure(mode="virtual", launch=0.0, memory_gbps=0.0, flops=0.0, collective_gbps=LINK, h2d_gbps=LINK)
    host, there = torch.zeros(BYTES // 2, dtype=torch.uint8, pin_memory=True), torch.zeros(BYTES // 2, dtype=torch.uint8, device=device)
    copies, gathers = torch.Stream(device), torch.Stream(device)
    with world(2):
        gather = collectives(2, device)["all-gather"][0]

        def all_at_once(count):
            with copies:
                there.copy_(host, non_blocking=True)
            sim.spin(BYTES / 2 / 1e9)
            with gathers:
                for _ in range(count):
                    gather()

        torch.accelerator.synchronize(device)
        assert seconds(device, lambda: all_at_once(1)) == pytest.approx(BYTES / 2 / 1e9, abs=1e-9)
        assert seconds(device, lambda: all_at_once(2)) == pytest.approx(BYTES / 1e9, abs=1e-9)
    sim.reset_races()


def test_in_threads_mode_a_link_is_shared_too(device):
    """Two gathers at once take as long as one after the other."""
    sim.configure(mode="threads", collective_gbps=BYTES / 2 / 0.02 / 1e9)
    with world(2):
        whole = [torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.accelerator.synchronize(device)
        start = sim.clock()
        for work in [all_gather(one, one[: BYTES // 2], async_op=True) for one in whole]:
            work.wait()
        assert sim.clock() - start >= 0.04
