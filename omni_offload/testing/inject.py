"""Faults, made on purpose: failing uses, allocations, registrations, and interrupts at a chosen line."""

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

import attrs
import torch

from omni_offload.accelerator import Accelerator
from omni_offload.hooks import HookRegistry
from omni_offload.testing.observe import Target, watching

__all__ = [
    "Faults",
    "Injected",
    "Interrupt",
    "Line",
    "code_files",
    "counting_allocations",
    "failing_registration",
    "interrupted_at",
    "lines_of",
    "refuse_allocation",
]

_NOP = dis.opmap["NOP"]
_SWAP = dis.opmap["SWAP"]
_LOAD_CONST = dis.opmap["LOAD_CONST"]
_PACKAGE = Path(__file__).resolve().parent.parent


class Injected(RuntimeError):  # noqa: N818  (a fault, not an error of the kit)
    """The error that injected failures raise."""


class Interrupt(KeyboardInterrupt):
    """The interrupt that is injected, told apart from the user's own."""


class Faults:
    """Methods that fail when they are told to. Enable within the `with` block, so that they fail inside of the hooks.

    Args:
        targets: The methods.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        self._watch = watching(list(targets), self._around)
        self._armed: tuple[str, int, bool] | None = None

    def arm(self, name: str, *, nth: int, after: bool) -> None:
        """Let the nth use of `path.method` from now (from 0) raise an `Injected`, once its work is done or before; once."""
        self._armed = (name, nth, after)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, trace)

    def _around(self, target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._armed is None or self._armed[0] != str(target):
            return method(*args, **kwargs)
        name, nth, after = self._armed
        self._armed = None if nth == 0 else (name, nth - 1, after)
        if nth > 0:
            return method(*args, **kwargs)
        if after:
            method(*args, **kwargs)
        raise Injected(f"{name} was told to fail")


def refuse_allocation(bench: Any, *, wanted: bool) -> None:
    """Let the device allocation that follows fail, if wanted: the simulated accelerator refuses it, elsewhere it is not asked."""
    if wanted and bench.simulated:
        bench.need_simulation("refuses allocations").configure(fail_alloc_in=0)
    elif wanted:
        raise torch.OutOfMemoryError("an allocation was told to fail")


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

    @property
    def in_framework(self) -> bool:
        """Whether it is the framework's, or else a hand-written owner's."""
        return self.file.startswith(str(_PACKAGE))

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
            inside = file.startswith((str(_PACKAGE), str(folder)))
            known[file] = inside and not file.startswith(testing)
        return known[file]

    return holds


def _out_of_reach(code: CodeType) -> frozenset[int]:
    """Return the instructions that begin lines which no real interrupt lands on: Python looks for signals after calls and at jumps back.

    That is what stands between the end of a `with` block's body and its `__exit__` (it begins with loading None three times, the
    arguments, below a value that is returned), and a `try:` that begins the body (which does nothing, and is not yet guarded by the
    block).
    """
    operations = code.co_code[::2]
    return frozenset(2 * at for at in range(len(operations)) if _begins_out_of_reach(operations[at : at + 4]))


def _begins_out_of_reach(operations: bytes) -> bool:
    start = 1 if operations[0] == _SWAP else 0
    return operations[0] == _NOP or list(operations[start : start + 3]) == [_LOAD_CONST] * 3


@contextmanager
def _tracing(holds: Callable[[CodeType], bool], on_line: Callable[[FrameType], None]) -> Iterator[None]:
    known: dict[int, tuple[CodeType, Any]] = {}  # by id: to hash code is to hash all that it holds

    def tracer_of(code: CodeType) -> Any:
        skipped = _out_of_reach(code)

        def local(frame: FrameType, event: str, _argument: Any) -> Any:
            if event == "line" and frame.f_lasti not in skipped:
                on_line(frame)
            return local

        return local

    def entered(frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = code, tracer_of(code) if holds(code) else None
        return found[1]

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

    with _tracing(lambda code: holds(code.co_filename), on_line):
        body()
    return [Line(file, number, nth) for (file, number), count in counts.items() for nth in sorted({0, count - 1})]


@attrs.define
class Landing:
    """What became of an interrupt.

    Attributes:
        reached: Whether the line was executed, and the interrupt raised.
        in_finaliser: Whether that was in a finaliser, where nobody can catch it.
    """

    reached: bool = False
    in_finaliser: bool = False


@contextmanager
def interrupted_at(line: Line) -> Iterator[Landing]:
    """Raise an `Interrupt` when a line is executed in the body.

    Yields:
        What became of it. An interrupt in a finaliser is kept quiet.
    """
    landing = Landing()
    seen = [0]

    def holds(code: CodeType) -> bool:
        return code.co_filename == line.file and any(number == line.number for _, _, number in code.co_lines())

    def on_line(frame: FrameType) -> None:
        if not landing.reached and frame.f_lineno == line.number and frame.f_code.co_filename == line.file:
            seen[0] += 1
            if seen[0] == line.nth + 1:
                landing.reached = True
                raise Interrupt

    def unraisable(event: Any) -> None:
        if event.exc_type is Interrupt:
            landing.in_finaliser = True
        else:
            former(event)

    former, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        with _tracing(holds, on_line):
            yield landing
    finally:
        sys.unraisablehook = former
