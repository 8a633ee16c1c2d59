"""Runs checks on a case, each from the same settings of the device, and reports on all of them."""

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from omni_offload.accelerator import resolve_device
from omni_offload.config import OffloadMode
from omni_offload.errors import OffloadConfigError, quoted
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.case import PipelineCase
from omni_offload.testing.casting import type_name
from omni_offload.testing.checks import CHECKS
from omni_offload.testing.report import CheckReport, CheckResult, Outcome

__all__ = ["Check", "all_checks", "asked_checks", "check_pipeline", "make_bench", "refuse_unknown_failures", "rule_of", "run_check"]

Check = Callable[[Bench], None]


def all_checks() -> tuple[Check, ...]:
    """Return every check in the order in which they run; the first line of a check's docstring is its rule."""
    return CHECKS


def rule_of(check: Check) -> str:
    """Return the rule that a check checks."""
    return (check.__doc__ or "").strip().partition("\n")[0]


def check_pipeline(  # noqa: PLR0913  (options, all with defaults)
    case: PipelineCase,
    *,
    device: torch.device | str | None = None,
    checks: Iterable[Check | str] | None = None,
    exhaustive: bool = False,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    mode: OffloadMode | str = OffloadMode.MODULE,
    begin: Callable[[str], None] = lambda _: None,
    done: Callable[[CheckResult], None] = lambda _: None,
) -> CheckReport:
    """Run the contract on a case.

    Args:
        case: What is checked.
        device: An accelerator; None: the simulated one, which is built on first use. Its settings are put back at the end.
        checks: Which of `all_checks()`, themselves or by name, or further functions of the same form; None: all.
        exhaustive: Try every line, allocation and registration where the default is a seeded sample.
        seed: Of the samples.
        dtype: Check the case in this floating type, as `case.cast(dtype)` says; None: as it is.
        mode: How weights are moved: `module`, or `layer`, in which every check that does not apply where nothing streams is NOT_RUN.
        begin: Called with the name of every check that is asked for, before it runs.
        done: Called with every result, in the order of the report; what it or `begin` raises ends the run.

    Returns:
        A result for every check of `all_checks()`; those that were not asked for are NOT_RUN.

    Raises:
        OffloadConfigError: A name, here or in the case's expected failures, is no check's; or the mode is neither.
    """
    asked = asked_checks(checks)
    refuse_unknown_failures(case, extra=[check.__name__ for check in asked])
    case = case if dtype is None else case.cast(dtype)
    bench = make_bench(case, device, mode=mode, exhaustive=exhaustive, seed=seed)
    results = []
    for check in (*CHECKS, *(check for check in asked if check not in CHECKS)):
        if check in asked:
            begin(check.__name__)
            results.append(run_check(check, bench))
        else:
            results.append(_result(check, Outcome.NOT_RUN, "not asked for"))
        done(results[-1])
    return CheckReport(case=case.name, device=str(bench.device), mode=bench.mode.value, results=tuple(results))


def make_bench(
    case: PipelineCase,
    device: torch.device | str | None = None,
    *,
    mode: OffloadMode | str = OffloadMode.MODULE,
    exhaustive: bool = False,
    seed: int = 0,
) -> Bench:
    """Return a bench on a device; None: on the simulated accelerator, which is built on first use.

    Raises:
        OffloadConfigError: The mode is not `module`, nor `layer`.
    """
    if mode not in (OffloadMode.MODULE, OffloadMode.LAYER):
        raise OffloadConfigError(f"the contract was asked for in mode {quoted(mode)}; give 'module' or 'layer'")
    if device is None:
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        device = sim.install()
    return Bench(case, resolve_device(device), mode=OffloadMode(mode), exhaustive=exhaustive, seed=seed)


