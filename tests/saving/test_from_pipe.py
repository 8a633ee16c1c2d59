"""`pipelines.from_pipe` and diffusers' own `from_pipe`, on pipelines that are enabled and on such that are not."""

import diffusers
import pytest
import torch

import pipelines
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim


def _plain(flux, kit):
    made = kit.aligned(flux.make_pipeline())
    plain = diffusers.FluxPipeline(**made.components)
    plain.set_progress_bar_config(disable=True)
    return plain


def _whole(pipeline, kit):
    return {name: (tensor.data_ptr(), tensor.device, tensor.dtype) for name, tensor in kit.tensors(pipeline).items()}


def test_of_a_plain_pipeline(flux, kit):
    """The same component objects, configuration kept, nothing moved; the new one is offloaded, and the old one works again after it."""
    plain = _plain(flux, kit)
    plain.register_to_config(_note="kept")
    before, wanted = _whole(plain, kit), kit.call(flux, plain)
    made = pipelines.from_pipe(plain)
    assert all(made.components[name] is component for name, component in plain.components.items())
    assert made.config._note == "kept"
    assert _whole(made, kit) == before
    with made.enable_omni_offload(device="sim"):
        assert kit.same(kit.call(flux, made), wanted)
    assert kit.same(kit.call(flux, plain), wanted)


@pytest.mark.parametrize("mode", ["module", "layer"])
def test_of_an_enabled_pipeline_shares_its_owner(flux, mode, kit):
    """It is not enabled by itself; enabled the same way the two share one owner, whose weights stay until both are disabled."""
    pipeline = kit.aligned(flux.make_pipeline())
    wanted = kit.call(flux, pipeline)
    pipeline.enable_omni_offload(mode, device="sim")
    made = pipelines.from_pipe(pipeline)
    assert made.offload_backend is None
    pinned = sim.pinned_bytes()
    made.enable_omni_offload(mode, device="sim")
    assert sim.pinned_bytes() == pinned
    assert kit.same(kit.call(flux, made), wanted)
    assert kit.same(kit.call(flux, pipeline), wanted)
    pipeline.disable_omni_offload()
    assert sim.pinned_bytes() == pinned
    assert kit.same(kit.call(flux, made), wanted)
    made.disable_omni_offload()
    assert sim.pinned_bytes() == 0
    assert kit.same(kit.call(flux, pipeline), wanted)


@pytest.mark.parametrize("keys", [{"pin_memory": False}, {"device": "sim:1"}, {"components": ["dit"]}, {"config": "layer"}], ids=str)
def test_of_an_enabled_pipeline_refuses_another_treatment(flux, kit, keys):
    """Other pinning, another device or another treatment is a second owner; the first one works on."""
    pipeline = kit.aligned(flux.make_pipeline())
    wanted = kit.call(flux, pipeline)
    with pipeline.enable_omni_offload(device="sim"):
        made = pipelines.from_pipe(pipeline)
        with pytest.raises(OffloadStateError, match="is managed for another pipeline"):
            made.enable_omni_offload(**{"device": "sim", **keys})
        assert made.offload_backend is None
        assert kit.same(kit.call(flux, pipeline), wanted)


@pytest.mark.parametrize("source", ["ours", "enabled"])
def test_diffusers_own_from_pipe(flux, kit, source):
    """Upstream's conversion of one of ours is an upstream pipeline over the same components, which stay managed where they are."""
    pipeline = kit.aligned(flux.make_pipeline())
    wanted = kit.call(flux, pipeline)
    if source == "enabled":
        pipeline.enable_omni_offload(device="sim")
    before = _whole(pipeline, kit)
    plain = diffusers.FluxPipeline.from_pipe(pipeline)
    plain.set_progress_bar_config(disable=True)
    assert type(plain) is diffusers.FluxPipeline
    assert all(plain.components[name] is component for name, component in pipeline.components.items())
    assert _whole(plain, kit) == before
    assert kit.same(kit.call(flux, pipeline), wanted)
    pipeline.disable_omni_offload()
    assert kit.same(kit.call(flux, plain), wanted)


def test_from_pipe_of_a_sibling_class(flux, kit):
    """diffusers' `from_pipe` of our class makes ours of an upstream sibling, not enabled, over the components that both have."""
    plain = _plain(flux, kit)
    cls = type(flux.make_pipeline())
    made = cls.from_pipe(plain)
    made.set_progress_bar_config(disable=True)
    assert type(made) is cls
    assert made.transformer is plain.transformer
    with made.enable_omni_offload(device="sim"):
        assert torch.equal(kit.call(flux, made)[0], kit.call(flux, kit.aligned(flux.make_pipeline()))[0])
