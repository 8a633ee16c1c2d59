"""`omni-offload check`: the contract on one case after the other."""

import contextlib
import difflib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omni_offload.cli.cases import Subject, find_subjects, importing_from_here
from omni_offload.cli.noise import without_noise
from omni_offload.cli.places import SIM, Kind, choose_place, fewer_threads
from omni_offload.cli.problems import InputError
from omni_offload.cli.progress import PREPARING, shown_wait
from omni_offload.cli.verdict import CheckedCase, Verdict
from omni_offload.config import OffloadMode
from omni_offload.testing import CheckReport, CheckResult, Outcome, all_checks, check_pipeline
from omni_offload.testing.casting import type_name
from omni_offload.testing.runner import rule_of

__all__ = ["run_checks"]

_PREFIX = "check_"
_MODES = ("module", "layer")
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}


def run_checks(  # noqa: PLR0913  (options of a command line)
    targets: Sequence[str],
    *,
    every: bool,
    checks: Sequence[str] | None,
    exhaustive: bool,
    seed: int,
    device: str | None,
    mode: str,
    dtypes: Sequence[str],
    each: Callable[[CheckedCase], None],
) -> Verdict:
    """Run the contract on everything that is named; the arguments are the command line's.

    Every case that was checked is passed to `each` at once. An interrupt ends it: what was done by then is returned.

    Raises:
        InputError: Something that the user can put right.
    """
    names = _check_names(checks)
    moved = _mode(mode)
    types: list[torch.dtype | None] = [_dtype(name) for name in dict.fromkeys(dtypes)] or [None]
    start, console = time.perf_counter(), Console(stderr=True)
    verdict = Verdict(seed=seed, exhaustive=exhaustive)
    with without_noise(), importing_from_here(), _stopping() as stopped:
        with shown_wait(PREPARING, console), contextlib.redirect_stdout(sys.stderr):
            place = choose_place(device or SIM)
            if place.kind is Kind.CPU:
                raise InputError(f"--device {device}: the contract is about what an accelerator holds; give {SIM} or an accelerator")
            subjects, verdict.without_cases = find_subjects(targets, every=every)
        for subject, dtype in ((subject, dtype) for subject in subjects for dtype in types):
            device_name = str(place.device)
            run = _Run(subject=subject, dtype=dtype, mode=moved, names=names, device=device_name, console=console, stopped=stopped)
            verdict.cases.append(run.checked(exhaustive=exhaustive, seed=seed))
            each(verdict.cases[-1])
            if stopped:
                verdict.interrupted = True
                break
    verdict.seconds = time.perf_counter() - start
    return verdict


def _check_names(given: Sequence[str] | None) -> list[str]:
    """Return the names of the checks that are asked for, in the order in which they run.

    Raises:
        InputError: A name is no check's.
    """
    known = [check.__name__ for check in all_checks()]
    if given is None:
        return known
    asked = [name for names in given for part in names.split(",") if (name := part.strip())]
    whole = {name if name.startswith(_PREFIX) else f"{_PREFIX}{name}" for name in asked}
    for name in sorted(whole.difference(known)):
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known], n=1)
        hint = f"did you mean '{_PREFIX}{close[0]}'?" if close else f"there are: {', '.join(known)}"
        raise InputError(f"--checks: there is no check {name!r}; {hint}")
    if not whole:
        raise InputError(f"--checks names no check; there are: {', '.join(known)}")
    return [name for name in known if name in whole]


def _mode(name: str) -> OffloadMode:
    if name not in _MODES:
        raise InputError(f"--mode {name!r} is none that the contract is run in; give {' or '.join(_MODES)}")
    return OffloadMode(name)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InputError(f"--dtype {name!r} is no type to check in; give fp32, bf16 or fp16")
    return _DTYPES[name]


@attrs.frozen(kw_only=True)
class _Run:
    """One case on one device, in one type and mode."""

    subject: Subject
    mode: OffloadMode
    dtype: torch.dtype | None
    names: list[str]
    device: str
    console: Console
    stopped: list[bool]

    def checked(self, *, exhaustive: bool, seed: int) -> CheckedCase:
        """Run the checks; where an interrupt ends them, what was done by then."""
        results: list[CheckResult] = []
        case = self.subject.case if self.dtype is None else self.subject.case.cast(self.dtype)
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            stack.enter_context(fewer_threads(self.subject.weight_bytes))
            shown = stack.enter_context(self._progress())

            def begin(name: str) -> None:
                shown(name, 0)

            def done(result: CheckResult) -> None:
                if self.stopped:  # the check may have taken the interrupt for one of its own
                    raise KeyboardInterrupt
                results.append(result)
                if result.check in self.names:
                    shown(result.check, 1)

            check_pipeline(
                case,
                device=self.device,
                checks=self.names,
                exhaustive=exhaustive,
                seed=seed,
                mode=self.mode,
                begin=begin,
                done=done,
            )
        return CheckedCase(
            target=self.subject.target,
            dtype=None if self.dtype is None else type_name(self.dtype),
            report=CheckReport(case=case.name, device=self.device, mode=self.mode.value, results=(*results, *_missing(results))),
            seconds=time.perf_counter() - start,
        )

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[str, int], None]]:
        """Yield what shows on a terminal which check runs, and how many are done."""
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, disable=hidden, transient=True) as progress:
            task = progress.add_task(self.subject.case.name, total=len(self.names))
            yield lambda name, count: progress.update(task, description=f"{self.subject.case.name}: {name}", advance=count)


def _missing(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return a result for every check that an interrupt came before."""
    return [
        CheckResult(check=check.__name__, rule=rule_of(check), outcome=Outcome.NOT_RUN, reason="interrupted before it was done")
        for check in all_checks()[len(results) :]
    ]


@contextlib.contextmanager
def _stopping() -> Iterator[list[bool]]:
    """Note an interrupt from the keyboard beside raising it: some checks interrupt on purpose, and would take it for their own.

    Yields:
        A list that is empty until there was one.
    """
    stopped: list[bool] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.append(True)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    former = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, former)
