"""A DiT quantised by torchao or held as GGUF blocks: the same outputs as resident, the same objects, bytes counted as they are."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omni_offload import resolve_offload_plan
from omni_offload.config import make_config
from pipelines.flux.cases import FLUX

SETTINGS = (
    {},
    {"pin_memory": False},
    {"device_memory": "8MiB", "keep_between_calls": True},
    {"config": "layer"},
    *(
        pytest.param(keys, marks=pytest.mark.exhaustive, id=str(keys))
        for keys in (
            {"config": "layer", "slots": 2, "pin_memory": False},
            {"config": "layer", "keep_between_calls": True, "layer_options": {"dit": {"resident_layers": 2}}},
        )
    ),
)
MODES = ({}, pytest.param({"config": "layer"}, marks=pytest.mark.exhaustive, id="layer"))


def inner(tensor):
    """The tensors that hold the values of one."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if is_traceable_wrapper_subclass(tensor) else [tensor]


def bytes_of(module):
    held = {id(t): t for weight in (*module.parameters(), *module.buffers()) for t in inner(weight)}
    return sum(t.nbytes for t in held.values())


def facts(module):
    """What each weight is: the objects, their types and attributes."""
    found = {}
    for name, weight in module.named_parameters():
        extra = {key: value for key, value in vars(weight).items() if not isinstance(value, torch.Tensor)}
        found[name] = weight, type(weight), weight.shape, weight.dtype, weight.requires_grad, extra, [id(t) for t in inner(weight)]
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_outputs_objects_and_bytes(make, settings, device, run, resident):
    """Outputs equal the resident run's bit for bit, in every call and after disable, with the same weights of the same classes."""
    expected, on_host = resident(make(), device), run(make())
    assert not same(expected, run(FLUX.make_pipeline()))
    pipe = make()
    weights, size = facts(pipe.transformer), bytes_of(pipe.transformer)
    within, block = [], pipe.transformer.transformer_blocks[1]
    used = block if "config" in settings else pipe.transformer
    with pipe.enable_omni_offload(device=device, **settings) as backend:
        block.register_forward_pre_hook(lambda *_: within.append({t.device for w in used.parameters() for t in (w, *inner(w))}))
        for _ in range(2):
            assert same(run(pipe), expected)
            assert {t.device.type for w in pipe.transformer.parameters() for t in (w, *inner(w))} == {"cpu"}
        assert {*map(frozenset, within)} == {frozenset({device})}
        report = next(one for one in backend.report().components if one.name == "transformer")
        planned = next(one for one in backend.plan.components if one.path == "transformer")
        assert report.weight_bytes == planned.weight_bytes == size
        assert facts(pipe.transformer) == weights
    assert facts(pipe.transformer) == weights
    assert same(run(pipe), on_host)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_state_dict_while_enabled(make, settings, device, run):
    """A state dict taken while enabled holds whole weights on the host, which another pipeline loads."""
    pipe, twin = make(), make()
    on_host = run(pipe)
    with pipe.enable_omni_offload(device=device, **settings):
        run(pipe)
        state = pipe.transformer.state_dict()
        assert {t.device.type for w in state.values() for t in inner(w)} == {"cpu"}
        twin.transformer.load_state_dict(state)
    assert same(run(twin), on_host)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_deepcopy_while_enabled(to_int8, settings, device, run):
    """A deepcopy made while enabled is independent, and can be offloaded itself."""
    pipe, twin = FLUX.make_pipeline(), FLUX.make_pipeline()
    to_int8(pipe.transformer)
    with pipe.enable_omni_offload(device=device, **settings):
        expected = run(pipe)
        twin.transformer = copy.deepcopy(pipe.transformer)
        with twin.enable_omni_offload(device=device, **settings):
            assert same(run(twin), expected)
            assert same(run(pipe), expected)
    with torch.no_grad():
        twin.transformer.transformer_blocks[0].attn.to_q.weight.scale.zero_()
    with pipe.enable_omni_offload(device=device, **settings):
        assert same(run(pipe), expected)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_enabled_from_the_device(make, settings, device, run):
    """A quantised pipeline that is on the device when offload is enabled is moved to the host, and runs the same."""
    pipe = make()
    pipe.to(device)
    expected = run(pipe)
    with pipe.enable_omni_offload(device=device, **settings):
        assert same(run(pipe), expected)
    assert {t.device.type for w in pipe.transformer.parameters() for t in (w, *inner(w))} == {"cpu"}


@pytest.mark.parametrize("settings", [{}, {"config": "layer"}], ids=str)
def test_quantised_while_enabled(to_int8, settings, device, run, resident):
    """A DiT that is quantised between two calls is in force at the next, and counts with fewer bytes."""
    twin, pipe = FLUX.make_pipeline(), FLUX.make_pipeline()
    to_int8(twin.transformer)
    expected = resident(twin, device)
    with pipe.enable_omni_offload(device=device, **settings) as backend:
        run(pipe)
        before = next(one.weight_bytes for one in backend.report().components if one.name == "transformer")
        to_int8(pipe.transformer)
        assert same(run(pipe), expected)
        after = next(one.weight_bytes for one in backend.report().components if one.name == "transformer")
        assert after == bytes_of(pipe.transformer) < before
        assert {c.path: c.weight_bytes for c in resolve_offload_plan(pipe, make_config("module")).components}["transformer"] == after


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_loaded_by_diffusers_with_a_torchao_config(settings, device, run, resident, tmp_path):
    """A DiT that diffusers quantises while it loads it runs as the resident one does."""
    from diffusers import FluxTransformer2DModel, TorchAoConfig
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig

    twin, pipe = FLUX.make_pipeline(), FLUX.make_pipeline()
    pipe.transformer.save_pretrained(tmp_path)
    for one in (twin, pipe):
        one.transformer = FluxTransformer2DModel.from_pretrained(
            tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), torch_dtype=torch.float32
        )
    assert any(type(weight) is Int8Tensor for weight in pipe.transformer.parameters())
    expected = resident(twin, device)
    with pipe.enable_omni_offload(device=device, **settings):
        assert same(run(pipe), expected)
