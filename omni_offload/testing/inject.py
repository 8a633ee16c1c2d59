"""Faults, made on purpose: failing uses, allocations, registrations, and interrupts at a chosen line."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

from omni_offload.accelerator import Accelerator
from omni_offload.hooks import HookRegistry
from omni_offload.testing.observe import Target, watching

__all__ = [
    "Injected",
    "Interrupt",
    "Line",
    "code_files",
    "counting_allocations",
    "failing_registration",
    "failing_use",
    "interrupted_at",
    "lines_of",
]

_PACKAGE = Path(__file__).resolve().parent.parent


class Injected(RuntimeError):
    """The error that injected failures raise."""


class Interrupt(KeyboardInterrupt):
    """The interrupt that is injected, told apart from the user's own."""


@contextmanager
def failing_use(targets: Iterable[Target], name: str, *, nth: int, after: bool) -> Iterator[list[Injected]]:
    """Let the nth use of a method fail; enable within the block.

    Args:
        targets: What is watched.
        name: The `path.method` that fails.
        nth: Which use of it, from 0.
        after: Whether it fails once its work is done, or before.

    Yields:
        The error, as soon as it was raised.
    """
    raised: list[Injected] = []
    seen = [0]

    def around(_target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen[0] += 1
        fails = seen[0] == nth + 1
        result = method(*args, **kwargs) if after or not fails else None
        if fails:
            raised.append(Injected(f"{name} was told to fail"))
            raise raised[-1]
        return result

    with watching([target for target in targets if str(target) == name], around):
        yield raised


@contextmanager
def counting_allocations(before: Callable[[int], None] | None = None) -> Iterator[list[int]]:
    """Count the device allocations that the framework makes itself.

    Args:
        before: Called with each one's number, from 0, before it is made.

    Yields:
        A list with the number of bytes of each, in order.
    """
    original = Accelerator.allocate
    made: list[int] = []

    def allocate(self: Accelerator, nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        if before is not None:
            before(len(made) - 1)
        return original(self, nbytes)

    Accelerator.allocate = allocate  # type: ignore[method-assign]  # put back below
    try:
        yield made
    finally:
        Accelerator.allocate = original  # type: ignore[method-assign]


@contextmanager
def failing_registration(nth: int, *, after: bool = False) -> Iterator[list[int]]:
    """Let the nth registration of a hook fail, before or after it is done; yields a list as long as there were registrations."""
    original = HookRegistry.register_hook
    made: list[int] = []

    def register_hook(self: HookRegistry, *args: Any, **kwargs: Any) -> None:
        made.append(len(made))
        if after or len(made) - 1 != nth:
            original(self, *args, **kwargs)
        if len(made) - 1 == nth:
            raise Injected(f"registration {nth} was told to fail")

    HookRegistry.register_hook = register_hook  # type: ignore[method-assign]  # put back below
    try:
        yield made
    finally:
        HookRegistry.register_hook = original  # type: ignore[method-assign]


@attrs.frozen(order=True)
class Line:
    """One execution of a line of code.

    Attributes:
        file: Its file.
        number: Its number.
        nth: Which execution of it, from 0.
    """

    file: str
    number: int
    nth: int = 0

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} (execution {self.nth + 1})"


def code_files(pipeline: Any) -> Callable[[str], bool]:
    """Return whether a file holds code that enables and disables: the framework's, and a hand-written owner's folder."""
    method = inspect.unwrap(type(pipeline).enable_omni_model_cpu_offload) if hasattr(pipeline, "enable_omni_model_cpu_offload") else None
    folder = Path(inspect.getfile(method)).resolve().parent if method is not None else _PACKAGE
    testing = str(_PACKAGE / "testing")
    known: dict[str, bool] = {}

    def holds(file: str) -> bool:
        if file not in known:
            inside = file.startswith(str(_PACKAGE)) or file.startswith(str(folder))
            known[file] = inside and not file.startswith(testing)
        return known[file]

    return holds


@contextmanager
def _tracing(holds: Callable[[str], bool], on_line: Callable[[FrameType], None]) -> Iterator[None]:
    def local(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            on_line(frame)
        return local

    def entered(frame: FrameType, _event: str, _argument: Any) -> Any:
        return local if holds(frame.f_code.co_filename) else None

    former = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(former)


def lines_of(body: Callable[[], Any], holds: Callable[[str], bool]) -> list[Line]:
    """Run a function and return the first and the last execution of every line of some files, in order."""
    counts: Counter[tuple[str, int]] = Counter()

    def on_line(frame: FrameType) -> None:
        counts[frame.f_code.co_filename, frame.f_lineno] += 1

    with _tracing(holds, on_line):
        body()
    return [Line(file, number, nth) for (file, number), count in counts.items() for nth in sorted({0, count - 1})]


@contextmanager
def interrupted_at(line: Line, holds: Callable[[str], bool]) -> Iterator[list[Line]]:
    """Raise an `Interrupt` when a line is executed in the body.

    Yields:
        The line, as soon as it was reached. An interrupt in a finaliser, which nobody can catch, is kept quiet.
    """
    reached: list[Line] = []
    seen = [0]

    def on_line(frame: FrameType) -> None:
        if not reached and frame.f_lineno == line.number and frame.f_code.co_filename == line.file:
            seen[0] += 1
            if seen[0] == line.nth + 1:
                reached.append(line)
                raise Interrupt

    former = sys.unraisablehook
    sys.unraisablehook = lambda event: None if event.exc_type is Interrupt else former(event)
    try:
        with _tracing(holds, on_line):
            yield reached
    finally:
        sys.unraisablehook = former
