"""What the tests of single families have in common: calls of a case, and where its weights are meanwhile."""

import torch

from omni_offload.testing import sim
from omni_offload.testing.observe import device_size


def run(case, pipeline, **changes):
    """Return what a call gives, on the host, with some of the case's arguments changed, or left out where they are `...`."""
    inputs = {**case.make_inputs(pipeline), **changes}
    with torch.no_grad():
        return [tensor.cpu() for tensor in case.outputs(pipeline(**{name: value for name, value in inputs.items() if value is not ...}))]


def same(found, expected):
    """Whether two lists of tensors are equal bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def parts(pipeline):
    """Return the components that are modules, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def on_device(pipeline):
    """Return the components of which anything is on the device."""
    return {name for name, part in parts(pipeline).items() if any(t.device.type != "cpu" for t in (*part.parameters(), *part.buffers()))}


def loads(pipeline):
    """Return how many times each component was loaded."""
    return {component.name: component.loads for component in pipeline.offload_report.components}


def require_right_with_less_than_all(case, pipeline, expected, device):
    """Require that with less room than for all weights two calls are right, and each component is loaded once a call."""
    weights = sum(device_size([part]) for part in parts(pipeline).values())
    with pipeline.enable_omni_offload(device=device) as backend, sim.settings(capacity=sim.allocated() + weights - 1):
        for calls in (1, 2):
            assert same(run(case, pipeline), expected)
            assert {row.loads for row in backend.report().components} == {calls}
