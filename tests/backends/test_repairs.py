"""What an interrupt left is repaired by whoever comes next."""

import threading

import pytest
import torch

from omni_offload import ModuleResidency
from omni_offload.backends.activation import Activation
from omni_offload.backends.failures import raise_error, run_repeatable_steps
from omni_offload.hooks import HookRegistry
from omni_offload.testing import sim


def test_steps_are_repeated_after_an_interrupt():
    """An interrupt that cuts a step short runs all steps once more; another error does not."""
    for error, runs in ((KeyboardInterrupt(), ["a", "b", "a", "b"]), (ValueError(), ["a", "b"]), (None, ["a", "b"])):
        done, left = [], [error]

        def step(done=done, left=left):
            done.append("a")
            raise_error(left.pop() if left else None)

        assert run_repeatable_steps([("a", step), ("b", lambda done=done: done.append("b"))]) is error
        assert done == runs


def test_a_call_ends_what_was_left_inside_it(pipe, x, expected, kit):
    """Uses and nested calls that were never left end with the call, and the lock is free for other threads."""
    backend = pipe.enable_omni_offload(device="sim")
    rotation = backend._rotation

    def leave_open(step, y):
        Activation(rotation, rotation.members["vae"]).enter()
        backend.begin_call(object())
        return y

    pipe.on_step = leave_open
    assert torch.equal(pipe(x).cpu(), expected)
    assert kit.where(pipe) == set()
    pipe.on_step = lambda _, y: y
    got = []
    thread = threading.Thread(target=lambda: got.append(pipe(x).cpu()), daemon=True)
    thread.start()
    thread.join(20)
    assert torch.equal(got.pop(), expected)
    backend.disable()


def test_the_next_call_settles_what_the_last_could_not(pipe, x, expected, kit, monkeypatch):
    """Where ending a call failed, the next call begins by repairing."""
    backend = pipe.enable_omni_offload(device="sim")
    rotation = backend._rotation
    with monkeypatch.context() as patch:
        patch.setattr("omni_offload.backends.rotation.Rotation._settle", lambda *_: 1 / 0)
        pipe.on_step = lambda *_: {}[1]
        with pytest.raises(KeyError):
            pipe(x)
    rotation.members["vae"].owner.active.append(Activation(rotation, rotation.members["vae"]))
    pipe.on_step = lambda _, y: y
    assert torch.equal(pipe(x).cpu(), expected)
    assert rotation.members["vae"].owner.active == []
    backend.disable()


def test_an_error_hook_without_an_entry_does_nothing(pipe):
    """Leaving a use that was never entered is harmless."""
    backend = pipe.enable_omni_offload(device="sim")
    registry = HookRegistry.find(pipe.vae)
    for name in tuple(registry._hooks):
        registry.get_hook(name).on_error(pipe.vae, "decode", ValueError())
    backend.disable()


def test_giving_up_twice_is_harmless(pipe, x, expected, whole):
    """A component whose restoring failed is given up by the next disable; one that was given up is left alone."""
    backend = pipe.enable_omni_offload(device="sim")
    rotation = backend._rotation
    owner = rotation.members["vae"].owner
    real, left = ModuleResidency.restore, [True]

    def fail_once(self, **kwargs):
        if left and self is owner.residency:
            left.pop()
            raise OSError("once")
        real(self, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleResidency, "restore", fail_once)
        with pytest.raises(OSError, match="once"):
            backend.disable()
        assert set(rotation.members) == {"text_encoder", "transformer", "vae"}
        backend.disable()
    owner.unsubscribe(rotation)
    whole(pipe, x, expected)


def test_enabling_repairs_what_a_failed_roll_back_left(pipe, x, expected):
    """enable_omni_offload on a pipeline that is half enabled disables it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_offload.backends.rotation.Rotation.commit", lambda *_: 1 / 0)
        patch.setattr("omni_offload.backends.rotation.Rotation.give_up", lambda *_, **__: ValueError("stuck"))
        with pytest.raises(ZeroDivisionError):
            pipe.enable_omni_offload(device="sim")
    assert pipe.offload_backend is None
    with pipe.enable_omni_offload(device="sim"):
        assert torch.equal(pipe(x).cpu(), expected)


def test_a_component_that_is_gone_is_not_fetched_ahead(pipe, x):
    """The learned order may name a component that is None by now."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    pipe(x)
    pipe.vae = None
    pipe.on_step = lambda _, y: (torch.accelerator.synchronize(y.device), y)[1]
    with pytest.raises(AttributeError):
        pipe(x)
    pipe.disable_omni_offload()


def test_a_device_that_holds_less_than_the_budget_says(pipe, x, kit, expected):
    """What was kept makes room for what is needed now."""
    pipe.enable_omni_offload(device="sim", device_memory="1MiB")
    sim.configure(capacity=kit.padded(pipe.transformer) + 8192)
    assert torch.equal(pipe(x).cpu(), expected)
    sim.configure(capacity=0)
    pipe.disable_omni_offload()


def test_a_use_that_finds_no_memory(pipe, x, expected):
    """Running out of memory with nothing idle to evict passes as it is; the next call is right."""
    pipe.enable_omni_offload(device="sim")
    sim.configure(capacity=4096)
    with pytest.raises(torch.OutOfMemoryError):
        pipe(x)
    sim.configure(capacity=0)
    assert torch.equal(pipe(x).cpu(), expected)
    pipe.disable_omni_offload()
