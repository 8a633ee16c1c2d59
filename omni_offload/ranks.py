"""Which ranks gather weights with one another, and communicators for them."""

import datetime as dt
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omni_offload.config.checks import raise_problems
from omni_offload.config.parallel import DiffusionParallelConfig, gather_axis, parallel_problems, rank_layout, read_parallel
from omni_offload.errors import OffloadConfigError, quoted
from omni_offload.refusals import NAMELESS_MESH, NO_WORLD, OTHER_MESH, OUTSIDE_MESH

__all__ = ["begin_gather", "gather_group", "gather_into", "gather_ranks", "open_group", "tensor_ranks"]


def gather_group(parallel_config: object, *, mesh: DeviceMesh | None = None) -> dist.ProcessGroup | None:
    """Return a new communicator of the ranks that hold equal weights and gather them: HSDP's shard axis, else data, else sequence parallel.

    Tensor-parallel ranks hold other weights, and are never in it. It is a communicator of its own, so that gathers of weights and
    collectives of activations cannot come in another order on another rank. All ranks of it call this, in the same order as other
    groups. Keep it: torch finds what was left of it where one is destroyed and made again.

    Args:
        parallel_config: A `DiffusionParallelConfig`, or any object with its attributes.
        mesh: The mesh of all ranks, with axes named among `replicate`, `shard`, `dp`, `sp` and `tp`; None: ranks are row-major over
            (replicate, shard) with HSDP, else (dp, sp, tp).

    Returns:
        The group; None where this rank is alone on the axis.

    Raises:
        OffloadConfigError: The sizes do not make the world, the mesh has other sizes or no names, or nothing is initialised.
    """
    ranks = gather_ranks(parallel_config, mesh=mesh)
    return open_group(ranks) if len(ranks) > 1 else None


def gather_ranks(parallel_config: object, *, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """Return the ranks of this rank's gather group in their order; no communicator is made.

    Args:
        parallel_config: As for `gather_group`.
        mesh: As for `gather_group`.

    Raises:
        OffloadConfigError: As for `gather_group`.
    """
    parallel = _read(parallel_config)
    return _ranks(parallel, gather_axis(parallel), mesh)


def tensor_ranks(parallel_config: object, *, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """Return the ranks that hold the other parts of this rank's weights, and itself, in their order: those of tensor parallelism.

    Args:
        parallel_config: As for `gather_group`.
        mesh: As for `gather_group`.

    Raises:
        OffloadConfigError: As for `gather_group`.
    """
    parallel = _read(parallel_config)
    return (dist.get_rank() if dist.is_initialized() else 0,) if parallel.use_hsdp else _ranks(parallel, "tp", mesh)


def _read(parallel_config: object) -> DiffusionParallelConfig:
    problems: list[str] = []
    parallel = read_parallel(parallel_config, problems)
    raise_problems("The gather group", [*problems, *parallel_problems(parallel)])
    return parallel


def _ranks(parallel: DiffusionParallelConfig, axis: str, mesh: DeviceMesh | None) -> tuple[int, ...]:
    if mesh is not None:
        return _of_mesh(parallel, axis, mesh)
    if dist.is_available() and dist.is_initialized():
        return _of_world(rank_layout(parallel, world_size=dist.get_world_size()), axis, dist.get_rank())
    try:
        rank_layout(parallel, world_size=1)
    except OffloadConfigError as error:
        raise OffloadConfigError(NO_WORLD.of(f"{error}; torch.distributed is not initialised")) from None
    return (0,)


def _of_world(axes: Sequence[tuple[str, int]], axis: str, rank: int) -> tuple[int, ...]:
    names = [name for name, _ in axes]
    world = torch.arange(dist.get_world_size()).reshape([size for _, size in axes])
    own = (world == rank).nonzero()[0].tolist()
    own[names.index(axis)] = slice(None)
    return tuple(world[tuple(own)].tolist())


def _of_mesh(parallel: DiffusionParallelConfig, axis: str, mesh: DeviceMesh) -> tuple[int, ...]:
    names = mesh.mesh_dim_names
    if names is None:
        raise OffloadConfigError(NAMELESS_MESH.of(f"The gather group: mesh {mesh} names no axes"))
    asked = {
        "replicate": parallel.hsdp_replicate_size if parallel.use_hsdp else 1,
        "shard": parallel.hsdp_shard_size if parallel.use_hsdp else 1,
        "dp": -1 if parallel.use_hsdp else parallel.data_parallel_size,
        "sp": parallel.sequence_parallel_size,
        "tp": parallel.tensor_parallel_size,
    }
    found = {name: mesh.size(names.index(name)) if name in names else 1 for name in asked}
    raise_problems(
        "The gather group",
        [
            OTHER_MESH.of(f"the mesh has {found[name]} ranks on axis {name!r}, and parallel_config asks for {size}")
            for name, size in asked.items()
            if size not in (-1, found[name])
        ],
    )
    if mesh.get_coordinate() is None:
        raise OffloadConfigError(OUTSIDE_MESH.of(f"The gather group: rank {mesh.get_rank()} is not in the mesh {quoted(mesh)}"))
    return tuple(dist.get_process_group_ranks(mesh.get_group(axis))) if axis in names else (mesh.get_rank(),)


def open_group(ranks: Sequence[int], *, backend: str | None = None, limit: dt.timedelta | None = None) -> dist.ProcessGroup:
    """Make a communicator for some ranks; only they take part, and wait for one another.

    Args:
        ranks: Global ranks, in the group's order.
        backend: Its backend; None: that of the world.
        limit: The longest wait of a collective; None: the world's.
    """
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=limit, backend=backend, use_local_synchronization=True, group_desc="omni_offload", sort_ranks=False
    )
    return group


def gather_into(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's bytes into one tensor, in the order of ranks; the host blocks, for tensors on the host.

    Args:
        whole: Where they go; may hold `own` at this rank's place.
        own: This rank's bytes.
        group: The ranks.
    """
    _gather(whole, own, group=group)


def begin_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin what `gather_into` does, and return what to wait for; the collective comes after what is on the current stream."""
    return cast("dist.Work", _gather(whole, own, group=group, async_op=True))


def _gather(*args: Any, **kwargs: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
    return gather(*args, **kwargs)
