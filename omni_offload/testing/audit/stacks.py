"""Repeated stacks: containers whose blocks ran, and what is as large as a block beside them."""

from collections.abc import Iterator, Mapping

import attrs
from torch import nn

from omni_offload.testing.audit.parts import Part

__all__ = ["Stack", "repeated_stacks", "undeclared", "with_stack"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@attrs.frozen(kw_only=True)
class Stack:
    """A container of blocks that ran, or a single block.

    Attributes:
        path: Its full path.
        name: Its path in the component.
        blocks: The blocks.
        first: When the first of them ran.
    """

    path: str
    name: str
    blocks: tuple[nn.Module, ...] = attrs.field(repr=False)
    first: int


def repeated_stacks(part: Part, ran: Mapping[int, int]) -> list[Stack]:
    """Return the stacks of a component whose blocks ran, in the order of their first runs, and single blocks beside them.

    A stack is a container of two or more blocks, each of several layers; what is in a block is none of its own. A single block
    is a module beside a stack whose class is called one, that ran after the stack's first block did and is as large as the smallest one.

    Args:
        part: The component.
        ran: The modules that ran, by id, and when each did for the first time.
    """
    found = [
        stack for path, container in _containers(part.module, "") for stack in [_stack(part, path, container, ran)] if stack is not None
    ]
    singles = [*_singles(part, found, ran)]
    inside = {id(module) for single in singles for module in single.blocks[0].modules()}
    outermost = [stack for stack in found if not any(id(block) in inside for block in stack.blocks)]
    return sorted([*outermost, *singles], key=lambda stack: stack.first)


def _singles(part: Part, stacks: list[Stack], ran: Mapping[int, int]) -> Iterator[Stack]:
    """Yield the blocks that stand alone beside a stack, such as the middle one of a UNet."""
    known = {id(module) for stack in stacks for block in stack.blocks for module in block.modules()}
    smallest = min((_size(block) for stack in stacks for block in stack.blocks), default=0)
    holders: dict[str, int] = {}
    for stack in stacks:
        holder = stack.name.rpartition(".")[0]
        holders[holder] = min(stack.first, holders.get(holder, stack.first))
    for holder, first in holders.items():
        for name, module in part.module.get_submodule(holder).named_children():
            if ran.get(id(module), -1) < first or id(module) in known or not _is_block(module):
                continue
            if "Block" in type(module).__name__ and _size(module) >= smallest:
                path = f"{holder}.{name}".removeprefix(".")
                yield Stack(path=f"{part.path}.{path}", name=path, blocks=(module,), first=ran[id(module)])


def _containers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost containers of blocks."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}".removeprefix(".")
        blocks = _blocks_of(child)
        if len(blocks) > 1 and all(map(_is_block, blocks)) and not any(map(_is_model, blocks)):
            yield path, child
        else:
            yield from _containers(child, path)


def _blocks_of(container: nn.Module) -> list[nn.Module]:
    return list(_flat(container)) if isinstance(container, _CONTAINERS) else []


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _flat(child)
        else:
            yield child


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than a layer: two modules or more have parameters of their own in it."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules()) > 1


def _is_model(module: nn.Module) -> bool:
    return any(base.__name__ in {"ModelMixin", "PreTrainedModel"} for base in type(module).__mro__)


def _stack(part: Part, name: str, container: nn.Module, ran: Mapping[int, int]) -> Stack | None:
    blocks = _blocks_of(container)
    times = [ran[id(block)] for block in blocks if id(block) in ran]
    if len(times) < 2:
        return None
    return Stack(path=f"{part.path}.{name}", name=name, blocks=tuple(blocks), first=min(times))


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def undeclared(part: Part, stacks: list[Stack]) -> list[Stack]:
    """Return the stacks of a component of which no block is declared, nor lies in a declared one, nor holds one."""
    blocks = {id(block) for _, declared in part.stacks for _, block in declared}
    inside = {id(module) for _, declared in part.stacks for _, block in declared for module in block.modules()}
    return [
        stack
        for stack in stacks
        if not any(id(block) in inside or any(id(module) in blocks for module in block.modules()) for block in stack.blocks)
    ]


def with_stack(declared: tuple[str, ...], part: Part, stack: Stack, ran: Mapping[int, int]) -> tuple[str, ...]:
    """Return the names of stacks that are declared for a component with one more, in the order in which they ran."""
    times = {path: min((ran.get(id(block), -1) for _, block in blocks), default=-1) for path, blocks in part.stacks}
    later = [index for index, name in enumerate(declared) if times.get(f"{part.path}.{name}", -1) > stack.first]
    place = later[0] if later else len(declared)
    return (*declared[:place], stack.name, *declared[place:])
