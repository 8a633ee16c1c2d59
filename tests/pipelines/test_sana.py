"""Sana and Sana Video: what upstream takes for a warning is an error."""

import warnings

import pytest
import torch

from pipelines.sana.cases import SANA, SANA_PAG, SANA_SPRINT_IMG2IMG
from pipelines.sana_video.cases import SANA_VIDEO


@pytest.mark.parametrize("case", [SANA, SANA_PAG, SANA_SPRINT_IMG2IMG, SANA_VIDEO], ids=lambda case: case.name)
def test_no_room_to_decode_is_an_error(case):
    """Where there is no room to decode, the call ends in that error, with no warning and no other picture or video."""
    pipeline = case.make_pipeline()

    def fail(_module, _inputs):
        raise torch.OutOfMemoryError

    pipeline.vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        pipeline(**case.make_inputs(pipeline))


def test_other_warnings_pass():
    """What upstream warns of besides is a warning, where warnings are none of the program's errors."""
    pipeline = SANA.make_pipeline()

    def warn(_module, _inputs):
        warnings.warn("of something else", UserWarning, stacklevel=1)

    pipeline.vae.decoder.register_forward_pre_hook(warn)
    with pytest.warns(UserWarning, match="of something else"):
        assert pipeline(**SANA.make_inputs(pipeline)).images is not None