def run_check(check: Check, bench: Bench) -> CheckResult:
    """Run one check; what it left is cleaned up, and the device's settings and current stream are put back."""
    started = time.perf_counter()
    bench.check, bench.note = check.__name__, ""
    outcome, reason = Outcome.PASSED, ""
    with _default_settings(bench):
        bench.prepare()
        try:
            bench.require_streaming()
            _require_type_that_runs(bench)
            check(bench)
        except NotRun as why:
            outcome, reason = Outcome.NOT_RUN, str(why)
        except Exception as error:  # noqa: BLE001  (whatever a pipeline raises is a finding)
            outcome, reason = Outcome.FAILED, _describe(error)
        finally:
            bench.clean_up()
    expected = bench.case.expected_failures.get(check.__name__)
    if expected is not None and outcome is Outcome.FAILED:
        outcome, reason = Outcome.EXPECTED_FAILURE, f"{expected} ({reason})"
    elif expected is not None and outcome is Outcome.PASSED:
        outcome, reason = Outcome.UNEXPECTED_PASS, f"it was expected to fail: {expected}"
    return _result(check, outcome, reason or bench.note, time.perf_counter() - started)


def _require_type_that_runs(bench: Bench) -> None:
    if bench.case.dtype is not None and bench.unrunnable is not None:
        raise NotRun(f"the pipeline does not run in {type_name(bench.case.dtype)} without offload: {_describe(bench.unrunnable)}")


def _result(check: Check, outcome: Outcome, reason: str, seconds: float = 0.0) -> CheckResult:
    return CheckResult(check=check.__name__, rule=rule_of(check), outcome=outcome, reason=reason, seconds=seconds)


def _describe(error: BaseException) -> str:
    text = str(error)
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()))
    return text + notes if text.startswith("check_") else f"{type(error).__name__}: {text}{notes}"


def asked_checks(checks: Iterable[Check | str] | None) -> list[Check]:
    """Return what is asked for: checks, themselves or by name; None: all.

    Raises:
        OffloadConfigError: A name is no check's.
    """
    if checks is None:
        return list(CHECKS)
    given = list(checks)
    _refuse_unknown([check for check in given if isinstance(check, str)], "checks names")
    known = {check.__name__: check for check in CHECKS}
    return [known[check] if isinstance(check, str) else check for check in given]


def refuse_unknown_failures(case: PipelineCase, *, extra: Iterable[str] = ()) -> None:
    """Refuse a case that expects checks to fail that there are not.

    Args:
        case: The case.
        extra: Names of further checks.

    Raises:
        OffloadConfigError: Names them, and all that there are.
    """
    _refuse_unknown(case.expected_failures, f"expected_failures of case {case.name!r} names", extra)


def _refuse_unknown(names: Iterable[str], subject: str, extra: Iterable[str] = ()) -> None:
    known = {*(check.__name__ for check in CHECKS), *extra}
    unknown = sorted(set(names) - known)
    if unknown:
        raise OffloadConfigError(f"{subject} {', '.join(unknown)}, which are no checks; there are: {', '.join(sorted(known))}")


@contextlib.contextmanager
def _default_settings(bench: Bench) -> Iterator[None]:
    """Let every check start from the same settings, trace function, device and stream, and put the caller's back."""
    trace, index = sys.gettrace(), torch.accelerator.current_device_index()
    stream = torch.accelerator.current_stream(bench.device)
    logger = logging.getLogger("omni_offload")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # failures are made on purpose
    if not bench.frozen:
        gc.freeze()  # collections within a check look at its own objects only
    try:
        if not bench.simulated:
            yield
            return
        from omni_offload.testing import sim  # noqa: PLC0415  (built on first use)

        free = {"capacity": 0, "pinned_capacity": 0, "fail_alloc_in": -1, "fail_pin_in": -1}
        fast = {"h2d_gbps": 0.0, "d2h_gbps": 0.0, "copy_latency": 0.0}
        known = len(sim.races())
        with sim.settings(mode="virtual", races="record", poison=True, devices=max(2, sim.current_settings().devices), **free, **fast):
            yield
        bench.races += [f"{race.message} (in {bench.check})" for race in sim.races()[known:]]
    finally:
        if not bench.frozen:
            gc.unfreeze()
        logger.setLevel(level)
        torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)
        sys.settrace(trace)
