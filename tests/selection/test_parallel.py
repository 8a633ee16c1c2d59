"""How ranks are laid out."""

import pytest

from omni_offload.config import DiffusionParallelConfig, gather_axis, rank_layout
from omni_offload.errors import OffloadConfigError


@pytest.mark.parametrize(
    ("fields", "world", "axes"),
    [
        ({}, 1, (("dp", 1), ("sp", 1), ("tp", 1))),
        ({"data_parallel_size": 2, "sequence_parallel_size": 3, "tensor_parallel_size": 4}, 24, (("dp", 2), ("sp", 3), ("tp", 4))),
        ({"use_hsdp": True, "hsdp_shard_size": 4, "hsdp_replicate_size": 2}, 8, (("replicate", 2), ("shard", 4))),
        ({"use_hsdp": True, "hsdp_replicate_size": 2}, 8, (("replicate", 2), ("shard", 4))),
        ({"use_hsdp": True}, 3, (("replicate", 1), ("shard", 3))),
    ],
)
def test_axes_slowest_first(fields, world, axes):
    assert rank_layout(DiffusionParallelConfig(**fields), world_size=world) == axes


@pytest.mark.parametrize(
    ("fields", "world"),
    [
        ({}, 2),
        ({"data_parallel_size": 2}, 4),
        ({"use_hsdp": True, "hsdp_shard_size": 2}, 4),
        ({"use_hsdp": True, "hsdp_replicate_size": 2}, 3),
        ({"use_hsdp": True, "hsdp_replicate_size": 4}, 2),
        ({"use_hsdp": True, "tensor_parallel_size": 2}, 2),
    ],
)
def test_sizes_that_do_not_make_the_world_are_an_error(fields, world):
    with pytest.raises(OffloadConfigError):
        rank_layout(DiffusionParallelConfig(**fields), world_size=world)


@pytest.mark.parametrize(
    ("fields", "axis"),
    [
        ({}, "sp"),
        ({"sequence_parallel_size": 2}, "sp"),
        ({"data_parallel_size": 2, "sequence_parallel_size": 2}, "dp"),
        ({"use_hsdp": True, "data_parallel_size": 2}, "shard"),
        ({"tensor_parallel_size": 2}, "sp"),
    ],
)
def test_weights_are_gathered_over_hsdp_then_dp_then_sp_and_never_tp(fields, axis):
    assert gather_axis(DiffusionParallelConfig(**fields)) == axis


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_parallel_size", 0),
        ("sequence_parallel_size", True),
        ("tensor_parallel_size", 1.0),
        ("hsdp_replicate_size", -1),
        ("hsdp_shard_size", 0),
        ("hsdp_shard_size", True),
        ("hsdp_shard_size", -2),
        ("use_hsdp", 1),
    ],
)
def test_sizes_are_positive_ints(field, value):
    with pytest.raises(OffloadConfigError, match=field):
        DiffusionParallelConfig(**{field: value})
