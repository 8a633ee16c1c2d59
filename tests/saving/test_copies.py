"""Copies made while enabled: of a pipeline and of its components, by `deepcopy` and by pickling."""

import copy
import gc
import io
import subprocess
import sys
import weakref

import pytest
import torch

from omni_offload.testing import sim
from tests.saving.conftest import every_case

BLOCK_IMPORTS = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("omni_offload", "pipelines"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
vae = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    out = vae.decode(torch.ones(1, 4, 8, 8)).sample
assert type(vae).__module__.startswith("diffusers."), type(vae)
assert not {"forward", "decode", "encode", "_omni_hook_registry", "__getstate__"} & set(vars(vae))
torch.save(out, sys.argv[2])
"""


@pytest.mark.parametrize("mode", ["module", pytest.param("layer", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", every_case())
def test_a_copied_pipeline_is_whole_and_independent(case, mode, kit):
    """On the host, without hooks, not enabled, callable; an edit of either leaves the other; it outlives the original, and can be enabled."""
    pipeline = kit.aligned(case.make_pipeline())
    wanted = kit.call(case, pipeline)
    before = sim.allocated(), sim.pinned_bytes()
    pipeline.enable_omni_offload(mode, device="sim", keep_between_calls=True)
    kit.call(case, pipeline)
    twin = kit.at_home(case, copy.deepcopy(pipeline))
    assert twin.offload_backend is None
    assert [name for name, module in kit.modules(twin).items() if kit.hooked(module)] == []
    assert {tensor.device.type for tensor in kit.tensors(twin).values()} == {"cpu"}
    assert not {tensor.data_ptr() for tensor in kit.tensors(twin).values()} & {
        tensor.data_ptr() for tensor in kit.tensors(pipeline).values()
    } - {0}
    assert kit.same(kit.call(case, twin), wanted)
    with torch.no_grad():
        for tensor in kit.tensors(pipeline).values():
            tensor.zero_()
    gone = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert gone() is None
    assert (sim.allocated(), sim.pinned_bytes()) == before
    assert kit.same(kit.call(case, twin), wanted)
    with twin.enable_omni_offload(mode, device="sim"):
        assert kit.same(kit.call(case, twin), wanted)


def test_an_edit_of_a_copy_leaves_the_original(flux, kit):
    """A component's copy is independent too, also one that was made within a use and one of a component that stays on the device."""
    pipeline = kit.aligned(flux.make_pipeline())
    wanted = kit.call(flux, pipeline)
    with pipeline.enable_omni_offload(device="sim", components=["dit", "vae"]), torch.no_grad():
        twins = [copy.deepcopy(pipeline.vae), copy.deepcopy(pipeline.text_encoder)]
        with pipeline.on_device("transformer"):
            twins.append(copy.deepcopy(pipeline.transformer))
        assert [next(twin.parameters()).device.type for twin in twins] == ["cpu", "sim", "sim"]
        for twin in twins:
            assert kit.hooked(twin) == []
            for parameter in twin.parameters():
                parameter.zero_()
        assert kit.same(kit.call(flux, pipeline), wanted)
        del twin, twins, parameter


def test_a_copy_keeps_ties(kit):
    """Weights that are one in the original are one in the copy."""
    from pipelines.wan.cases import WAN_2_1

    pipeline = WAN_2_1.make_pipeline()
    with pipeline.enable_omni_offload(device="sim"):
        twin = copy.deepcopy(pipeline.text_encoder)
        shared = [
            name for name, p in pipeline.text_encoder.named_parameters(remove_duplicate=False) if p is pipeline.text_encoder.shared.weight
        ]
    assert len(shared) > 1
    assert all(twin.get_parameter(name) is twin.shared.weight for name in shared)


def test_a_copy_made_while_a_block_runs(flux, kit):
    """Its block lies on the device, the others and their copies do not; it has no hooks, and neither knows of the other's edits."""
    pipeline, twins = kit.aligned(flux.make_pipeline()), []
    wanted = kit.call(flux, pipeline)
    block = pipeline.transformer.transformer_blocks[1]
    handle = block.norm1.register_forward_pre_hook(lambda *_: twins.append(copy.deepcopy(pipeline.transformer)) if not twins else None)
    with pipeline.enable_omni_offload("layer", device="sim"), torch.no_grad():
        assert kit.same(kit.call(flux, pipeline), wanted)
        handle.remove()
        (twin,) = twins
        places = [{parameter.device.type for parameter in part.parameters()} for part in twin.transformer_blocks]
        assert places == [{"cpu"}, {"sim"}, {"cpu"}]
        assert kit.hooked(twin) == []
        for parameter in twin.parameters():
            parameter.zero_()
        assert kit.same(kit.call(flux, pipeline), wanted)
        del twin, parameter
        twins.clear()


@pytest.mark.parametrize("state", ["enabled", "kept", "used", "streaming"])
def test_a_component_saved_whole_is_the_one_that_was_never_enabled(flux, kit, tmp_path, state):
    """`torch.save` of a component writes the same bytes."""
    plain = tmp_path / "plain" / "vae.pt"  # torch writes the file's name into it
    plain.parent.mkdir()
    torch.save(flux.make_pipeline().vae, plain)
    pipeline = flux.make_pipeline()
    mode = "layer" if state == "streaming" else "module"
    with pipeline.enable_omni_offload(mode, device="sim", keep_between_calls=state in ("kept", "streaming")):
        if state != "enabled":
            kit.call(flux, pipeline)
        if state == "used":  # outside a call: it stays on the device until another needs the room
            with torch.no_grad():
                pipeline.vae.decode(torch.ones(1, 4, 8, 8))
        torch.save(pipeline.vae, tmp_path / "vae.pt")
    assert (tmp_path / "vae.pt").read_bytes() == plain.read_bytes()


@pytest.mark.exhaustive
def test_a_component_saved_whole_is_loaded_without_this_package(flux, kit, tmp_path):
    """A process that cannot import this package loads and runs it."""
    pipeline = flux.make_pipeline()
    with pipeline.enable_omni_offload(device="sim"):
        torch.save(pipeline.vae, tmp_path / "vae.pt")
    command = [sys.executable, "-W", "ignore", "-c", BLOCK_IMPORTS, str(tmp_path / "vae.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
    with torch.no_grad():
        wanted = kit.aligned(flux.make_pipeline()).vae.decode(torch.ones(1, 4, 8, 8)).sample
    assert torch.allclose(torch.load(tmp_path / "out.pt"), wanted, atol=1e-5)


@pytest.mark.parametrize("mode", ["module", pytest.param("layer", marks=pytest.mark.exhaustive)])
def test_a_pipeline_pickled_while_enabled(flux, mode, kit):
    """It comes back unmanaged and whole."""
    pipeline = kit.aligned(flux.make_pipeline())
    wanted = kit.call(flux, pipeline)
    stream = io.BytesIO()
    with pipeline.enable_omni_offload(mode, device="sim"):
        kit.call(flux, pipeline)
        torch.save(pipeline, stream)
    stream.seek(0)
    again = kit.aligned(torch.load(stream, weights_only=False))
    assert again.offload_backend is None
    assert kit.same(kit.call(flux, again), wanted)
