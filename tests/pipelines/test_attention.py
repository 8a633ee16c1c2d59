"""Pipelines with another attention for the time of a call."""

import pytest

from pipelines.pixart.cases import SIGMA_PAG


@pytest.mark.parametrize("fails", [False, True])
def test_attention_is_put_back(fails):
    """After a call, also one that failed half way, the blocks have the attention that they had."""
    pipeline = SIGMA_PAG.make_pipeline()
    before, within = dict(pipeline.transformer.attn_processors), []

    def stop(_module, _inputs):
        within.append(dict(pipeline.transformer.attn_processors))
        if fails:
            raise ZeroDivisionError

    pipeline.transformer.register_forward_pre_hook(stop)
    if fails:
        with pytest.raises(ZeroDivisionError):
            pipeline(**SIGMA_PAG.make_inputs(pipeline))
    else:
        pipeline(**SIGMA_PAG.make_inputs(pipeline))
    assert pipeline.transformer.attn_processors == before
    assert any(seen != before for seen in within)
