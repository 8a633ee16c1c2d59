"""What a failure leaves behind: nothing but what stays, and a pipeline whose next call is right."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.checks.edits import require_callback
from omni_offload.testing.checks.residency import replay
from omni_offload.testing.inject import Faults, Injected, counting_allocations, refuse_allocation
from omni_offload.testing.observe import Target

__all__ = ["check_failing_activations", "check_failing_callback", "check_failing_loads", "check_failing_uses", "check_threads"]

#: Seconds after which a call counts as one that never ends.
_PATIENCE = 120
#: Allocations of a call that are tried, those where a run is exhaustive or there are at most `_FEW`, and those of the framework's own.
_ACTIVATIONS, _ACTIVATIONS_EXHAUSTIVE, _LOADS, _FEW = 10, 100, 5, 100
#: Blocks that fail where a run is not exhaustive.
_BLOCKS = 2


def require_error(bench: Bench, body: Callable[[], Any], *, what: str) -> None:
    """Require that a body raises the error that was injected, itself and not another that stands for it."""
    try:
        body()
    except Injected as error:
        if error.__cause__ is not None or type(error) is not Injected:
            bench.fail(f"the error of {what} unchanged", repr(error))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is not what was raised)
        bench.fail(f"the error of {what} unchanged", repr(error))
    else:
        bench.fail(f"the error of {what} to pass", "no error")


def check_failing_uses(bench: Bench) -> None:
    """An error in a component's method or a block, at its first or last use, before or after its work, passes unchanged, leaves nothing."""
    pipeline = bench.fresh()
    blocks = _sampled_blocks(bench, pipeline)
    base = bench.allocated()
    counts = Counter(use.name for use in (*bench.reference.uses, *(bench.block_uses if blocks else ())))
    with Faults((*bench.used(pipeline), *blocks)) as faults, bench.enabled(pipeline) as backend:
        for target in (*bench.used(pipeline), *blocks):
            last = counts[str(target)] - 1
            for nth, after in dict.fromkeys([(0, False), (last, True)]):
                faults.arm(str(target), nth=nth, after=after)
                what = f"{target}, use {nth + 1}"
                require_error(bench, lambda: bench.call(pipeline), what=what)
                bench.require_left(pipeline, base, when=f"after an error in {what}")
            bench.require_equal(bench.call(pipeline), when=f"after errors in {target}")
            if target in blocks:
                continue
            faults.arm(str(target), nth=0, after=False)
            require_error(bench, lambda name=target: replay(bench, name, when="that fails"), what=f"{target} outside of a call")  # type: ignore[misc]
            backend.release()
            bench.require_left(pipeline, base, when=f"after an error in {target} outside of a call, and release()")
            replay(bench, target, when="after an error outside of a call")
    bench.require_disabled(pipeline, base, bench.pinned())


def _sampled_blocks(bench: Bench, pipeline: Any) -> list[Target]:
    """Return some of the blocks that stream and that a call uses; none in mode `module`."""
    if not bench.block_paths:
        return []
    used = {use.name for use in bench.block_uses}
    return bench.sample([target for target in bench.blocks(pipeline) if str(target) in used], _BLOCKS)


def check_failing_callback(bench: Bench) -> None:
    """An error in the user's callback_on_step_end passes unchanged, and leaves nothing."""
    pipeline = bench.fresh()
    require_callback(pipeline)
    base = bench.allocated()

    def callback(*_: Any) -> Any:
        raise Injected("the callback was told to fail")

    with bench.enabled(pipeline):
        require_error(bench, lambda: bench.call(pipeline, callback_on_step_end=callback), what="callback_on_step_end")
        bench.require_left(pipeline, base, when="after an error in a callback")
        bench.require_equal(bench.call(pipeline), when="after an error in a callback")


def check_failing_loads(bench: Bench) -> None:
    """A device allocation of the framework that fails in a call passes as torch.OutOfMemoryError and leaves nothing, or does no harm."""
    configurations: list[dict[str, Any]] = [{}]
    pipeline = bench.fresh()
    if not bench.by_hand(pipeline):
        configurations.append({"device_memory": 2 * bench.reference.weights})
    made_any = False
    for keys in configurations:
        pipeline = bench.fresh()
        base = bench.allocated()
        with bench.enabled(pipeline, **keys):
            with counting_allocations() as made:
                bench.call(pipeline)
            made_any = made_any or bool(made)
            numbers = bench.sample(list(range(len(made))), _LOADS)
            for number in numbers:
                with counting_allocations(lambda index, wanted=number: refuse_allocation(bench, wanted=index == wanted)):  # type: ignore[misc]
                    _require_memory_error_or_right(bench, pipeline, what=f"framework allocation {number + 1} of {len(made)} with {keys}")
                bench.require_left(pipeline, base, when=f"after framework allocation {number + 1} failed with {keys}")
                if bench.exhaustive or number == numbers[-1]:
                    bench.require_equal(bench.call(pipeline), when=f"after framework allocation {number + 1} failed with {keys}")
    if not made_any:
        raise NotRun("the pipeline makes no device allocation through the framework in a call")


def check_failing_activations(bench: Bench) -> None:
    """A device allocation that fails anywhere in a call (a seeded sample) passes as torch.OutOfMemoryError and leaves nothing."""
    sim = bench.need_simulation("can let the nth allocation fail")
    pipeline = bench.fresh()
    base = bench.allocated()
    with bench.enabled(pipeline):
        before = sim.allocation_count(bench.device)
        bench.call(pipeline, keep=False)
        count = sim.allocation_count(bench.device) - before
        wanted = _ACTIVATIONS_EXHAUSTIVE if bench.exhaustive or count <= _FEW else _ACTIVATIONS
        chosen = sorted(bench.random().sample(range(count), min(wanted, count)))
        for position, number in enumerate(chosen):
            sim.configure(fail_alloc_in=number)
            try:
                _require_memory_error_or_right(bench, pipeline, what=f"allocation {number + 1} of {count}")
            finally:
                sim.configure(fail_alloc_in=-1)
            bench.require_left(pipeline, base, when=f"after allocation {number + 1} of {count} failed")
            if bench.exhaustive or position % 10 == 9 or number == chosen[-1]:
                bench.require_equal(bench.call(pipeline), when=f"after allocation {number + 1} of {count} failed")
    bench.require_disabled(pipeline, base, bench.pinned())


def _require_memory_error_or_right(bench: Bench, pipeline: Any, *, what: str) -> None:
    try:
        outputs = bench.call(pipeline)
    except torch.OutOfMemoryError as error:
        if error.__cause__ is not None:
            bench.fail(f"the torch.OutOfMemoryError of {what} unchanged", repr(error))
        return
    except Exception as error:  # noqa: BLE001  (whatever it is, it is not what was raised)
        bench.fail(f"torch.OutOfMemoryError where {what} fails, unchanged", repr(error))
    bench.require_equal(outputs, when=f"where {what} failed and the call went on")


def check_threads(bench: Bench) -> None:
    """Calls from two threads take turns: each gets the right outputs."""
    pipeline = bench.fresh()
    base = bench.allocated()
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(bench.call(pipeline))
        except Exception as error:  # noqa: BLE001  (raised below)
            results.append(error)

    with bench.enabled(pipeline):
        threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                bench.fail("calls from two threads to end", f"one that runs after {_PATIENCE} s")
        for result in results:
            if isinstance(result, Exception):
                bench.fail("calls from two threads to take turns", repr(result))
            bench.require_equal(result, when="of calls from two threads")
        bench.require_left(pipeline, base, when="after calls from two threads", times=2, count_bytes=bench.simulated)
