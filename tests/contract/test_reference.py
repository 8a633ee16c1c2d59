"""What the resident run tells of a case: components that a call casts and back, and components that have no parts."""

import pytest
import torch
from contract_tiny import WIDTH, Tiny, case_of
from torch import nn

from omni_offload.testing import Outcome, check_pipeline
from omni_offload.testing.bench import Bench


class Casting(Tiny):
    """Its call casts the decoder to a wider type, and back."""

    def __call__(self, ids, latents, callback_on_step_end=None):
        text = self.encode_prompt(ids)
        latents = self.denoise(latents.to(self._execution_device, text.dtype), text, callback_on_step_end)
        self.vae.to(torch.float64)
        image = self.vae.decode(latents.double())
        self.vae.to(torch.float32)
        return image


class Leaf(Tiny):
    """Its decoder is a bare layer, with no module in it."""

    def __init__(self):
        super().__init__()
        self.vae = Half(WIDTH, WIDTH).eval()


class Half(nn.Linear):
    def encode(self, image):
        return torch.tanh(self(image))

    def decode(self, latents):
        return torch.tanh(self(latents))


def reference_of(cls, device):
    bench = Bench(case_of(cls), device)
    bench.prepare()
    return bench.reference


def test_what_a_call_casts_is_told_with_its_size_in_that_type(device):
    """Only the component that has another type within its use than after the call, with twice the bytes in twice the width."""
    recast = reference_of(Casting, device).recast
    assert recast.keys() == {"vae"}
    assert recast["vae"] >= sum(2 * parameter.nbytes for parameter in Casting().vae.parameters())
    assert reference_of(Tiny, device).recast == {}


def test_a_component_of_one_layer_is_looked_at_itself(device):
    """Where nothing within a component holds weights, what checks edit and look at is the component; else it is within."""
    probes = reference_of(Leaf, device).probes
    assert probes["vae"] == ("",)
    assert probes.keys() == reference_of(Tiny, device).probes.keys()
    assert all("" not in names for path, names in probes.items() if path != "vae")


@pytest.mark.parametrize("cls", [Casting, Leaf])
def test_the_checks_that_edit_and_replace_hold(cls, device):
    """A right pipeline of either form passes them."""
    checks = ["check_edits", "check_replaced_component", "check_buffers", "check_ties", "check_peak", "check_traffic"]
    report = check_pipeline(case_of(cls), device=device, checks=checks)
    bad = [(result.check, result.reason) for result in report.results if result.outcome is Outcome.FAILED]
    assert bad == []
    assert sum(result.outcome is Outcome.PASSED for result in report.results) == len(checks)
