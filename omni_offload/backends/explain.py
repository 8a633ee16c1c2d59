"""Which weight was used outside its activation: torch only says that devices differ."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from omni_offload.backends.rotation import Member
from omni_offload.errors import OffloadStateError

__all__ = ["explain"]

_SIGNS = ("same device", "expected device", "different device", "on device", "device type")


def explain(error: BaseException, members: Iterable[Member]) -> OffloadStateError | None:
    """Return an error that names the component and the weight, where a device mismatch came from one that was on the host.

    Args:
        error: What a call on the pipeline raised.
        members: The components of the pipeline.

    Returns:
        The error to raise instead, with the cause set; None where the error is something else.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, OffloadStateError):
        return None
    if not any(sign in str(error) for sign in _SIGNS):
        return None
    names = _names(members)
    for frame, line_range in _frames(error.__traceback__):
        for value in _operands(frame, line_range):
            if id(value) in names:
                return _error(*names[id(value)], frame)
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            return _error(*names[id(owner)], frame)
    return None


def _error(component: str, weight: str, frame: FrameType) -> OffloadStateError:
    where = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
    return OffloadStateError(
        f"component {component!r}: {weight} was used by {where} while the component was not active, so it was on the host; declare the "
        "method that uses it in _offload_entry_points, or use it within `with pipeline.on_device(...)`"
    )


def _names(members: Iterable[Member]) -> dict[int, tuple[str, str]]:
    names = {}
    for member in members:
        if member.stays or member.owner.active:
            continue
        for path, module in member.owner.module.named_modules(prefix=member.name):
            tensors = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
            inner = ", ".join(f"{path}.{name}" for name in tensors) or path
            names[id(module)] = (member.name, inner)
        for name, tensor in member.owner.residency.tensors():
            names[id(tensor)] = (member.name, name)
    return names


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, tuple[int, int]]]:
    frames = []
    while traceback is not None:
        positions = list(traceback.tb_frame.f_code.co_positions())
        first, last, *_ = positions[traceback.tb_lasti // 2]
        line = traceback.tb_lineno
        frames.append((traceback.tb_frame, (first or line, last or line)))
        traceback = traceback.tb_next
    return frames[::-1]


def _operands(frame: FrameType, lines: tuple[int, int]) -> Iterator[Any]:
    """Yield the tensors and modules that the failing expression names, by looking their dotted names up (nothing is called)."""
    text = "".join(linecache.getline(frame.f_code.co_filename, number) for number in range(lines[0], lines[1] + 1)).strip()
    try:
        tree = ast.parse(text.removesuffix(":"))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            value = _look_up(node, frame)
            if isinstance(value, torch.Tensor | torch.nn.Module):
                yield value


def _look_up(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _look_up(node.value, frame)
        if isinstance(owner, torch.nn.Module):
            return owner.__dict__["_parameters"].get(node.attr, owner.__dict__["_modules"].get(node.attr, owner.__dict__.get(node.attr)))
        return getattr(owner, "__dict__", {}).get(node.attr)
    return None
