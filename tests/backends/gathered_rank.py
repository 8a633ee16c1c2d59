"""One rank of several that gather blocks, in a process of its own over gloo: started by `launch`, by torchrun or without it."""

import datetime as dt
import functools
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import parallel_rank  # beside this file
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from omni_offload import DiffusionParallelConfig, DLOTransfer, LayerOptions, OffloadConfig, OffloadStrategy, get_offload_backend
from omni_offload.accelerator import Accelerator
from omni_offload.backends import DistributedLayerwiseOffloadBackend, manage
from omni_offload.backends.agreement import Agreement
from omni_offload.backends.distributed_rotation import DistributedRotation
from omni_offload.backends.entry import EntryHooks
from omni_offload.backends.gathering import Gathering
from omni_offload.residency.sharded_block import ShardedBlock
from omni_offload.residency.shards import Shard
from omni_offload.testing import sim

rank, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
by_hand = {} if "MASTER_ADDR" in os.environ else {"init_method": f"file://{folder / 'store'}", "rank": rank, "world_size": size}
torch.set_num_threads(1)
device = sim.install(races="record", poison=True)
dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60), **by_hand)
DistributedLayerwiseOffloadBackend.time_limit = dt.timedelta(seconds=60)
DistributedLayerwiseOffloadBackend.chunk_bytes = 16384


def config(*, encoders, residents=0, **fields):
    options = {"dit": LayerOptions(weight_transfer=DLOTransfer.ALLGATHER, resident_layers=residents)}
    options["text_encoder"] = LayerOptions(weight_transfer=DLOTransfer.ALLGATHER if encoders else DLOTransfer.RANK_LOCAL)
    return OffloadConfig(
        strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE,
        layer_options=options,
        parallel_config=DiffusionParallelConfig(**({"data_parallel_size": size} | fields)),
    )


def weights(pipe):
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{path}": t for name, part in parts.items() for path, t in (*part.named_parameters(), *part.named_buffers())}


def run(target, *, encoders, residents=0, mesh=None, compiled=False, **fields):
    """Enable, call twice, disable, and once more; every output and every weight is a resident run's."""
    module, name = target.split(":")
    case = getattr(importlib.import_module(module), name)
    pipe, plain = case.make_pipeline(), case.make_pipeline()
    for one in (pipe, plain) if compiled else ():
        one.transformer.compile_repeated_blocks(backend="aot_eager")
    with torch.no_grad():
        want = case.outputs(plain(**case.make_inputs(plain)))
    before = weights(pipe)
    for _ in range(2):
        backend = get_offload_backend(config(encoders=encoders, residents=residents, **fields), device, mesh=mesh)
        manage(pipe, backend)
        gathered = [residency for _, residency in backend._rotation.gathered]
        whole = sum(block.host_bytes for one in gathered for block in one.ring.blocks.values())
        held = sum(shard.nbytes for one in gathered for _, shard in one.shards)
        ranks = backend._gathering.size
        assert held <= whole / ranks * 1.03, (held, whole, ranks)
        rest = sum(member.owner.residency.master_bytes for member in backend._rotation.members.values()) - held
        assert sim.pinned_bytes() <= 1.03 * (whole / ranks + rest), (held, rest, sim.pinned_bytes())
        names = {one.name for one in gathered}
        for _ in range(2):
            with torch.no_grad():
                made = case.outputs(pipe(**case.make_inputs(pipe)))
            assert all(torch.equal(a.cpu(), b) for a, b in zip(made, want, strict=True)), "other outputs"
        _check_peak(backend)
        backend.disable()
    after = weights(pipe)
    for name, tensor in weights(plain).items():
        assert after[name] is before[name], name
        assert torch.equal(after[name], tensor), name
        assert after[name].stride() == tensor.stride(), name
    assert sim.pinned_bytes() == 0
    assert sim.races() == [], sim.races()[:3]
    return {"gathered": sorted(names), "held": held, "whole": whole}


