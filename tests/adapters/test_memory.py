"""What adapters weigh: they are pinned and given back, and count against the budget."""

import pytest
from stages import CASES, Stage
from weight_edits import call, load

from omni_offload import ModuleResidency
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim

MIB = 1 << 20


def test_a_large_adapter_is_pinned_and_given_back(device):
    """An adapter of more than 1 MiB that comes while enabled is pinned; once it is unloaded its memory is not pinned any more."""
    stage = Stage(CASES["flux"], device)
    with stage.on_device({}):
        stage.call()
        before = sim.pinned_bytes()
        for _ in range(2):
            stage.change(load(rank=192))
            stage.call()
            assert sim.pinned_bytes() > before + MIB
            report = stage.backend.report()
            assert all(component.pinned_bytes == component.weight_bytes for component in report.components)
            stage.change(call("unload_lora_weights"))
            stage.call()
            assert sim.pinned_bytes() == before
    assert sim.pinned_bytes() == 0


def test_a_component_that_grew_beyond_the_budget_is_refused(device):
    """A component whose adapter no longer fits the budget is refused by name; without the adapter the pipeline goes on."""
    stage = Stage(CASES["flux"], device)
    budget = max(ModuleResidency(part, device, pin_memory=False).padded_bytes for part in stage.parts().values())
    with stage.on_device({"device_memory": budget}):
        stage.call()
        stage.change(load(rank=192))
        with pytest.raises(OffloadStateError, match=r"transformer needs .* raise the budget"):
            stage.call()
        stage.change(call("unload_lora_weights"))
        stage.call()
    assert stage.outputs[0][0].equal(stage.outputs[1][0])
