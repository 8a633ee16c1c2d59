"""Enable, disable, shutdown; pipelines that drive their own offload."""

import contextlib
import weakref

import attrs
import pytest
import torch
from interrupting import Interrupter, lines
from torch import nn

from omni_offload import (
    ModelLevelOffloadBackend,
    ModuleResidency,
    OffloadConfig,
    OffloadConfigError,
    OffloadStateError,
    OffloadStrategy,
    OmniOffloadMixin,
    resolve_offload_plan,
    run_cleanup_steps,
)
from omni_offload.backends import backend_of
from omni_offload.plan import Treatment
from omni_offload.residency import recording
from omni_offload.testing import sim

MODULE = OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL)


@pytest.fixture
def backend(device):
    return ModelLevelOffloadBackend(MODULE, device)


def test_enable_and_disable_are_idempotent(backend, pipe, x, expected, whole):
    """Enabling the same pipeline again, and disabling again, does nothing."""
    backend.disable()
    assert backend.plan is None
    backend.enable(pipe)
    hooked = dict(pipe.vae.__dict__)
    backend.enable(pipe)
    assert pipe.vae.__dict__ == hooked
    assert (backend.is_enabled(), backend.pipeline, backend_of(pipe)) == (True, pipe, backend)
    assert backend.plan.components
    backend.disable()
    backend.disable()
    assert (backend.is_enabled(), backend.pipeline, backend_of(pipe)) == (False, None, None)
    whole(pipe, x, expected)


def test_a_backend_can_be_used_again(backend, pipe, kit, x, expected):
    """After disable a backend may manage another pipeline."""
    backend.enable(pipe)
    backend.disable()
    other = kit.Pipe()
    with backend:
        backend.enable(other)
        assert torch.equal(other(x).cpu(), expected)
    assert not backend.enabled


def test_one_backend_one_pipeline(backend, pipe, kit):
    """A second pipeline for a backend, and a second backend for a pipeline, are refused."""
    backend.enable(pipe)
    with pytest.raises(OffloadStateError, match="manages a Pipe already, or was interrupted"):
        backend.enable(kit.Pipe())
    with pytest.raises(OffloadStateError, match="Pipe is managed by a ModelLevelOffloadBackend on sim:0 already"):
        ModelLevelOffloadBackend(MODULE, "sim").enable(pipe)
    backend.disable()


def test_shutdown(backend, pipe, x, expected, whole):
    """Shutdown disables, once; enabling after it is an error."""
    backend.enable(pipe)
    backend.shutdown()
    backend.shutdown()
    whole(pipe, x, expected)
    with pytest.raises(OffloadStateError, match="was shut down; make a new backend"):
        backend.enable(pipe)


def test_without_a_pipeline_there_is_nothing_to_report(backend):
    """Report and on_device need a pipeline; release and refresh do nothing without one."""
    backend.release()
    backend.refresh()
    assert backend.end_call(object(), error=None) is None
    assert not backend.begin_call(object())
    for ask in (backend.report, lambda: backend.on_device("vae")):
        with pytest.raises(OffloadStateError, match="manages no pipeline; enable it first"):
            ask()


def test_meta_weights_are_refused_by_name(backend, pipe):
    """Weights that were never loaded are named, of every component, before anything moves."""
    pipe.vae.to("meta")
    pipe.text_encoder.to("meta")
    with pytest.raises(OffloadStateError, match=r"text_encoder\.proj\.weight.*vae"):
        backend.enable(pipe)
    assert backend_of(pipe) is None


def test_weights_found_on_the_device(backend, pipe, x, expected, kit):
    """Weights on the device are moved to the host once, and counted; an enable that fails puts them back."""
    pipe.vae.to("sim")
    pointer = pipe.vae.dec.weight.data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_offload.backends.rotation.Rotation.commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend.enable(pipe)
    assert pipe.vae.dec.weight.device.type == "sim"
    assert pipe.vae.dec.weight.data_ptr() == pointer
    backend.enable(pipe)
    assert kit.where(pipe) == set()
    assert {c.name: c.bytes_out for c in backend.report().components} == {"text_encoder": 0, "transformer": 0, "vae": 2 * 64 * 65 * 4}
    assert torch.equal(pipe(x).cpu(), expected)
    backend.disable()


