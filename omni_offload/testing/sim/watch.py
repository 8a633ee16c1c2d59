"""Check the host's own reads and writes of pinned memory too."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from omni_offload.testing.sim.library import DEVICE_TYPE, library

__all__ = ["watch_host"]


class watch_host(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801  (used as `with watch_host():`)
    """Report races between the host's torch operations and queued copies, inside a `with` block.

    CPU kernels do not pass through the device, so that the checker sees them only in here: a pinned target that is read
    before the copy has been waited for, a pinned source that is overwritten too early. Costs about 4x the time of small
    operations. `.numpy()` and raw pointers stay invisible.
    """

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = list(_tensors(func._schema, args, kwargs))  # noqa: SLF001  (torch has no public name for it)
        asked = kwargs.get("device")
        on_device = any(tensor.device.type == DEVICE_TYPE for tensor, _ in touched)
        if not (func.is_view or on_device or (asked is not None and torch.device(asked).type == DEVICE_TYPE)):
            for tensor, write in touched:
                _touch(tensor, write=write, what=func._schema.name)  # noqa: SLF001
        return func(*args, **kwargs)


def _tensors(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield every tensor among the arguments and whether the operator writes it."""
    named = {argument.name: argument for argument in schema.arguments}
    given = [*zip(args, schema.arguments, strict=False), *((value, named[name]) for name, value in kwargs.items())]
    for value, argument in given:
        write = bool(argument.alias_info and argument.alias_info.is_write)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item, write


def _touch(tensor: torch.Tensor, *, write: bool, what: str) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    library().host_touch(tensor.data_ptr(), elements * tensor.itemsize, write, what)
