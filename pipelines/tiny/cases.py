"""Cases with the inputs that most pipelines take."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from omni_offload.testing import PipelineCase
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator, seeded_pipeline

__all__ = ["prompted_case", "prompted_inputs"]


def prompted_case(  # noqa: PLR0913  (those of a case, and of a call)
    name: str,
    make_pipeline: Callable[[], Any],
    *,
    seed: int,
    outputs: Callable[[Any], list[torch.Tensor]] = as_tensors,
    leave_out: Iterable[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    **arguments: Any,
) -> PipelineCase:
    """Return a case that is called with a prompt: two steps, 32 x 32 pixels, tensors as output.

    Args:
        name: Its name.
        make_pipeline: Makes the pipeline; it draws from the seed.
        seed: Of the weights.
        outputs: Takes the tensors from what a call returns.
        leave_out: Which of the usual arguments the pipeline does not take.
        expected_failures: Of the case.
        arguments: Further arguments of a call, or others in place of the usual ones; the same objects in every call.
    """
    return PipelineCase(
        name=name,
        make_pipeline=functools.partial(seeded_pipeline, seed, make_pipeline),
        make_inputs=prompted_inputs(leave_out=leave_out, **arguments),
        outputs=outputs,
        expected_failures=expected_failures or {},
    )


def prompted_inputs(*, leave_out: Iterable[str] = (), **arguments: Any) -> Callable[[Any], dict[str, Any]]:
    """Return what makes the arguments of a call with a prompt: two steps, 32 x 32 pixels, tensors as output.

    Args:
        leave_out: Which of the usual arguments the pipeline does not take.
        arguments: Further arguments, or others in place of the usual ones; the same objects in every call.
    """
    left_out = frozenset(leave_out)

    def make_inputs(_pipeline: Any) -> dict[str, Any]:
        usual = {
            "prompt": "a red cat",
            "height": 32,
            "width": 32,
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": generator(),
        }
        return {**{key: value for key, value in usual.items() if key not in left_out}, **arguments}

    return make_inputs
