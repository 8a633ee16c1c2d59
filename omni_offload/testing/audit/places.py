"""Where in the code a weight is read: the methods of the pipeline and of its modules that run, the outermost first."""

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import attrs
import torch
from torch import nn

from omni_offload.hooks import generator_kind
from omni_offload.testing.audit.parts import Part

__all__ = ["Place", "Step", "is_maintenance", "method_in", "place", "public_methods", "transferred"]

_DISPATCH = ("_call_impl", "_wrapped_call_impl")
_MAINTAINS = frozenset(
    {
        nn.Module._apply.__code__,  # noqa: SLF001  (what every cast and move goes through)
        nn.Module.load_state_dict.__code__,
    }
)


@attrs.frozen
class Step:
    """One method that runs.

    Attributes:
        owner: Whose method it is.
        method: Its name.
        where: File and line.
    """

    owner: object = attrs.field(repr=False, eq=False)
    method: str
    where: str

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.method}"


@attrs.frozen
class Place:
    """Where something happens.

    Attributes:
        steps: The methods of modules and pipelines, the outermost first.
        where: File and line of the innermost one.
    """

    steps: tuple[Step, ...] = attrs.field(repr=False)

    @property
    def where(self) -> str:
        """File and line of the innermost method."""
        return self.steps[-1].where if self.steps else ""

    @property
    def path(self) -> tuple[str, ...]:
        """The methods by class and name, each of several in a row once."""
        found = [str(step) for step in self.steps]
        return tuple(name for index, name in enumerate(found) if index == 0 or found[index - 1] != name)

    def by_pipeline(self, pipeline: object) -> Step | None:
        """Return the innermost method of the pipeline itself; None where there is none."""
        return next((step for step in reversed(self.steps) if step.owner is pipeline), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (the documented way to the calling frames)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place(pipeline: object) -> Place:
    """Return where the caller is."""
    steps = []
    for frame in _frames():
        code = frame.f_code
        if not code.co_argcount:
            continue
        owner = frame.f_locals.get(code.co_varnames[0])
        if isinstance(owner, nn.Module) or owner is pipeline or _is_pipeline(owner):
            method = "forward" if code.co_name in _DISPATCH else code.co_name
            if callable(getattr(type(owner), method, None)):
                steps.append(Step(owner, method, f"{Path(code.co_filename).name}:{frame.f_lineno}"))
    return Place(tuple(reversed(steps)))


def _is_pipeline(owner: object) -> bool:
    return any(base.__name__ == "DiffusionPipeline" for base in type(owner).__mro__)


def is_maintenance() -> bool:
    """Whether the caller casts, moves or loads the weights of a module, which is possible at any time."""
    return any(frame.f_code in _MAINTAINS for frame in _frames())


def method_in(part: Part, steps: Iterable[Step]) -> tuple[str, str] | None:
    """Return path and name of the outermost method of a component's modules that can be an entry point; None where there is none."""
    names = {id(module): name for name, module in part.module.named_modules()}
    for step in steps:
        if id(step.owner) in names and generator_kind(getattr(type(step.owner), step.method, None)) is None:
            return f"{part.path}.{names[id(step.owner)]}".removesuffix("."), step.method
    return None


def public_methods(pipeline: object, steps: Iterable[Step]) -> list[str]:
    """Return the pipeline's own public methods among some, the outermost first: those that people call by themselves."""
    found = []
    for step in steps:
        if step.owner is pipeline and not step.method.startswith("_") and step.method != "forward":
            plain = inspect.getattr_static(type(pipeline), step.method, None)
            if inspect.isfunction(plain) and generator_kind(plain) is None:
                found.append(step.method)
    return list(dict.fromkeys(found))


def transferred(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a call of a tensor's method brings it to a device that is named."""
    if func in (torch.Tensor.cuda, torch.Tensor.xpu):
        return True
    if func is not torch.Tensor.to:
        return False
    values = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    return any(isinstance(value, str | int | torch.device | torch.Tensor) and not isinstance(value, bool) for value in values)
