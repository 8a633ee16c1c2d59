"""What of a planned component streams: its blocks, and the parameters that travel with them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from omni_offload.config import OffloadConfig, OffloadStrategy
from omni_offload.discovery import (
    Component,
    Problems,
    class_name,
    find_module,
    flat_fsdp_modules,
    fsdp_parameters,
    module_at,
    modules_outside,
)
from omni_offload.plan.model import PlannedComponent, Treatment
from omni_offload.plan.topology import Block, blocks_at
from omni_offload.refusals import FLAT_WEIGHTS, TAKEN_BLOCKS, TAKEN_COMPONENT

__all__ = ["parameters_of", "streamed_blocks", "taken_problems"]


def streamed_blocks(pipeline: object, component: PlannedComponent) -> tuple[Block, ...]:
    """The blocks of a planned component, in declared order.

    Args:
        pipeline: The pipeline that the plan was resolved for.
        component: A component of the plan.

    Returns:
        Full path and module of each block; none where the component does not stream.

    Raises:
        ComponentPathError: The pipeline has changed, and a path leads nowhere.
    """
    problems = Problems(f"Blocks of {component.path!r} of {class_name(pipeline)}")
    blocks = tuple(block for path in component.block_paths for block in blocks_at(pipeline, path, problems))
    problems.raise_any()
    return blocks


def parameters_of(pipeline: object, component: PlannedComponent) -> set[nn.Parameter]:
    """The parameters of a component that streams that travel with its blocks: all of these, but for those that live in the rest.

    Args:
        pipeline: The pipeline.
        component: A component of its plan.

    Raises:
        ComponentPathError: As `streamed_blocks`.
    """
    problems = Problems(f"Parameters of {component.path!r} of {class_name(pipeline)}")
    rest = [find_module(pipeline, path, problems) for path in component.rest_paths]
    outside = {id(inner) for item in rest if item is not None for inner in item.modules()}
    owners: Counter[nn.Parameter] = Counter()
    inside: set[int] = set()
    blocks = streamed_blocks(pipeline, component)
    for _, block in blocks:
        modules = [inner for inner in block.modules() if id(inner) not in outside]
        inside |= {id(inner) for inner in modules}
        owners.update({p for inner in modules for p in inner.parameters(recurse=False)})
    whole = module_at(pipeline, component.path)
    others = [inner for inner in whole.modules() if id(inner) not in inside] + modules_outside(whole, (block for _, block in blocks))
    shared = {p for inner in others for p in inner.parameters(recurse=False)}
    return {p for p, count in owners.items() if count == 1} - shared


def taken_problems(
    pipeline: object, config: OffloadConfig, components: Iterable[Component], planned: Iterable[PlannedComponent]
) -> Iterator[str]:
    """Yield what cannot be served since FSDP owns it: weights of blocks that stream, and at model level of all that rotates.

    Args:
        pipeline: The pipeline.
        config: The configuration.
        components: Its components.
        planned: What is to be done with each.
    """
    level = config.strategy is OffloadStrategy.MODEL_LEVEL
    if level and config.use_hsdp:
        yield TAKEN_COMPONENT.of("use_hsdp is True, and model-level offload cannot move sharded weights")
    for component, plan in zip(components, planned, strict=True):
        if component.module is None or plan.treatment is Treatment.STAY:
            continue
        flat = [*flat_fsdp_modules(component.module, component.path)]
        if flat:
            yield FLAT_WEIGHTS.of(f"FullyShardedDataParallel has taken {_some(flat)}, which is to move")
        taken = dict(fsdp_parameters(component.module, component.path))
        if taken and level:
            yield TAKEN_COMPONENT.of(f"component {component.path!r} is to rotate, and fully_shard has taken {_some(taken)}")
        elif taken and plan.treatment is Treatment.STREAM:
            streamed = {id(parameter) for parameter in parameters_of(pipeline, plan)}
            found = [name for name, parameter in taken.items() if id(parameter) in streamed]
            if found:
                yield TAKEN_BLOCKS.of(f"fully_shard has taken {_some(found)}, of blocks that stream")


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
