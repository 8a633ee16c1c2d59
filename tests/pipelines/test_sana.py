"""Sana: what upstream takes for a warning is an error."""

import pytest
import torch

from pipelines.sana.cases import SANA, SANA_SPRINT_IMG2IMG


@pytest.mark.parametrize("case", [SANA, SANA_SPRINT_IMG2IMG], ids=lambda case: case.name)
def test_no_room_to_decode_is_an_error(case):
    """Where there is no room to decode, the call ends in that error, with no warning and no other picture."""
    pipeline = case.make_pipeline()

    def fail(_module, _inputs):
        raise torch.OutOfMemoryError

    pipeline.vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        pipeline(**case.make_inputs(pipeline))


@pytest.mark.parametrize("settings", [{}, {"output_type": "np"}, {"output_type": "latent"}, {"return_dict": False}], ids=str)
def test_same_picture_as_upstream(settings):
    """The last steps, which are done here, are upstream's."""
    pipeline = SANA.make_pipeline()
    upstream = next(cls for cls in type(pipeline).__mro__ if cls.__module__.startswith("diffusers"))
    found, expected = (
        call(pipeline, **{**SANA.make_inputs(pipeline), **settings}) for call in (type(pipeline).__call__, upstream.__call__)
    )
    assert type(found) is type(expected)
    assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(expected[0]))