def _check_peak(backend):
    """No more is held on the device than what moves together takes: rests, residents, and the slots once."""
    rotation = backend._rotation
    groups = [rotation.room.companions(member) for member in rotation.members.values()]
    needs = [sum(one.owner.residency.own_padded_bytes for one in group) for group in groups]
    slots = max(residency.pool_bytes for _, residency in rotation.gathered)
    others = [one.owner.residency.pool_bytes for one in rotation.members.values() if hasattr(one.owner.residency, "pool_bytes")]
    assert backend.report().peak_device_bytes <= max(needs) + max(slots, *others), str(backend.report())


def flux():
    return run("pipelines.flux.cases:FLUX", encoders=False)


def flux_with_encoders():
    return run("pipelines.flux.cases:FLUX", encoders=True, residents=2)


def flux_compiled():
    return run("pipelines.flux.cases:FLUX", encoders=False, residents=1, compiled=True)


def wan():
    return run("pipelines.wan.cases:WAN_2_2", encoders=False)


def wan_with_encoders():
    return run("pipelines.wan.cases:WAN_2_2", encoders=True)


def qwen_image():
    return run("pipelines.qwen_image.cases:QWEN_IMAGE", encoders=False)


def qwen_image_with_encoders():
    return run("pipelines.qwen_image.cases:QWEN_IMAGE", encoders=True)


def by_mesh():
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return run("pipelines.flux.cases:FLUX", encoders=False, mesh=mesh, data_parallel_size=size // 2, tensor_parallel_size=2)


def world_destroyed():
    """The world is destroyed before the offload is disabled: over gloo the communicators are the offload's own, and go on."""
    from pipelines.flux.cases import FLUX

    pipe, plain = FLUX.make_pipeline(), FLUX.make_pipeline()
    with torch.no_grad():
        want = FLUX.outputs(plain(**FLUX.make_inputs(plain)))
        with manage(pipe, get_offload_backend(config(encoders=False), device)):
            for _ in range(2):
                made = FLUX.outputs(pipe(**FLUX.make_inputs(pipe)))
                assert all(torch.equal(a.cpu(), b) for a, b in zip(made, want, strict=True)), "other outputs"
                if dist.is_initialized():
                    dist.destroy_process_group()
    after = weights(pipe)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(plain).items())
    return True


KILLS = {
    "killed": (torch.nn.Module, "_no_method"),
    "killed_claiming": (DistributedRotation, "claim"),
    "killed_preparing": (ShardedBlock, "prepare"),
    "killed_hooking": (EntryHooks, "install"),
    "killed_before_a_gather": (Gathering, "gather_block"),
    "killed_in_a_gather": (Accelerator, "gather"),
    "killed_ending_a_call": (Agreement, "compare"),
    "killed_disabling": (Shard, "make_whole"),
}


def killed(where="killed"):
    """The last rank ends there: every other one raises within the limit, and gives up cleanly."""
    from pipelines.flux.cases import FLUX

    pipe, told, start = FLUX.make_pipeline(), [], time.monotonic()
    backend = get_offload_backend(config(encoders=False), device)
    blocks = pipe.transformer.single_transformer_blocks
    if rank == size - 1:
        blocks[1].register_forward_pre_hook(lambda *_: where == "killed" and os._exit(0))
        owner, method = KILLS[where]
        setattr(owner, method, lambda *_, **__: os._exit(0))
    call = functools.partial(pipe, **FLUX.make_inputs(pipe))
    for action in (lambda: manage(pipe, backend), call, call, backend.disable):
        try:
            with torch.no_grad():
                action()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
            if not backend.enabled and action is not backend.disable:
                break
    gc.collect()
    torch.accelerator.synchronize()
    left = [sim.allocated(), sim.pinned_bytes()]
    return {"told": told, "seconds": time.monotonic() - start, "left": left, "hooks": "forward" in blocks[0].__dict__}


globals().update({where: functools.partial(killed, where) for where in KILLS})
globals().update({name: functools.partial(beside, size, device) for name, beside in parallel_rank.SCENARIOS.items()})

with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as told:
    for scenario in sys.argv[2:]:
        told.write(json.dumps({scenario: globals()[scenario]()}) + "\n")
        told.flush()
if any("killed" in scenario for scenario in sys.argv):
    os._exit(0)  # the group lacks a rank: nothing of it can be ended in order
if dist.is_initialized():
    dist.destroy_process_group()
