"""The contract kit."""

from omni_offload.testing.case import PipelineCase

__all__ = ["PipelineCase"]
