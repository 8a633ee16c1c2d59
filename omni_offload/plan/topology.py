"""The blocks of a component: where they are declared, and what a declaration leads to."""

import warnings
import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from omni_offload.config import OffloadPlan
from omni_offload.discovery import Component, Problems, class_name, find_module, is_path
from omni_offload.errors import quoted

__all__ = ["WELL_KNOWN_BLOCKS", "Block", "blocks_at", "check_ownership", "declared_stacks"]

WELL_KNOWN_BLOCKS = (
    *("double_blocks", "single_blocks", "joint_blocks", "transformer_blocks", "single_transformer_blocks"),
    *("temporal_transformer_blocks", "blocks", "layers", "down_blocks", "up_blocks"),
)
"""Names under which stacks of blocks are found where none are declared, in execution order; `nn.ModuleList` only."""

Block = tuple[str, nn.Module]
"""A block's full path and the block."""

_WARNED: weakref.WeakSet[type] = weakref.WeakSet()


def declared_stacks(component: Component, plan: OffloadPlan, *, scan: bool, problems: Problems) -> tuple[str, ...]:
    """The full paths of the containers, or single blocks, that a component may stream.

    A DiT's come from the plan, else from its class's `_layerwise_offload_blocks_attrs`, else from the deprecated
    `_layerwise_offload_blocks_attr`, else, where `scan` is set, from well-known names (one `DeprecationWarning` a class for
    each of the last two); with the containers of the plan's large children first. An encoder's or VAE's come from the plan.

    Args:
        component: The component; its module is not None.
        plan: What the pipeline declares.
        scan: Whether well-known names count: for undeclared pipelines, and in distributed layerwise offload.
        problems: Where a declaration of another type is added.

    Returns:
        Paths; none where nothing is declared.
    """
    places = (component.path, *component.aliases)
    if component.kind != "dit":
        return _full(component, next((plan.encoder_block_attrs[path] for path in places if path in plan.encoder_block_attrs), ()))
    children = tuple(
        f"{child}.{container}"
        for child, container in plan.offload_submodules.items()
        if any(child.startswith(f"{path}.") for path in places)
    )
    names = next((plan.block_attrs[path] for path in places if path in plan.block_attrs), None)
    if names is None:
        names = _class_stacks(component, problems)
    if names is None and scan and component.module is not None:
        names = _scan(component.module)
    return (*children, *_full(component, names or ()))


def _full(component: Component, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{component.path}.{name}" for name in names)


def _class_stacks(component: Component, problems: Problems) -> tuple[str, ...] | None:
    module = component.module
    names = getattr(module, "_layerwise_offload_blocks_attrs", None)
    if names is None:
        single = getattr(module, "_layerwise_offload_blocks_attr", None)
        if single is None:
            return None
        _warn_once(
            type(module),
            f"{class_name(module)}._layerwise_offload_blocks_attr is deprecated; declare _layerwise_offload_blocks_attrs, a list",
        )
        names = [single]
    if not isinstance(names, list | tuple) or not all(is_path(name) for name in names):
        problems.about_config(
            f"{class_name(module)}._layerwise_offload_blocks_attrs of {component.path!r} is {quoted(names)}; give a list of names"
        )
        return ()
    return tuple(names)


def _scan(module: nn.Module) -> tuple[str, ...] | None:
    names = tuple(name for name in WELL_KNOWN_BLOCKS if isinstance(getattr(module, name, None), nn.ModuleList))
    if names:
        _warn_once(
            type(module),
            f"{class_name(module)} declares no blocks; {', '.join(names)} were found by their names; declare "
            "_layerwise_offload_blocks_attrs, or block_attrs in the pipeline's _offload_plan",
        )
    return names


def _warn_once(cls: type, text: str) -> None:
    if cls not in _WARNED:
        _WARNED.add(cls)
        warnings.warn(text, DeprecationWarning, stacklevel=2)


def blocks_at(pipeline: object, path: str, problems: Problems) -> tuple[Block, ...]:
    """The blocks that a path leads to: the items of a container, else the module itself.

    Args:
        pipeline: The pipeline.
        path: Full path of a `ModuleList`, `ModuleDict` or `Sequential`, or of a single block.
        problems: Where a path that leads nowhere is added.

    Returns:
        Blocks in order; None, and what holds neither parameters nor buffers, is left out.
    """
    module = find_module(pipeline, path, problems)
    if module is None:
        return ()
    is_sequence = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    items = module._modules.items() if is_sequence else None  # noqa: SLF001  (named_children leaves repeated ones out)
    found = _items(path, module) if items is None else ((f"{path}.{name}", item) for name, item in items if item is not None)
    return tuple((where, block) for where, block in found if _holds_bytes(block))


def _items(path: str, module: nn.Module) -> Iterator[Block]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield path, module
        return
    for name, item in module._modules.items():  # noqa: SLF001  (as above)
        if item is not None:
            yield from _items(f"{path}.{name}", item)


def _holds_bytes(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def check_ownership(blocks: Iterable[Block], problems: Problems) -> None:
    """Add every block that would be owned twice: listed twice, or inside another one.

    Args:
        blocks: All blocks that stream, of all components.
        problems: Where they are added.
    """
    owners: dict[int, Block] = {}
    for path, block in blocks:
        known = owners.setdefault(id(block), (path, block))
        if known[0] != path:
            problems.about_config(f"blocks {known[0]!r} and {path!r} are one module; declare it once")
    for path, block in owners.values():
        for module in block.modules():
            inner, _ = owners.get(id(module), (path, block))
            if inner != path:
                problems.about_config(f"block {inner!r} lies inside block {path!r}; declare one of them")