def test_a_roll_back_that_fails_says_so(backend, pipe, x, expected, whole):
    """Where rolling back fails too, the error says what to do, and disable() repairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_offload.backends.rotation.Rotation.prepare", lambda *_: 1 / 0)
        patch.setattr("omni_offload.backends.rotation.Rotation.give_up", lambda *_, **__: ValueError("stuck"))
        with pytest.raises(ZeroDivisionError) as info:
            backend.enable(pipe)
    assert "rolling back failed too (ValueError('stuck')); call disable() on Pipe" in info.value.__notes__[0]
    assert backend_of(pipe) is backend
    backend.disable()
    whole(pipe, x, expected)


def test_a_disable_that_fails_can_be_repeated(backend, pipe, x, expected, whole):
    """A step that fails is raised after all steps; the pipeline is not taken for enabled, and disable() repairs."""
    backend.enable(pipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_offload.hooks.HookRegistry.remove_hook", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend.disable()
    assert not backend.enabled
    backend.disable()
    whole(pipe, x, expected)


def test_plans(device, pipe, kit, x, expected):
    """A resolved plan is carried out; one for another pipeline, or that streams, is refused before anything moves."""
    plan = resolve_offload_plan(pipe, MODULE)
    backend = ModelLevelOffloadBackend(MODULE, device, plan=plan)
    backend.enable(pipe)
    assert backend.plan is plan
    assert torch.equal(pipe(x).cpu(), expected)
    backend.disable()
    with pytest.raises(OffloadConfigError, match=r"(?s)the plan given is not one for this Pair; .*transformer_2"):
        ModelLevelOffloadBackend(MODULE, device, plan=plan).enable(kit.Pair())
    with pytest.raises(OffloadConfigError, match=r"(?s)the plan given is not one for this Pipe; .*vae"):
        ModelLevelOffloadBackend(MODULE, device, plan=attrs.evolve(plan, components=plan.components[:-1])).enable(pipe)
    blocks = {"treatment": Treatment.STREAM, "block_paths": ("transformer.blocks",)}
    streaming = tuple(attrs.evolve(c, **blocks) if c.path == "transformer" else c for c in plan.components)
    with pytest.raises(OffloadConfigError, match="streams transformer, which model-level offload cannot"):
        ModelLevelOffloadBackend(MODULE, device, plan=attrs.evolve(plan, components=streaming)).enable(pipe)
    assert kit.hooks(pipe) == []


def test_ending_a_call_may_fail(backend, pipe, x):
    """A failure at the end is raised after a good call, and noted on the error of a failed one; the next call is right."""
    backend.enable(pipe)
    want = pipe(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_offload.backends.rotation.Rotation._release", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe(x)
        pipe.on_step = lambda *_: {}[1]
        with pytest.raises(KeyError) as info:
            pipe(x)
        assert "ending the call failed too: ZeroDivisionError" in info.value.__notes__[0]
    pipe.on_step = lambda _, y: y
    del info
    assert torch.equal(pipe(x), want)
    del want
    backend.disable()


def test_ending_on_device_may_fail(backend, pipe):
    """A failure at the end of on_device is raised, or noted on the body's error."""
    backend.enable(pipe)
    for error in (None, IndexError("body")):
        with pytest.MonkeyPatch.context() as patch:
            left = iter([True])
            patch.setattr(
                "omni_offload.backends.owners.ComponentOwner._let_go",
                lambda self, left=left: 1 / 0 if next(left, False) else self.residency.unbind(),
            )
            with pytest.raises(type(error) if error else ZeroDivisionError) as info, backend.on_device("vae"):
                if error:
                    raise error
            if error:
                assert "ending on_device failed too: ZeroDivisionError" in error.__notes__[0]
        del info
    backend.disable()


