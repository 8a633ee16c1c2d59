"""Ranks that are processes, forked from one that has imported everything, over a file store: one fails, or is killed, at a step.

Each tells what it raised, and what is left; a rank that is killed tells nothing. The process that they are forked from has no threads.
"""

import datetime as dt
import gc
import multiprocessing
import os
import time
from pathlib import Path

import conftest
import torch
import torch.distributed as dist
from faults import Steps, fail
from rank_threads import leftovers, makes, same

from omni_offload import DiffusionParallelConfig, DistributedLayerwiseOffloadBackend, OffloadStateError, OmniDiffusionConfig
from omni_offload.testing import sim

__all__ = ["LIMIT", "PHASES", "run_ranks"]

PHASES = ("enable", "call", "call again", "disable")
#: How long ranks wait for one another where one fails, and where none does: then nobody is told to wait less, whoever has the processors.
LIMIT, LONG = 5.0, 60.0
FAULTS = {"raises": fail, "is killed": lambda: os._exit(1)}

DistributedLayerwiseOffloadBackend.chunk_bytes = 4096


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch.distributed", "omni_offload.backends", "omni_offload.testing.sim"]
)  # found without a path


def run_ranks(size, folder, at=None, *, bad=0, fault="raises"):
    """Run ranks that enable, call twice and disable; return what each tells, None for one that was killed.

    Args:
        size: How many.
        folder: An empty folder, for the store.
        at: The step at which one fails; None: none does.
        bad: Which one.
        fault: How it fails.
    """
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    common = size, f"{folder}/store", LONG if at is None else LIMIT, fault
    ranks = [
        _CONTEXT.Process(target=_rank, args=(rank, *common, at if rank == bad else None, ends[rank][1]), daemon=True)
        for rank in range(size)
    ]
    told = []
    try:
        for process in ranks:
            process.start()
        for _, writer in ends:
            writer.close()
        for reader, _ in ends:
            assert reader.poll(2 * LONG), (at, bad, fault, "a rank hangs")
            try:
                told.append(reader.recv())
            except EOFError:
                told.append(None)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for reader, _ in ends:
            reader.close()
    return told


def _waited():
    """Seconds in which this thread waited for something else than a processor, which other processes may have."""
    ran, queued = map(int, Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[:2])
    return time.monotonic() - (ran + queued) / 1e9


def _rank(rank, size, store, limit, fault, at, writer):
    torch.set_num_threads(1)
    DistributedLayerwiseOffloadBackend.time_limit = dt.timedelta(seconds=limit)
    device = sim.install(races="record", poison=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=dt.timedelta(seconds=LONG))
    make = makes(conftest)
    pipe, plain, x = make(), make(), torch.randn(2, 64, generator=torch.Generator().manual_seed(7))
    config = OmniDiffusionConfig(
        diffusion_offload_config={"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}},
        parallel_config=DiffusionParallelConfig(data_parallel_size=size),
    )
    steps, told, seconds, lost = Steps(at, FAULTS[fault]), {}, {}, False
    with torch.no_grad():
        want = plain(x)
        dist.barrier()  # processes do not start at the same moment
        actions = [lambda: pipe.enable_omni_offload(config, device=device), lambda: pipe(x), lambda: pipe(x), pipe.disable_omni_offload]
        for phase, action in zip(PHASES, actions, strict=True):
            made, start = None, _waited()
            try:
                with steps.phase(phase):
                    made = action()
            except Exception as error:
                told[phase] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
            seconds[phase] = _waited() - start
            assert phase not in PHASES[1:3] or made is None or torch.equal(made.cpu(), want), "another output"
            if "enable" in told:
                break
    try:
        pipe.disable_omni_offload()
    except OffloadStateError as error:
        told["disable again"] = str(error)
    gc.collect()
    torch.accelerator.synchronize()
    lost = any("hold no weights any more: load the" in text for text in told.values())
    left = {"device": sim.allocated(), "pinned": sim.pinned_bytes(), "races": len(sim.races()), "hooks": len(leftovers(pipe))}
    whole = lost or same(pipe, plain)
    told = {"told": told, "seconds": seconds, "left": left, "lost": lost, "whole": whole, "steps": [*steps.steps()], "done": steps.done}
    writer.send(told)
    writer.close()
    os._exit(0)  # a group may lack a rank: nothing of it can be ended in order
