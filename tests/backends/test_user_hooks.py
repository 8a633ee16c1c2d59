"""Users' torch hooks on a component belong to its use: they run once, and see the weights where the inputs and outputs are."""

import copy
import gc

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim

COMPONENTS = ("text_encoder", "transformer", "vae")


@pytest.fixture
def seen():
    """Return a list, and functions that note in it which device the weights, inputs and outputs of a module are on."""
    return []


def note(seen, name="hook"):
    def hook(module, args, *more):
        weight = next(module.parameters())
        seen.append((name, weight.device.type, *(value.device.type for value in (*args, *more) if isinstance(value, torch.Tensor))))

    return hook


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_device_weights_and_run_once_a_use(pipe, x, device, expected, seen, when):
    """Whether they were registered before or after enabling."""

    def register():
        pipe.transformer.register_forward_pre_hook(note(seen, "pre"))
        pipe.transformer.register_forward_hook(note(seen, "post"))

    if when == "before":
        register()
    with pipe.enable_omni_offload(device=device):
        if when == "after":
            register()
        assert torch.equal(pipe(x).cpu(), expected)
        assert [line[0] for line in seen] == ["pre", "post"] * pipe.steps
        assert {kind for line in seen for kind in line[1:]} == {"sim"}
        assert all(len(line) > 2 for line in seen)
    seen.clear()
    pipe(x)
    assert [line[0] for line in seen] == ["pre", "post"] * pipe.steps
    assert {kind for line in seen for kind in line[1:]} == {"cpu"}


def test_outside_a_call_too(pipe, x, device, seen):
    pipe.vae.register_forward_hook(note(seen))
    with pipe.enable_omni_offload(device=device), torch.no_grad():
        pipe.vae(x)
    assert seen == [("hook", "sim", "sim", "sim")]


def test_hooks_that_change_inputs_and_outputs_are_in_force(pipe, x, device):
    """Also where a hook puts a tensor of the host in their place, and an output that the weights are needed for."""
    pipe.transformer.register_forward_pre_hook(lambda _module, args: (args[0].cpu() * 0.5, *args[1:]))
    pipe.transformer.register_forward_pre_hook(lambda _module, args, kwargs: (args, {**kwargs, "cond": args[0]}), with_kwargs=True)
    pipe.transformer.register_forward_hook(lambda module, _args, output: output * module.pos_embed)
    wanted = pipe(x)
    with pipe.enable_omni_offload(device=device):
        assert torch.equal(pipe(x).cpu(), wanted)


def test_a_hook_that_always_runs_does_so_once_where_forward_fails(pipe, x, device, expected, whole, seen):
    class BrokenError(RuntimeError):
        pass

    def fail(*_):
        raise BrokenError

    pipe.vae.register_forward_hook(note(seen), always_call=True)
    with pipe.enable_omni_offload(device=device):
        handle = pipe.vae.dec.register_forward_pre_hook(fail)
        with pytest.raises(BrokenError), torch.no_grad():
            pipe.vae(x)
        assert seen == [("hook", "sim", "sim")]
        handle.remove()
        pipe.offload_backend.release()
        gc.collect()  # what the traceback held
        assert sim.allocated() == 0
        assert torch.equal(pipe(x).cpu(), expected)
    whole(pipe, x, expected)


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_hook_leaves_nothing(pipe, x, device, expected, whole, kit, register, error):
    def fail(*_):
        raise error

    with pipe.enable_omni_offload(device=device):
        handle = getattr(pipe.transformer, register)(fail)
        with pytest.raises(error):
            pipe(x)
        assert kit.where(pipe) == set()
        handle.remove()
        assert torch.equal(pipe(x).cpu(), expected)
    whole(pipe, x, expected)


def test_hooks_of_a_submodule_that_is_an_entry_point(pipe, x, device, seen):
    pipe.text_encoder.norm.register_forward_hook(note(seen))
    with pipe.enable_omni_offload(device=device), torch.no_grad():
        pipe.text_encoder.norm(x)
        pipe.text_encoder(x)
    assert seen == [("hook", "sim", "sim", "sim")] * 2


@pytest.mark.parametrize("register", [register_module_forward_pre_hook, register_module_forward_hook])
def test_hooks_of_all_modules(pipe, x, device, expected, seen, register):
    handle = register(note(seen))
    try:
        pipe(x)
        uses = len(seen)
        seen.clear()
        with pipe.enable_omni_offload(device=device):
            assert torch.equal(pipe(x).cpu(), expected)
    finally:
        handle.remove()
    assert len(seen) == uses
    assert {kind for line in seen for kind in line[1:]} == {"sim"}


def test_a_direct_forward_runs_no_hook(pipe, x, device, seen):
    """As in torch."""
    pipe.vae.register_forward_hook(note(seen))
    with pipe.enable_omni_offload(device=device), torch.no_grad():
        assert pipe.vae.forward(x).device.type == "sim"
    assert seen == []


def test_a_deep_copy_runs_its_hooks_on_the_host(pipe, x, device, seen):
    pipe.vae.register_forward_hook(note(seen))
    with pipe.enable_omni_offload(device=device), torch.no_grad():
        copied = copy.deepcopy(pipe.vae)
        copied(x)
    assert seen == [("hook", "cpu", "cpu", "cpu")]


def test_disable_leaves_the_module_as_it_was(pipe, x, device, seen):
    handle = pipe.vae.register_forward_hook(note(seen))
    before = {name: dict(vars(getattr(pipe, name))) for name in COMPONENTS}
    with pipe.enable_omni_offload(device=device):
        pipe(x)
    assert {name: dict(vars(getattr(pipe, name))) for name in COMPONENTS} == before
    handle.remove()


def test_the_refusal_of_autograd_names_forward(pipe, x, device, seen):
    pipe.vae.requires_grad_(True)
    pipe.vae.register_forward_hook(note(seen))
    with pipe.enable_omni_offload(device=device), pytest.raises(OffloadStateError, match=r"Vae\.forward was called with grad mode on"):
        pipe.vae(x)
    assert seen == []