class ByHand(OmniOffloadMixin):
    """A pipeline that drives its offload itself."""

    _dit_modules = ["transformer"]
    _encoder_modules = []
    _vae_modules = []
    fail = None

    def __init__(self):
        self.transformer = nn.Linear(8, 8).requires_grad_(False)
        self.residency = None
        self.log = []

    def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
        self.log.append("enable")
        self.residency = ModuleResidency(self.transformer, device, pin_memory=pin_memory, name="transformer")
        self.residency.load()
        if self.fail:
            raise self.fail

    def disable_omni_model_cpu_offload(self):
        self.log.append("disable")
        if self.residency is not None:
            self.residency.restore()

    def __call__(self, x):
        if self.residency is None:
            return self.transformer(x)
        self.residency.load()
        try:
            return self.transformer(x.to("sim"))
        finally:
            error = run_cleanup_steps([("offload", self.residency.offload)])
            if error:
                raise error


@pytest.fixture
def mine(device):
    return ByHand()


@pytest.mark.parametrize("how", ["pair", "mixin"])
def test_a_hand_written_pair_is_known_to_the_framework(mine, device, how):
    """Called through the mixin or directly: the backend delegates, reports its residencies, and disables."""
    x = torch.ones(2, 8)
    want = mine(x)
    for _ in range(2):
        if how == "pair":
            mine.enable_omni_model_cpu_offload(device=torch.device("sim"), pin_memory=True, use_hsdp=False)
        else:
            mine.enable_omni_offload(device="sim")
    assert mine.log == ["enable"]
    backend = mine.offload_backend
    assert torch.equal(mine(x).cpu(), want)
    report = backend.report()
    assert [(c.name, c.treatment, c.loads) for c in report.components] == [("transformer", "own", 1)]
    assert report.peak_device_bytes == 256 + 64
    assert report.pinned_host_bytes >= 256 + 32
    with pytest.raises(OffloadStateError, match="ByHand, which drives its model-level offload itself"):
        mine.on_device("transformer")
    with pytest.raises(OffloadStateError, match="was asked for"):
        mine.enable_omni_model_cpu_offload(device=torch.device("sim"), pin_memory=False, use_hsdp=False)
    backend.refresh()
    backend.release()
    if how == "pair":
        mine.disable_omni_model_cpu_offload()
    else:
        mine.disable_omni_offload()
    assert mine.log == ["enable", "disable"]
    assert torch.equal(mine.transformer(x), want)


def test_release_leaves_what_a_pipeline_uses_itself(mine):
    """Weights that a hand-written pipeline has on the device stay bound."""
    mine.enable_omni_offload(device="sim")
    mine.residency.load()
    mine.offload_backend.release()
    assert mine.transformer.weight.device.type == "sim"
    mine.disable_omni_offload()


def test_a_failing_hand_written_enable_is_undone(mine):
    """Its own disable is called, and what it made is restored, also where its disable forgets it."""
    mine.fail = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        mine.enable_omni_offload(device="sim")
    assert mine.log == ["enable", "disable"]
    assert mine.offload_backend is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleResidency, "restore", lambda *_: 1 / 0)
        with pytest.raises(ValueError, match="boom"):
            mine.enable_omni_offload(device="sim")
    mine.disable_omni_offload()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def test_a_byte_budget_is_refused_before_the_pair_is_called(mine):
    """A pipeline that drives itself takes no budget."""
    with pytest.raises(OffloadConfigError, match="device_memory=4096 was asked for, but ByHand drives"):
        mine.enable_omni_offload(device="sim", device_memory=4096)
    assert mine.log == []


