"""Which ranks gather weights with one another. The worlds are torch's fake ones: only who is with whom is looked at."""

import contextlib
import types

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_offload import DiffusionParallelConfig, gather_group
from omni_offload.errors import OffloadConfigError
from omni_offload.ranks import gather_ranks


@contextlib.contextmanager
def world(size, rank=0):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("fields", "size", "rank", "ranks"),
    [
        ({}, 1, 0, (0,)),
        ({"data_parallel_size": 4}, 4, 2, (0, 1, 2, 3)),
        ({"sequence_parallel_size": 2}, 2, 1, (0, 1)),
        ({"tensor_parallel_size": 2}, 2, 1, (1,)),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 4, 1, (1, 3)),
        ({"data_parallel_size": 2, "sequence_parallel_size": 2}, 4, 3, (1, 3)),
        ({"sequence_parallel_size": 2, "tensor_parallel_size": 2}, 4, 2, (0, 2)),
        ({"use_hsdp": True}, 4, 1, (0, 1, 2, 3)),
        ({"use_hsdp": True, "hsdp_replicate_size": 2}, 4, 2, (2, 3)),
        ({"use_hsdp": True, "hsdp_shard_size": 1, "hsdp_replicate_size": 4}, 4, 2, (2,)),
    ],
    ids=str,
)
def test_ranks_without_a_mesh_are_row_major(fields, size, rank, ranks):
    """HSDP's shard axis, else data parallel, else sequence parallel; never tensor parallel; -1 is what the world leaves."""
    with world(size, rank):
        assert gather_ranks(DiffusionParallelConfig(**fields)) == ranks
        group = gather_group(types.SimpleNamespace(**{"use_hsdp": False, **fields}))
        assert (group is None) == (len(ranks) == 1)
        if group is not None:
            assert group is not dist.group.WORLD
            assert tuple(dist.get_process_group_ranks(group)) == ranks


@pytest.mark.parametrize(
    ("fields", "shape", "names", "rank", "ranks"),
    [
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, (2, 2), ("tp", "dp"), 1, (0, 1)),
        ({"sequence_parallel_size": 4}, (4,), ("sp",), 3, (0, 1, 2, 3)),
        ({"use_hsdp": True, "hsdp_replicate_size": 2}, (2, 2), ("replicate", "shard"), 2, (2, 3)),
        ({"use_hsdp": True}, (2, 2), ("dp", "shard"), 3, (2, 3)),
        ({"data_parallel_size": 2}, (2, 2), ("pp", "dp"), 3, (2, 3)),
        ({"tensor_parallel_size": 4}, (4,), ("tp",), 3, (3,)),
    ],
    ids=str,
)
def test_ranks_of_a_mesh_are_those_of_its_axis(fields, shape, names, rank, ranks):
    """A mesh says by the names of its axes who is where; other axes are nobody's concern."""
    with world(4, rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert gather_ranks(DiffusionParallelConfig(**fields), mesh=mesh) == ranks


@pytest.mark.parametrize(
    ("fields", "shape", "names", "message"),
    [
        (
            {"data_parallel_size": 4},
            (2, 2),
            ("dp", "tp"),
            r"2 ranks on axis 'dp', and parallel_config asks for 4.*2 ranks on axis 'tp'.* 1",
        ),
        ({"sequence_parallel_size": 4}, (4,), ("dp",), r"4 ranks on axis 'dp', .* for 1; .*1 ranks on axis 'sp', .* for 4"),
        ({"use_hsdp": True, "hsdp_shard_size": 2}, (4,), ("shard",), "4 ranks on axis 'shard', .* asks for 2"),
        ({"use_hsdp": True, "sequence_parallel_size": 2}, (4,), ("shard",), "use HSDP alone"),
        ({"data_parallel_size": 4}, (4,), None, "names no axes"),
    ],
    ids=str,
)
def test_a_mesh_of_another_layout_is_refused(fields, shape, names, message):
    """Sizes that the mesh does not have are named, all of them, with both numbers."""
    with world(4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(OffloadConfigError, match=message):
            gather_ranks(DiffusionParallelConfig(**fields), mesh=mesh)


def test_a_rank_outside_of_the_mesh_is_refused():
    """Who is not in the mesh has nobody to gather with."""
    with world(4, 3):
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        with pytest.raises(OffloadConfigError, match="rank 3 is not in the mesh"):
            gather_ranks(DiffusionParallelConfig(data_parallel_size=2), mesh=mesh)


def test_the_product_is_the_world():
    """Without a mesh the sizes make the world, and without a world they are all one."""
    with world(4), pytest.raises(OffloadConfigError, match="the world has 4 ranks"):
        gather_group(DiffusionParallelConfig(data_parallel_size=2))
    assert gather_group(DiffusionParallelConfig()) is None
    with pytest.raises(OffloadConfigError, match=r"init_process_group\(\) first"):
        gather_group(DiffusionParallelConfig(data_parallel_size=2))
    with pytest.raises(OffloadConfigError, match="data_parallel_size"):
        gather_group(types.SimpleNamespace(data_parallel_size=0))
