"""One rank of two: run every collective on the device and compare with what it must give. Started by test_collectives."""

import sys

import pytest
import torch
import torch.distributed as dist

from omni_offload.testing import sim

rank, store, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
device = sim.install(races="raise", collective_gbps=1.0, launch=0.0, memory_gbps=0.0, flops=0.0)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)


def full(value, size=4):
    return torch.full((size,), float(value), device=device)


def check(made, *expected):
    assert made.device == device
    assert made.cpu().tolist() == [float(value) for value in expected], (made, expected)


def plain():
    x = full(rank + 1)
    dist.all_reduce(x)
    check(x, 3, 3, 3, 3)
    out = torch.empty(8, device=device)
    dist.all_gather_into_tensor(out, full(rank))
    check(out, 0, 0, 0, 0, 1, 1, 1, 1)
    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, full(rank))
    check(torch.cat(parts), 0, 0, 0, 0, 1, 1, 1, 1)
    x = full(rank)
    dist.broadcast(x, 1)
    check(x, 1, 1, 1, 1)
    out = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(out, full(rank + 1))
    check(out, 3, 3)
    out = torch.empty(4, device=device)
    dist.all_to_all_single(out, full(rank))
    check(out, 0, 0, 1, 1)
    x = full(rank)
    dist.scatter(x, [full(5), full(6)] if rank == 0 else None, 0)
    check(x, *[5 + rank] * 4)
    x = full(rank)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    check(x, 0, 0, 0, 0)
    dist.barrier()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def in_threads_mode():
    with sim.settings(mode="threads", collective_gbps=0.001):
        plain()
        asynchronous()


def asynchronous():
    x, out = full(rank), torch.empty(8, device=device)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    work.wait()
    check(out, 0, 0, 0, 0, 1, 1, 1, 1)
    out = torch.empty(8, device=device)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    with pytest.raises(RuntimeError, match=r"'c10d::.*' on sim:0 collective stream, then 'aten::add' on sim:0 default"):
        out.add(1)
    work.wait()
    check(out + 1, 1, 1, 1, 1, 2, 2, 2, 2)


def on_a_side_stream():
    out, side = torch.empty(8, device=device), torch.Stream(device)
    source = full(rank)
    side.wait_stream(torch.sim.current_stream())
    with side:
        dist.all_gather_into_tensor(out, source)
    torch.sim.current_stream().wait_stream(side)
    check(out, 0, 0, 0, 0, 1, 1, 1, 1)


def timed():
    out, x = torch.empty(2 << 20, device=device), torch.ones(1 << 20, device=device)
    torch.accelerator.synchronize()
    start = sim.clock()
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    sim.spin(0.001)
    work.wait()
    torch.accelerator.synchronize()
    assert abs(sim.clock() - start - 4 * 2**20 / 1e9) < 1e-9, sim.clock() - start  # half of the 8 MiB come from the other rank


def functional():
    import torch.distributed._functional_collectives as functional_collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("sim", (2,))
    check(functional_collectives.all_gather_tensor(full(rank), 0, mesh) + 0, 0, 0, 0, 0, 1, 1, 1, 1)
    sharded = distribute_tensor(torch.arange(4.0, device=device), mesh, [Shard(0)])
    check(sharded.redistribute(mesh, [Replicate()]).to_local(), 0, 1, 2, 3)


def sharded_module():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
    x = torch.ones(2, 4)
    with torch.no_grad():
        expected = module(x)
        module.to(device)
        for layer in (module[0], module[2], module):
            fully_shard(layer)
        assert torch.equal(module(x.to(device)).cpu(), expected)


def batched():
    x, out = full(rank), torch.empty(4, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]):
        work.wait()
    check(out, *[1 - rank] * 4)


for part in sys.argv[5:]:
    globals()[part]()
assert all("collective stream" in race.message for race in sim.races()), sim.races()  # what `asynchronous` provokes
if sys.argv[4] == "destroy":
    dist.destroy_process_group()
elif sys.argv[4] == "pending":
    left = dist.all_reduce(full(1), async_op=True)
sys.stdout.write("done\n")
