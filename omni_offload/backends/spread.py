"""Blocks whose weights are distributed over a mesh: which may stream, each rank's own part of them."""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from omni_offload.errors import OffloadConfigError
from omni_offload.plan import ResolvedOffloadPlan, Treatment, parameters_of, streamed_blocks
from omni_offload.ranks import tensor_ranks
from omni_offload.refusals import SPREAD_BLOCKS

__all__ = ["refuse_spread_blocks"]


def refuse_spread_blocks(pipeline: object, plan: ResolvedOffloadPlan, mesh: DeviceMesh | None) -> None:
    """Refuse blocks of which other ranks than the tensor-parallel ones hold other parts: what this rank holds is not what those hold.

    Args:
        pipeline: The pipeline.
        plan: What is done with its components.
        mesh: The mesh of all ranks; None: ranks are laid out in their order.

    Raises:
        OffloadConfigError: There are such; the first by name.
    """
    spread = dict(_spread(pipeline, plan))
    allowed = set(tensor_ranks(plan.config.parallel_config, mesh=mesh)) if spread else set()
    found = [name for name, ranks in spread.items() if not ranks <= allowed]
    if found:
        ranks = ", ".join(map(str, sorted(spread[found[0]])))
        raise OffloadConfigError(
            SPREAD_BLOCKS.of(f"{len(found)} weights of blocks that stream are distributed, the first of them {found[0]} over ranks {ranks}")
        )


def _spread(pipeline: object, plan: ResolvedOffloadPlan) -> Iterator[tuple[str, set[int]]]:
    """Yield the weights of streamed blocks that are distributed, and the ranks that hold other parts of each, with this one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return
    for planned in plan.treated(Treatment.STREAM):
        travelling = {id(parameter) for parameter in parameters_of(pipeline, planned)}
        for path, block in streamed_blocks(pipeline, planned):
            for name, parameter in block.named_parameters():
                if id(parameter) in travelling and isinstance(parameter, distributed.DTensor):
                    yield f"{path}.{name}", _holders_of_parts(parameter)


def _holders_of_parts(tensor: Any) -> set[int]:
    mesh = tensor.device_mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return {rank for axis in axes for rank in dist.get_process_group_ranks(mesh.get_group(axis))}
