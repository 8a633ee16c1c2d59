"""Every registered case gives the same output offloaded as on the device as a whole; the contract kit looks closer."""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_leaves

import pipelines
from omni_offload import OffloadConfigError

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]

#: Those of pipelines that encode prompts in a method of their own.
ENCODING = [case for entry in pipelines.registered().values() if hasattr(entry.load(), "encode_prompt") for case in entry.load_cases()]

#: Those that encode prompts within a call only, each with what upstream's method misses outside one.
WITHIN_A_CALL = {"i2vgen_xl": "do_classifier_free_guidance"}


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="module")
def case(request):
    return request.param


@pytest.fixture(scope="module")
def resident(case, device):
    return run(case, case.make_pipeline().to(device))


def run(case, pipeline):
    return [tensor.cpu() for tensor in case.outputs(pipeline(**case.make_inputs(pipeline)))]


def on_device(pipeline):
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    weights = {name: (*module.parameters(), *module.buffers()) for name, module in modules.items()}
    return {name for name, tensors in weights.items() if any(tensor.device.type != "cpu" for tensor in tensors)}


@pytest.mark.parametrize("keys", [{"mode": "module"}, {"mode": "module", "components": ["dit"]}], ids=str)
def test_same_output_as_resident(case, resident, device, keys):
    """Two calls agree bit for bit with a resident run; between calls the device holds what was not selected, later nothing."""
    pipeline = case.make_pipeline()
    if "components" in keys and not pipeline._dit_modules:
        with pytest.raises(OffloadConfigError, match="there are no bytes to manage"):
            pipeline.enable_omni_offload(keys, device=device)
        return
    with pipeline.enable_omni_offload(keys, device=device):
        for _ in range(2):
            assert all(torch.equal(*pair) for pair in zip(run(case, pipeline), resident, strict=True))
        staying = set(pipeline._encoder_modules + pipeline._vae_modules) if "components" in keys else set()
        assert on_device(pipeline) == {name for name in staying if getattr(pipeline, name) is not None}
    assert not on_device(pipeline)


@pytest.mark.parametrize("case", ENCODING, ids=lambda case: case.name)
def test_encoding_prompts_is_a_call(case, device):
    """Prompts that are encoded outside a call give the same embeddings, and leave nothing on the device."""
    pipeline = case.make_pipeline()
    inputs = case.make_inputs(pipeline)
    parameters = inspect.signature(pipeline.encode_prompt).parameters
    arguments = {name: inputs[name] for name in parameters if name in inputs} | ({"device": device} if "device" in parameters else {})
    required = dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "batch_size"), 1)
    required |= {"do_classifier_free_guidance": True, "prompt_2": None, "prompt_3": None}
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    arguments |= {name: required[name] for name in needed if name not in arguments}
    resident = case.make_pipeline().to(device)
    if case.name in WITHIN_A_CALL:
        with pytest.raises(AttributeError, match=WITHIN_A_CALL[case.name]):
            resident.encode_prompt(**arguments)
        return
    with torch.no_grad():
        expected = resident.encode_prompt(**arguments)
        with pipeline.enable_omni_offload(device=device):
            found = pipeline.encode_prompt(**arguments)
            assert not on_device(pipeline)
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    assert any(isinstance(one, torch.Tensor) for one, _ in pairs)
    for one, other in pairs:
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert torch.equal(one.cpu(), other.cpu())
        assert one.device == other.device
