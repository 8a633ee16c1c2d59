"""What there is to see of a pipeline from outside: its tensors, and the uses of its components."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from omni_offload.residency.derived import derived_names

__all__ = [
    "Target",
    "bytes_on",
    "cast_to",
    "copied_back",
    "copied_to",
    "device_size",
    "same_values",
    "span_of",
    "tensors_in",
    "tensors_of",
    "watching",
]

_UNIT = 512
_ALIGNMENT = 64
_DEPTH = 6
_MISSING = object()


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a module by name, each name of a tied one, non-persistent ones too."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    return named


def tensors_in(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Return the tensors in a result: in containers, and in attributes of plain objects such as distributions."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, torch.nn.Module | type | str | bytes | torch.Generator):
        return []
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dict__"):
        items = vars(value).values()
    return [tensor for item in items for tensor in tensors_in(item, depth - 1)]


def copied_to(value: Any, device: torch.device) -> Any:
    """Return arguments with every tensor copied to a device; containers are rebuilt, other objects are kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    if type(value) is dict:
        return {key: copied_to(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied_to(item, device) for item in value)
    return value


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with every floating tensor cast; containers are rebuilt, other objects are kept."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict:
        return {key: cast_to(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_to(item, dtype) for item in value)
    return value


def same_values(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit (NaN equals NaN), of equal types and shapes."""
    first, second = list(one), list(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    return torch.equal(one, other) or bool(
        torch.equal(torch.isnan(one), torch.isnan(other)) and torch.allclose(one, other, 0, 0, equal_nan=True)
    )


def bytes_on(module: torch.nn.Module, device: torch.device) -> list[str]:
    """Return the names of the tensors of a module that are bound to memory of a device's type."""
    return [name for name, tensor in tensors_of(module).items() if tensor.device.type == device.type and tensor.numel()]


def device_size(modules: Iterable[torch.nn.Module], *, alignment: int = _ALIGNMENT) -> int:
    """Return the device bytes that modules need at most: distinct byte ranges, each rounded up, in allocations of 512 bytes."""
    spans = sorted({span_of(tensor) for module in modules for tensor in _moving(module) if tensor.numel()})
    total, end = 0, -1
    for start, stop in spans:
        if start >= end:
            total += -(-(stop - start) // alignment) * alignment
        elif stop > end:
            total += -(-(stop - end) // alignment) * alignment
        end = max(end, stop)
    return -(-total // _UNIT) * _UNIT


def _moving(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what has to be on the device with a module: parameters, buffers and plain tensors, but not what is computed from them."""
    yield from tensors_of(module).values()
    for state in (inner.__dict__ for inner in module.modules()):
        computed = derived_names(state)
        yield from (value for name, value in state.items() if isinstance(value, torch.Tensor) and name not in computed)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one after its last."""
    reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


@contextmanager
def copied_back(modules: Iterable[torch.nn.Module], bench: Any) -> Iterator[list[int]]:
    """Collect the sizes in bytes of the copies to the host, in the body, of memory that the modules' tensors are bound to."""
    found: list[int] = []
    with _CopyWatch(list(modules), bench, found):
        yield found


class _CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Looks at every operator that copies to the host."""

    def __init__(self, modules: list[torch.nn.Module], bench: Any, found: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._modules = modules
        self._bench = bench
        self._found = found

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        before = self._bench.traffic()
        sources = [tensor for tensor in tensors_in([*args, kwargs or {}]) if tensor.device == self._bench.device]
        places = [tensor.data_ptr() for tensor in sources]
        result = func(*args, **(kwargs or {}))
        copied = self._bench.traffic()[1] - before[1]
        if copied and any(self._is_weight(place) for place in places):
            self._found.append(copied)
        return result

    def _is_weight(self, place: int) -> bool:
        bound = (t for m in self._modules for t in tensors_of(m).values() if t.device == self._bench.device and t.numel())
        return any(first <= place < end for first, end in map(span_of, bound))


@attrs.frozen
class Target:
    """A method whose uses are watched: the path of its component, its module, its name."""

    path: str
    module: torch.nn.Module = attrs.field(eq=False, repr=False)
    method: str

    def __str__(self) -> str:
        return f"{self.path}.{self.method}"


@contextmanager
def watching(
    targets: Iterable[Target], around: Callable[[Target, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Run a function around methods, inside of every hook that is installed later; enable within the `with` block.

    Args:
        targets: What is watched.
        around: Takes the target, the method itself and the arguments, and returns what the method should.

    Yields:
        Nothing. At the end the methods are as they were, also after an exception.
    """
    installed: list[tuple[Target, Any, Any]] = []
    active = [True]
    try:
        for target in targets:
            original = getattr(target.module, target.method)
            wrapper = _wrap(target, original, around, active)
            installed.append((target, wrapper, vars(target.module).get(target.method, _MISSING)))
            vars(target.module)[target.method] = wrapper
        yield
    finally:
        active.clear()
        for target, wrapper, former in reversed(installed):
            if vars(target.module).get(target.method) is wrapper:
                if former is _MISSING:
                    del vars(target.module)[target.method]
                else:
                    vars(target.module)[target.method] = former


def _wrap(target: Target, original: Callable[..., Any], around: Callable[..., Any], active: list[bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return around(target, original, args, kwargs) if active else original(*args, **kwargs)

    return watched
