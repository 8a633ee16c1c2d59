import contextlib
import gc
import threading

import pytest
import torch
from interrupting import Interrupter, lines

from omni_offload import OffloadStateError
from omni_offload.testing import sim

CONFIGS = [{}, {"device_memory": "1MiB", "keep_between_calls": True}, {"pin_memory": False, "components": ["dit", "vae"]}]


@pytest.fixture
def interrupt():
    """Run an action with an interrupt at a line; return whether it landed."""

    def run(at, action, error=KeyboardInterrupt):
        with Interrupter(at, error) as interrupter, contextlib.suppress(error):
            action()
        return interrupter.done

    return run


@pytest.mark.traced
@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("stride", [1999, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_enable_interrupted_at_every_line(pipe, x, expected, interrupt, whole, keys, stride):
    """After an interrupt at any line of enable, disable() repairs, and the next enable works."""

    def enable():
        pipe.enable_omni_offload(device="sim", **keys)

    total = lines(enable)
    pipe.disable_omni_offload()
    for at in range(0, total + stride, stride):
        interrupt(at, enable)
        pipe.disable_omni_offload()
        whole(pipe, x, expected)
    with pipe.enable_omni_offload(device="sim", **keys):
        assert torch.equal(pipe(x).cpu(), expected)


@pytest.mark.traced
@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("stride", [1999, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_enable_again_repairs(pipe, x, expected, interrupt, keys, stride):
    """Enabling again after an interrupted enable repairs first."""

    def enable():
        pipe.enable_omni_offload(device="sim", **keys)

    total = lines(enable)
    pipe.disable_omni_offload()
    for at in range(0, total, stride):
        interrupt(at, enable)
        enable()
        assert torch.equal(pipe(x).cpu(), expected)
        pipe.disable_omni_offload()
        assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


@pytest.mark.traced
@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("stride", [1999, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_disable_interrupted_at_every_line(pipe, x, expected, interrupt, whole, keys, stride):
    """After an interrupt at any line of disable, disable() repairs."""
    pipe.enable_omni_offload(device="sim", **keys)
    total = lines(pipe.disable_omni_offload)
    for at in range(0, total + stride, stride):
        pipe.enable_omni_offload(device="sim", **keys)
        pipe(x)
        interrupt(at, pipe.disable_omni_offload)
        pipe.disable_omni_offload()
        whole(pipe, x, expected)


@pytest.mark.traced
@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("stride", [2503, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_call_interrupted_at_every_line(pipe, x, expected, interrupt, kit, keys, stride):
    """After an interrupt at any line of a call the next one is right, in this thread and in another; so is disable()."""
    pipe.steps = 2
    expected = pipe(x)
    pipe.enable_omni_offload(device="sim", **keys)
    total = lines(lambda: pipe(x))
    before = sim.allocated()
    results = []
    for at in range(0, total + stride, stride):
        interrupt(at, lambda: pipe(x))
        gc.collect()
        assert keys.get("keep_between_calls") or sim.allocated() == before
        thread = threading.Thread(target=lambda: results.append(pipe(x).cpu()), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), at
        assert torch.equal(results.pop(), expected)
        assert torch.equal(pipe(x).cpu(), expected)
    backend = pipe.offload_backend
    pipe.disable_omni_offload()
    assert backend.pipeline is None
    assert sim.allocated() == 0


@pytest.mark.traced
@pytest.mark.parametrize("keys", CONFIGS, ids=str)
@pytest.mark.parametrize("stride", [2503, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_disable_after_an_interrupted_call(pipe, x, expected, interrupt, whole, keys, stride):
    """After an interrupt at any line of a call disable() leaves nothing."""
    pipe.enable_omni_offload(device="sim", **keys)
    total = lines(lambda: pipe(x))
    for at in range(0, total + stride, stride):
        pipe.enable_omni_offload(device="sim", **keys)
        interrupt(at, lambda: pipe(x))
        pipe.disable_omni_offload()
        gc.collect()
        whole(pipe, x, expected)


@pytest.mark.traced
@pytest.mark.parametrize("use", ["vae.decode", "on_device"])
@pytest.mark.parametrize("stride", [701, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_use_outside_a_call_interrupted(pipe, x, expected, interrupt, whole, use, stride):
    """After an interrupt at any line of a use outside a call disable() repairs."""

    def act():
        if use == "on_device":
            with pipe.on_device("vae", "transformer"):
                pass
        else:
            pipe.vae.decode(x)

    pipe.enable_omni_offload(device="sim")
    total = lines(act)
    for at in range(0, total + stride, stride):
        pipe.enable_omni_offload(device="sim")
        interrupt(at, act)
        gc.collect()
        pipe.disable_omni_offload()
        whole(pipe, x, expected)


@pytest.mark.parametrize("keys", CONFIGS, ids=str)
def test_every_allocation_of_enable_fails_in_turn(pipe, x, expected, whole, keys):
    """Running out of device memory while enabling passes as it is and leaves everything as it was."""
    for at in range(100):
        sim.configure(fail_alloc_in=at)
        try:
            pipe.enable_omni_offload(device="sim", **keys)
        except torch.OutOfMemoryError:
            whole(pipe, x, expected)
        else:
            break
    sim.configure(fail_alloc_in=-1)
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()
    assert at < 100


@pytest.mark.parametrize("keys", [{}, {"components": ["dit"]}], ids=str)
def test_every_pinning_of_enable_fails_in_turn(pipe, x, expected, whole, keys):
    """A refused pinning passes as it is and leaves everything as it was."""
    for at in range(20):
        sim.configure(fail_pin_in=at)
        try:
            pipe.enable_omni_offload(device="sim", **keys)
        except RuntimeError:
            whole(pipe, x, expected)
        else:
            break
    sim.configure(fail_pin_in=-1)
    assert 0 < at < 20
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()


@pytest.mark.parametrize("keys", CONFIGS, ids=str)
def test_every_allocation_of_a_call_fails_in_turn(pipe, x, expected, keys):
    """A failed allocation either fails the call, and the next is right, or was a prefetch and only cost time."""
    pipe.enable_omni_offload(device="sim", **keys)
    failed = survived = 0
    notes = None
    for at in range(200):
        pipe.offload_backend.release()
        sim.configure(fail_alloc_in=at)
        try:
            y = pipe(x).cpu()
        except torch.OutOfMemoryError as error:
            failed += 1
            notes = getattr(error, "__notes__", None)
        else:
            assert torch.equal(y, expected)
            if sim.current_settings().fail_alloc_in >= 0:
                break
            survived += 1
        sim.configure(fail_alloc_in=-1)
        assert notes is None
        assert torch.equal(pipe(x).cpu(), expected)
    sim.configure(fail_alloc_in=-1)
    assert failed
    assert bool(survived) == bool(keys.get("device_memory"))
    pipe.disable_omni_offload()


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), torch.OutOfMemoryError("oom")], ids=repr)
@pytest.mark.parametrize("place", ["text_encoder.proj", "transformer.blocks.2", "vae.dec", "callback"])
def test_an_error_anywhere_passes_as_it_is(pipe, x, expected, kit, error, place):
    """The caller's error arrives unchanged; nothing stays on the device; the next call is right."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    pipe(x)

    def fail(*_):
        raise error

    if place == "callback":
        pipe.on_step = fail
        handle = None
    else:
        component, _, rest = place.partition(".")
        handle = getattr(pipe, component).get_submodule(rest).register_forward_hook(fail)
    with pytest.raises(type(error)) as info:
        pipe(x)
    assert info.value is error
    assert kit.where(pipe) == set()
    assert {c.resident_bytes for c in pipe.offload_report.components} == {0}
    assert not getattr(error, "__notes__", None)
    pipe.on_step = lambda _, y: y
    if handle is not None:
        handle.remove()
    assert torch.equal(pipe(x).cpu(), expected)
    error.__traceback__ = None
    pipe.disable_omni_offload()


def test_a_traceback_keeps_no_weights_on_the_device(pipe, x):
    """An error that is kept does not keep the framework's device buffers."""
    pipe.enable_omni_offload(device="sim")
    kept = None
    pipe.on_step = lambda *_: 1 / 0
    try:
        pipe(x)
    except ZeroDivisionError as error:
        kept = error
    gc.collect()
    assert sim.allocated() < 8 * 512
    assert pipe.offload_report.totals["resident_bytes"] == 0
    del kept
    pipe.disable_omni_offload()


def test_disable_within_a_call_is_refused(pipe, x, expected):
    """A call's own thread cannot pull the weights from under it."""
    backend = pipe.enable_omni_offload(device="sim")
    pipe.on_step = lambda *_: pipe.disable_omni_offload()
    with pytest.raises(OffloadStateError, match="disable was asked for while a call on the pipeline runs in this thread"):
        pipe(x)
    pipe.on_step = lambda _, y: y
    assert backend.enabled
    with pipe.on_device("vae"), pytest.raises(OffloadStateError, match="disable was asked for"):
        backend.shutdown()
    pipe.disable_omni_offload()
