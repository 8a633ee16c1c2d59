"""Pipelines that run others over their components: the inner ones follow the outer one, for the time of a call."""

import pytest
import torch

from pipelines.kandinsky22.cases import COMBINED


@pytest.fixture
def combined():
    return COMBINED.make_pipeline()


def run(pipeline):
    return COMBINED.outputs(pipeline(**COMBINED.make_inputs(pipeline)))[0].cpu()


def test_inner_pipelines_take_replaced_components(combined):
    """A component that was replaced in the outer pipeline is the inner one's in the next call."""
    combined.movq = COMBINED.make_pipeline().movq.requires_grad_(requires_grad=False)
    torch.nn.init.zeros_(combined.movq.decoder.conv_out.weight)
    assert run(combined).std() < 0.1 < run(COMBINED.make_pipeline()).std()
    assert combined.decoder_pipe.movq is combined.movq


@pytest.mark.parametrize("fails", [False, True])
def test_inner_pipelines_are_as_they_were(combined, device, fails):
    """After a call, also one that failed, the inner pipelines are of the classes that upstream made, and look for a device as ever."""
    classes = [type(combined.prior_pipe), type(combined.decoder_pipe)]
    seen = []

    def look(_module, _inputs):
        seen.append(combined.decoder_pipe._execution_device)
        if fails:
            raise ZeroDivisionError

    combined.unet.register_forward_pre_hook(look)
    with combined.enable_omni_offload(device=device):
        if fails:
            with pytest.raises(ZeroDivisionError):
                run(combined)
        else:
            run(combined)
        assert set(seen) == {combined._execution_device}
        assert [type(combined.prior_pipe), type(combined.decoder_pipe)] == classes
        assert combined.decoder_pipe._execution_device.type == "cpu"