def test_a_disable_that_is_inherited_restores_the_residencies(device):
    """A class that writes only its enable gets its residencies restored by the backend."""

    class Half(ByHand):
        disable_omni_model_cpu_offload = OmniOffloadMixin.disable_omni_model_cpu_offload

    pipe = Half()
    pipe.enable_omni_offload(device="sim")
    assert pipe.transformer.weight.device.type == "sim"
    pipe.disable_omni_model_cpu_offload()
    assert pipe.transformer.weight.device.type == "cpu"
    assert pipe.offload_backend is None


def test_extending_the_engine_is_refused(kit, device):
    """An override that calls the inherited enable would be a second owner."""

    class Extends(kit.Pipe):
        def enable_omni_model_cpu_offload(self, **kwargs):
            super().enable_omni_model_cpu_offload(**kwargs)

    with pytest.raises(OffloadStateError, match="overrides enable_omni_model_cpu_offload and calls the inherited one"):
        Extends().enable_omni_offload(device="sim")


def test_a_subclass_extends_a_hand_written_pair(device):
    """super() reaches the base's own pair."""

    class Sub(ByHand):
        def enable_omni_model_cpu_offload(self, *, device, pin_memory, use_hsdp, offload_components=None):
            super().enable_omni_model_cpu_offload(device=device, pin_memory=pin_memory, use_hsdp=use_hsdp)
            self.log.append("sub")

    pipe = Sub()
    with pipe.enable_omni_offload(device="sim"):
        assert pipe.log == ["enable", "sub"]
    assert pipe.log == ["enable", "sub", "disable"]


def test_an_own_disable_without_offload(mine):
    """While nothing is enabled, the class's own disable is what runs."""
    mine.disable_omni_model_cpu_offload()
    assert mine.log == ["disable"]


@pytest.mark.traced
@pytest.mark.parametrize("method", ["enable_omni_offload", "disable_omni_offload"])
def test_that_a_pair_is_asked_is_forgotten_whatever_is_interrupted(mine, device, method):
    """After an interrupt at any line of what asks it, later residencies are nobody's, and the pair is managed as before."""
    actions = {"enable_omni_offload": lambda: mine.enable_omni_offload(device="sim"), "disable_omni_offload": mine.disable_omni_offload}
    within = ("/backends/model_level.py",)
    if method == "disable_omni_offload":
        mine.enable_omni_offload(device="sim")
    total = lines(actions[method], within)
    assert total > 20
    for at in range(total):
        mine.disable_omni_offload()
        if method == "disable_omni_offload":
            mine.enable_omni_offload(device="sim")
        with Interrupter(at, within=within), pytest.raises(KeyboardInterrupt):
            actions[method]()
        assert recording.get() == ()
        mine.disable_omni_model_cpu_offload()
        assert backend_of(mine) is None
        assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)
        mine.enable_omni_model_cpu_offload(device=device, pin_memory=True, use_hsdp=False)
        assert backend_of(mine).enabled
    mine.disable_omni_offload()


def test_a_dropped_hand_written_pipeline(device):
    """Its memory goes with it."""
    pipe = ByHand()
    backend = pipe.enable_omni_offload(device="sim")
    gone = weakref.ref(pipe)
    del pipe
    assert gone() is None
    with contextlib.suppress(OffloadStateError):
        backend.disable()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


def test_the_depth_of_calls(pipe, x):
    """It is 1 in an outermost call and one more in each nested one; 0 outside, also before and after the offload."""
    backend = ModelLevelOffloadBackend(MODULE, "sim")
    seen = [backend.call_depth]
    encode = pipe.text_encoder.forward
    pipe.text_encoder.forward = lambda y: (seen.append(backend.call_depth), encode(y))[1]
    pipe.on_step = lambda index, y: (seen.append(backend.call_depth) if index == 0 else None, y)[1]
    backend.enable(pipe)
    seen.append(backend.call_depth)
    pipe(x)
    seen.append(backend.call_depth)
    backend.disable()
    assert [*seen, backend.call_depth] == [0, 0, 2, 1, 0, 0]
