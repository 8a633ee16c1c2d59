"""What a contract check is run on: how to make a pipeline, its inputs, and tensors of its result."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from omni_offload.errors import OffloadConfigError
from omni_offload.testing.casting import cast_pipeline, type_name

__all__ = ["PipelineCase"]


def _reasons(case: "PipelineCase", _attribute: Any, value: object) -> None:
    if not isinstance(value, Mapping):
        raise OffloadConfigError(f"expected_failures of case {case.name!r} is a {type(value).__name__}; map names of checks to reasons")
    wrong = [name for name, reason in value.items() if not (isinstance(name, str) and isinstance(reason, str) and reason.strip())]
    if wrong:
        raise OffloadConfigError(
            f"expected_failures of case {case.name!r} gives no reason for {', '.join(map(repr, wrong))}; map each check's name to a "
            "text that says why it fails"
        )


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
        dtype: The type that `cast` brought it to; None: as it is made. Checks are not run where it does not run in it resident.
    """

    name: str
    make_pipeline: Callable[[], Any]
    make_inputs: Callable[[Any], dict[str, Any]]
    outputs: Callable[[Any], list[torch.Tensor]]
    expected_failures: Mapping[str, str] = attrs.field(factory=dict, validator=_reasons)
    dtype: torch.dtype | None = None

    def cast(self, dtype: torch.dtype) -> "PipelineCase":
        """Return the same case in another floating type, as `name[type]`: what a model keeps in float32 stays.

        Args:
            dtype: The type of weights and buffers, such as `torch.bfloat16`.
        """
        make_pipeline = functools.partial(_make_cast, self.make_pipeline, dtype)
        return attrs.evolve(self, name=f"{self.name}[{type_name(dtype)}]", make_pipeline=make_pipeline, dtype=dtype)


def _make_cast(make_pipeline: Callable[[], Any], dtype: torch.dtype) -> Any:
    pipeline = make_pipeline()
    cast_pipeline(pipeline, dtype)
    return pipeline
