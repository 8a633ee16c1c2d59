"""Enable and disable."""

import gc

import torch

from omni_offload.errors import OffloadStateError
from omni_offload.testing.bench import Bench, NotRun
from omni_offload.testing.observe import same_values
from omni_offload.testing.snapshot import Snapshot

__all__ = [
    "check_cycles",
    "check_enable_from_device",
    "check_execution_device",
    "check_idempotence",
    "check_identity",
    "check_inference_modes",
    "check_repeated_calls",
    "check_round_trip",
    "check_second_device",
]

#: Uses of a component that objects are compared in.
_LOOKS = 2
#: Cycles of enable and disable; what the first leaves is seen after it, what only repetition leaves after the second.
_CYCLES = 2
#: Further calls that have to leave nothing.
_CALLS, _CALLS_EXHAUSTIVE = 3, 50


def check_round_trip(bench: Bench) -> None:
    """Enable and disable, with or without a call between, leave tensors, ties, attributes and hooks as they were, and no byte."""
    for pin in (True, False):
        pipeline = bench.fresh()
        base, pinned = bench.allocated(), bench.pinned()
        before = Snapshot(bench.components(pipeline), pipeline)
        with bench.enabled(pipeline, pin_memory=pin):
            if not pin and bench.pinned() > pinned:
                bench.fail("nothing pinned with pin_memory=False", f"{bench.pinned() - pinned} bytes")
        bench.require_unchanged(before, when="after enable and disable")
        bench.require_disabled(pipeline, base, pinned)
        with bench.enabled(pipeline, pin_memory=pin):
            bench.call(pipeline)
        bench.require_unchanged(before, when="after enable, a call and disable", attributes=False)
        bench.require_disabled(pipeline, base, pinned, when="after a call and disable")


def check_identity(bench: Bench) -> None:
    """Parameters and buffers are the same Python objects before, while enabled, within uses, and after disable."""
    pipeline = bench.fresh()
    before = Snapshot(bench.components(pipeline))

    def require_same(when: str) -> None:
        lost = before.lost_objects()
        if lost:
            bench.fail(f"the same objects {when}", f"others for {', '.join(lost[:4])}")

    looks: dict[str, int] = {}

    def look_within(path: str) -> None:
        looks[path] = looks.get(path, 0) + 1
        if looks[path] <= _LOOKS:
            require_same(f"within a use of {path}")

    handles = [
        module.get_submodule(bench.reference.probes[path][-1]).register_forward_hook(lambda *_, path=path: look_within(path))
        for path, module in bench.components(pipeline).items()
        if bench.reference.probes.get(path)
    ]
    with bench.enabled(pipeline):
        require_same("after enable")
        bench.call(pipeline)
        require_same("after a call")
    for handle in handles:
        handle.remove()
    require_same("after disable")


def check_idempotence(bench: Bench) -> None:
    """Enabling again with equal arguments does nothing, with others raises OffloadStateError; disabling twice does nothing more."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    backend = bench.enable(pipeline)
    held = bench.pinned()
    if callable(getattr(pipeline, "enable_omni_offload", None)):
        if bench.enable(pipeline) is not backend:
            bench.fail("the same backend where enabled again with equal arguments", "another")
    else:
        backend.enable(pipeline)
    if bench.pinned() != held:
        bench.fail(f"{held} pinned bytes after enabling again", bench.pinned())
    try:
        bench.enable(pipeline, pin_memory=False)
    except OffloadStateError:
        pass
    else:
        bench.fail("OffloadStateError where enabled again with other arguments", "no error")
    bench.require_equal(bench.call(pipeline), when="after enabling again")
    bench.disable(pipeline)
    bench.require_disabled(pipeline, base, pinned)
    bench.disable(pipeline)
    backend.disable()
    bench.require_disabled(pipeline, base, pinned, when="after a second disable")


def check_cycles(bench: Bench) -> None:
    """Cycles of enable, call and disable add up to nothing: bytes, pinned bytes and outputs are the same every time."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    for number in range(_CYCLES):
        with bench.enabled(pipeline):
            bench.require_equal(bench.call(pipeline), when=f"in cycle {number + 1}")
        bench.require_disabled(pipeline, base, pinned, when=f"after cycle {number + 1}")
    with torch.no_grad():
        outputs = [tensor.cpu() for tensor in bench.case.outputs(pipeline(**bench.inputs(pipeline)))]
    if any(not tensor.isfinite().all() for tensor in outputs if tensor.is_floating_point()):
        bench.fail("a pipeline that runs on the CPU after disable", "outputs that are not finite")


def check_repeated_calls(bench: Bench) -> None:
    """Calls one after another add up to nothing: device bytes, pinned bytes and live tensors stay what the second left."""
    pipeline = bench.fresh()
    with bench.enabled(pipeline):
        for _ in range(2):
            bench.call(pipeline, keep=False)
        device, pinned, tensors = bench.allocated(), bench.pinned(), live_tensors()
        calls = _CALLS_EXHAUSTIVE if bench.exhaustive else _CALLS
        for number in range(calls):
            bench.require_equal(bench.call(pipeline), when=f"of call {number + 3}")
        for what, before, now in (
            ("device bytes", device, bench.allocated()),
            ("pinned bytes", pinned, bench.pinned()),
            ("live tensors", tensors, live_tensors()),
        ):
            if now > before:
                bench.fail(f"{before} {what} after {calls} further calls", now)


