"""All or nothing: enable fails at any point, and interrupts land on any line."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from omni_offload.testing.bench import Bench
from omni_offload.testing.inject import (
    Injected,
    Interrupt,
    Line,
    code_files,
    counting_allocations,
    failing_registration,
    interrupted_at,
    lines_of,
    refuse_allocation,
)
from omni_offload.testing.reference import floating_type
from omni_offload.testing.snapshot import Snapshot

__all__ = ["check_interrupted_call", "check_interrupted_disable", "check_interrupted_enable", "check_rollback"]

#: Points that are tried where a run is not exhaustive; each case tries others.
_FAULTS, _FAULTS_ON_DEVICE = 9, 4
_LINES, _CALLS = 8, 6

_Fault = tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]


def check_rollback(bench: Bench) -> None:
    """Where enabling fails, at any pinned or device allocation or hook registration, everything is as it was before."""
    pipeline = bench.fresh()
    kinds = {component.kind for component in bench.plan(pipeline).components}
    keys: dict[str, Any] = {"components": ["dit"]} if "dit" in kinds and len(kinds) > 1 else {}
    faults = _faults_of_enabling(bench, pipeline, keys)
    for on_device in (False, True):
        pipeline = bench.fresh()
        if on_device:
            bench.to_device(pipeline)
        base, pinned = bench.allocated(), bench.pinned()
        before = Snapshot(bench.components(pipeline), pipeline)
        for what, fault in bench.sample(faults, _FAULTS_ON_DEVICE if on_device else _FAULTS):
            try:
                with fault():
                    bench.enable(pipeline, **keys)
            except (Injected, RuntimeError):
                when = f"after enabling failed at {what}, of a pipeline on {bench.device if on_device else 'the host'}"
                bench.require_unchanged(before, when=when)
                if bench.allocated() != base or bench.pinned() != pinned:
                    bench.fail(
                        f"as many bytes {when} as before", f"{bench.allocated() - base} on the device, {bench.pinned() - pinned} pinned"
                    )
            else:
                bench.fail(f"an error where {what} fails", "none")
        with bench.enabled(pipeline, **keys):
            bench.require_equal(bench.call(pipeline), when="after enabling had failed before")


def _faults_of_enabling(bench: Bench, pipeline: Any, keys: dict[str, Any]) -> list[_Fault]:
    """Return every failure to try, told by one run that goes well."""
    sim = bench.need_simulation("can let pinning fail") if bench.simulated else None
    pins = sim.pin_count() if sim else 0
    with counting_allocations() as made, failing_registration(-1) as registered:
        bench.enable(pipeline, **keys)
    pins = (sim.pin_count() if sim else 0) - pins
    bench.disable(pipeline)
    faults: list[_Fault] = []
    if sim:
        faults += [(f"pinned allocation {n + 1}", functools.partial(sim.settings, fail_pin_in=n)) for n in range(pins)]
    refusals = (functools.partial(counting_allocations, _refusing(bench, n)) for n in range(len(made)))
    faults += [(f"device allocation {n + 1}", refusal) for n, refusal in enumerate(refusals)]
    for after in (False, True):
        failures = (functools.partial(failing_registration, n, after=after) for n in range(len(registered)))
        faults += [(f"hook registration {n + 1}", failure) for n, failure in enumerate(failures)]
    return faults


def _refusing(bench: Bench, number: int) -> Callable[[int], None]:
    return lambda index: refuse_allocation(bench, wanted=index == number)


def check_interrupted_enable(bench: Bench) -> None:
    """After an interrupt at any line of enable, disable() repairs: all is whole, on the host, nothing pinned, no hook."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot(bench.components(pipeline), pipeline)
    holds = code_files(pipeline)
    lines = lines_of(lambda: bench.enable(pipeline), holds)
    bench.disable(pipeline)
    for number, line in enumerate(_chosen(bench, lines, _LINES)):
        _interrupt(bench, lambda: bench.enable(pipeline), line, what="enable")
        _require_repaired(bench, pipeline, before, base, pinned, when=f"after enable was interrupted at {line}, and disable")
        if number % 10 == 0:
            with bench.enabled(pipeline):
                bench.call(pipeline, keep=False)
            before = Snapshot(bench.components(pipeline), pipeline)
    with bench.enabled(pipeline):
        bench.require_equal(bench.call(pipeline), when="after interrupted enabling")


def check_interrupted_disable(bench: Bench) -> None:
    """After an interrupt at any line of disable, disabling again repairs."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot(bench.components(pipeline), pipeline)
    holds = code_files(pipeline)
    bench.enable(pipeline)
    lines = lines_of(lambda: bench.disable(pipeline), holds)
    for line in _chosen(bench, lines, _LINES):
        bench.enable(pipeline)
        _interrupt(bench, lambda: bench.disable(pipeline), line, what="disable")
        _require_repaired(bench, pipeline, before, base, pinned, when=f"after disable was interrupted at {line}, and disable")
    with bench.enabled(pipeline):
        bench.require_equal(bench.call(pipeline), when="after interrupted disabling")


def check_interrupted_call(bench: Bench) -> None:
    """After an interrupt at any line of the framework in a call, disable() repairs, and the next call is right."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    before = Snapshot(bench.components(pipeline))
    holds = code_files(pipeline)
    types = {path: floating_type(module) for path, module in bench.components(pipeline).items() if path in bench.reference.recast}
    bench.enable(pipeline)
    lines = lines_of(lambda: bench.call(pipeline), holds)
    for number, line in enumerate(_chosen(bench, lines, _CALLS)):
        _interrupt(bench, lambda: bench.call(pipeline), line, what="a call")
        if number % 2:
            _cast_back(bench, pipeline, types)
            bench.require_equal(bench.call(pipeline), when=f"after a call was interrupted at {line}")
            bench.require_left(pipeline, base, when=f"after a call was interrupted at {line}, and another call")
            continue
        bench.disable(pipeline)
        _cast_back(bench, pipeline, types)
        _require_repaired(
            bench, pipeline, before, base, pinned, when=f"after a call was interrupted at {line}, and disable", attributes=False
        )
        bench.enable(pipeline)
    bench.require_equal(bench.call(pipeline), when="after interrupted calls")


def _cast_back(bench: Bench, pipeline: Any, types: Mapping[str, torch.dtype | None]) -> None:
    """Undo the pipeline's own casts, which an interrupt cuts short: they would be with a resident pipeline, too."""
    components = bench.components(pipeline)
    for path, dtype in types.items():
        components[path].to(dtype)


def _chosen(bench: Bench, lines: list[Line], count: int) -> list[Line]:
    """Return a sample of lines, of which a hand-written owner's own are at least half where there are as many."""
    own = [line for line in lines if not line.in_framework]
    chosen = {*bench.sample(own, max(count // 2, 1)), *bench.sample(lines, count)}
    return [line for line in lines if line in chosen]


def _interrupt(bench: Bench, body: Callable[[], Any], line: Line, *, what: str) -> None:
    with interrupted_at(line) as landing:
        try:
            body()
        except Interrupt:
            return
    if landing.reached and not landing.in_finaliser:
        bench.fail(f"an interrupt of {what} at {line} to pass", "it was lost")


def _require_repaired(  # noqa: PLR0913  (each is measured by the caller)
    bench: Bench, pipeline: Any, before: Snapshot, base: int, pinned: int, *, when: str, attributes: bool = True
) -> None:
    bench.disable(pipeline)
    bench.require_unchanged(before, when=when, attributes=attributes)
    bench.require_disabled(pipeline, base, pinned, when=when)
    torch.accelerator.synchronize(bench.device)
