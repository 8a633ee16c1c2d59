"""Which weight was used outside its activation: torch only says that devices differ."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import attrs
import torch

from omni_offload.errors import OffloadStateError
from omni_offload.residency import ModuleResidency

__all__ = ["OnHost", "explain"]

_SIGNS = ("same device", "expected device", "different device", "on device", "device type", "DeviceType", "Input type (torch.")

_TORCH = str(Path(torch.__file__).parent)

#: Line, last line, column, last column (bytes) of an expression in its file.
_Position = tuple[int | None, int | None, int | None, int | None]


@attrs.frozen
class OnHost:
    """A component, or a block of one, that was on the host.

    Attributes:
        component: The component's path.
        path: Its own.
        module: The module.
        residency: Its weights.
        advice: When it is on the device, and how to declare another use; ends a message.
    """

    component: str
    path: str
    module: torch.nn.Module
    residency: ModuleResidency
    advice: str = (
        "while the component was not active, so it was on the host; declare the method that uses it in _offload_entry_points, or use it "
        "within `with pipeline.on_device(...)`"
    )


def explain(error: BaseException, inactive: Iterable[OnHost]) -> OffloadStateError | None:
    """Return an error that names the component and the weight, where a device mismatch came from one that was on the host.

    Args:
        error: What a call on the pipeline raised.
        inactive: What was on the host where it was raised.

    Returns:
        The error to raise instead, with the cause set; None where the error is something else.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, OffloadStateError):
        return None
    if not any(sign in str(error) for sign in _SIGNS):
        return None
    weights = _Weights(inactive)
    for frame, position in _frames(error.__traceback__):
        for value in (*_operands(frame, position), frame.f_locals.get("self")):
            found = weights.find(value)
            if found is not None:
                return _error(*found, frame)
        if not frame.f_code.co_filename.startswith(_TORCH):
            return None  # further out stands who called the code that failed, with other operands
    return None


def _error(where: OnHost, weight: str, frame: FrameType) -> OffloadStateError:
    user = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
    return OffloadStateError(f"component {where.component!r}: {weight} was used by {user} {where.advice}")


class _Weights:
    """The modules and tensors of what is on the host, by identity, and the tensors by their memory, which views share."""

    def __init__(self, inactive: Iterable[OnHost]) -> None:
        self._names: dict[int, tuple[OnHost, str]] = {}
        self._spans: list[tuple[int, int, tuple[OnHost, str]]] = []
        for one in inactive:
            for path, module in one.module.named_modules(prefix=one.path):
                tensors = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
                self._names[id(module)] = (one, ", ".join(f"{path}.{name}" for name in tensors) or path)
            for name, tensor in one.residency.tensors():
                self._names[id(tensor)] = (one, name)
                self._spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, (one, name)))
            self._names.update((id(tensor), (one, name)) for name, tensor in one.residency.wrappers())

    def find(self, value: Any) -> tuple[OnHost, str] | None:
        """Return owner and name of a tensor, of a view of one, or of a module; None for anything else."""
        if id(value) in self._names or not isinstance(value, torch.Tensor):
            return self._names.get(id(value))
        if value.device.type != "cpu" or not value.numel():
            return None
        at = value.data_ptr()
        return next((found for first, end, found in self._spans if first <= at < end), None)


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, _Position]]:
    frames = []
    while traceback is not None:
        positions = list(traceback.tb_frame.f_code.co_positions())
        frames.append((traceback.tb_frame, positions[traceback.tb_lasti // 2]))
        traceback = traceback.tb_next
    return frames[::-1]


def _operands(frame: FrameType, position: _Position) -> Iterator[Any]:
    """Yield the tensors that the failing expression names, by looking their dotted names up (nothing is called)."""
    try:
        tree = ast.parse(f"({_source(frame.f_code.co_filename, position)})")
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.Subscript):
            value = _look_up(node, frame)
            if isinstance(value, torch.Tensor):
                yield value


def _source(filename: str, position: _Position) -> str:
    first, last, start, end = position
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()


def _look_up(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, frame)
        if isinstance(owner, torch.nn.Module):
            return owner.__dict__["_parameters"].get(node.attr, owner.__dict__["_modules"].get(node.attr, owner.__dict__.get(node.attr)))
        return getattr(owner, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _item(_look_up(node.value, frame), node.slice.value)
    return None


def _item(holder: Any, key: Any) -> Any:
    if isinstance(holder, torch.nn.ModuleList | torch.nn.ModuleDict):
        holder, key = holder.__dict__["_modules"], str(key)
    if type(holder) in (list, tuple) and isinstance(key, int):
        return dict(enumerate(holder)).get(key)
    return holder.get(key) if type(holder) is dict else None
