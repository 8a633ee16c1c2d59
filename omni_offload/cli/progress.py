"""A pipeline's denoising steps as a bar on a terminal; nothing elsewhere."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["PREPARING", "shown_progress", "shown_wait"]

PREPARING = "preparing (the first time builds the simulated accelerator: 20 s)"

_HOOK = "progress_bar"
"""The method by which diffusers' pipelines make their bars: of an iterable, or of a number of steps."""


class _Bar:
    """What a pipeline sees: an iterable, or a context with `update`."""

    def __init__(self, progress: Progress, label: str, steps: Iterable[Any] | None, total: int | None) -> None:
        self._progress = progress
        self._steps = steps
        count = total if total is not None else len(steps) if isinstance(steps, Sized) else None
        self._task = progress.add_task(label, total=count)

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps or ():
            yield step
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.refresh()

    def update(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)


@contextmanager
def shown_progress(pipeline: Any, label: str, console: Console) -> Iterator[None]:
    """Show the bars that a pipeline makes while the body runs, on a terminal; elsewhere show none.

    The pipeline is as before when the body ends, also by an exception.

    Args:
        pipeline: The pipeline; one that makes no bars shows none.
        label: What the bar says.
        console: Where it is shown.
    """
    if not hasattr(pipeline, _HOOK):
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def progress_bar(iterable: Iterable[Any] | None = None, total: int | None = None) -> _Bar:
            return _Bar(progress, label, iterable, total)

        setattr(pipeline, _HOOK, progress_bar)
        try:
            yield
        finally:
            delattr(pipeline, _HOOK)


@contextmanager
def shown_wait(text: str, console: Console) -> Iterator[None]:
    """Show on a terminal that something takes a while, until the body ends.

    Args:
        text: What is done.
        console: Where it is shown.
    """
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
