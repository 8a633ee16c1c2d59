"""What a contract check is run on: how to make a pipeline, its inputs, and tensors of its result."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

__all__ = ["PipelineCase"]


@attrs.frozen(kw_only=True)
class PipelineCase:
    """Factories for one pipeline; never instances, so that no check sees what another left behind.

    Args:
        name: How reports call it.
        make_pipeline: Returns a fresh pipeline on the CPU, with the same weights every time.
        make_inputs: Takes the pipeline and returns fresh keyword arguments of one call, the same values every time.
        outputs: Takes what the call returned and returns the tensors that are compared.
        expected_failures: Names of checks that fail on this pipeline, each with the reason. A listed check that passes is
            reported too.
    """

    name: str
    make_pipeline: Callable[[], Any]
    make_inputs: Callable[[Any], dict[str, Any]]
    outputs: Callable[[Any], list[torch.Tensor]]
    expected_failures: Mapping[str, str] = attrs.field(factory=dict)
