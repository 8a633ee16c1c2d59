"""Every registered case gives the same output offloaded as on the device as a whole; the contract kit looks closer."""

import inspect

import pytest
import torch

import pipelines

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]

#: Those of pipelines that encode prompts in a method of their own.
ENCODING = [case for entry in pipelines.registered().values() if hasattr(entry.load(), "encode_prompt") for case in entry.load_cases()]


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
    return {name for name, module in modules.items() if any(p.device.type != "cpu" for p in module.parameters())}


@pytest.mark.parametrize("keys", [{"mode": "module"}, {"mode": "module", "components": ["dit"]}], ids=str)
def test_same_output_as_resident(case, resident, device, keys):
    """Two calls agree bit for bit with a resident run; between calls the device holds what was not selected, later nothing."""
    pipeline = case.make_pipeline()
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
    arguments = {name: inputs[name] for name in parameters if name in inputs}
    required = {"device": device, "num_images_per_prompt": 1, "do_classifier_free_guidance": True, "prompt_2": None, "prompt_3": None}
    arguments |= {name: required[name] for name, p in parameters.items() if p.default is p.empty and name not in arguments}
    with torch.no_grad():
        expected = case.make_pipeline().to(device).encode_prompt(**arguments)
        with pipeline.enable_omni_offload(device=device):
            found = pipeline.encode_prompt(**arguments)
            assert not on_device(pipeline)
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or (torch.equal(one.cpu(), other.cpu()) and one.device == other.device)