def live_tensors() -> int:
    """Return how many tensors are alive that were made since the objects before were frozen."""
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def check_enable_from_device(bench: Bench) -> None:
    """Weights that are found on the device when offload is enabled go to the host, and the pipeline works."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    bench.to_device(pipeline)  # torch's own, which replaces buffers
    before = Snapshot(bench.components(pipeline))
    with bench.enabled(pipeline):
        bench.require_left(pipeline, base, when="after enabling a pipeline that was on the device")
        bench.require_equal(bench.call(pipeline), when="of a pipeline that was on the device")
    bench.require_unchanged(before, when="after disable", attributes=False, device=False)
    bench.require_disabled(pipeline, base, pinned)


def check_execution_device(bench: Bench) -> None:
    """While enabled the pipeline's execution device is the offload device with its index, and no longer after disable."""
    pipeline = bench.fresh()
    if not hasattr(pipeline, "_execution_device"):
        raise NotRun(f"{type(pipeline).__name__} has no _execution_device")
    with bench.enabled(pipeline):
        if pipeline._execution_device != bench.device:  # noqa: SLF001  (the name that diffusers has for it)
            bench.fail(f"_execution_device to be {bench.device} while enabled", pipeline._execution_device)  # noqa: SLF001
        bench.call(pipeline)
        if pipeline._execution_device != bench.device:  # noqa: SLF001
            bench.fail(f"_execution_device to be {bench.device} after a call", pipeline._execution_device)  # noqa: SLF001
    if pipeline._execution_device == bench.device:  # noqa: SLF001
        bench.fail("_execution_device to be the host's after disable", bench.device)


def check_second_device(bench: Bench) -> None:
    """Enabled on device 1 the pipeline works there and only there, also where the current device is 0."""
    if torch.accelerator.device_count() < 2:
        raise NotRun("there is one device only")
    pipeline = bench.fresh()
    other = torch.device(bench.device.type, 1 - (bench.device.index or 0))
    base, base_other = bench.allocated(), int(torch.accelerator.memory_allocated(other))
    bench.reset_peak()
    with bench.enabled(pipeline, device=other) as backend:
        if backend.device != other:
            bench.fail(f"a backend on {other}", backend.device)
        outputs = bench.call(pipeline)
        if not same_values(outputs, bench.reference.outputs):
            bench.fail(f"outputs on {other} that equal the resident run's", "others")
    if bench.peak() > base:
        bench.fail(f"nothing allocated on {bench.device} by a pipeline on {other}", f"{bench.peak() - base} bytes")
    torch.accelerator.synchronize(other)
    over = int(torch.accelerator.memory_allocated(other)) - base_other - bench.reference.left
    if over > 0:
        bench.fail(f"nothing left on {other} after disable", f"{over} bytes")


def check_inference_modes(bench: Bench) -> None:
    """Create, enable, call and disable work inside and outside of torch.inference_mode, in every combination."""
    every = [(bool(n & 1), bool(n & 2), bool(n & 4), bool(n & 8)) for n in range(1, 16)]
    pairwise = [inside for inside in every if sum(inside) in (1, 4)]  # every pair of values of any two
    created_inside = _resident_outputs_inside(bench)
    for create, enable, call, disable in every if bench.exhaustive else pairwise:
        inside = {"create": create, "enable": enable, "call": call, "disable": disable}
        where = f"with {', '.join(name for name, value in inside.items() if value)} inside of inference mode"
        with torch.inference_mode(create):
            pipeline = bench.fresh()
        base, pinned = bench.allocated(), bench.pinned()
        before: Snapshot | None = Snapshot(bench.components(pipeline))
        with torch.inference_mode(enable):
            bench.enable(pipeline)
        try:
            with torch.inference_mode(call):
                bench.require_equal(bench.call(pipeline), when=where, expected=created_inside if create else None)
        except RuntimeError as error:
            if not (bench.reference.recast and create and not call and _fails_outside(bench)):
                raise
            bench.note = f"without offload, too, weights created inside of inference mode do not survive casts outside: {error}"
            before = None  # the call may have left a cast behind
        with torch.inference_mode(disable):
            bench.disable(pipeline)
        if before is not None:
            bench.require_unchanged(before, when=where, attributes=False)
        bench.require_disabled(pipeline, base, pinned, when=where)


def _fails_outside(bench: Bench) -> bool:
    """Whether a pipeline that was created inside of inference mode does not run outside of it, on the host, without offload."""
    with torch.inference_mode():
        pipeline = bench.fresh()
    try:
        bench.call(pipeline)
    except RuntimeError:
        return True
    return False


def _resident_outputs_inside(bench: Bench) -> list[torch.Tensor]:
    """Return what the pipeline makes without offload where it was created inside of inference mode.

    Such weights want no gradient, for which torch folds some products otherwise: the last bits may differ from the reference's.
    """
    with torch.inference_mode():
        pipeline = bench.fresh()
        bench.to_device(pipeline)
        outputs = bench.call(pipeline)
    del pipeline
    gc.collect()
    return outputs
