"""Upstream pipelines that own their offloading, by name and by the upstream class that they stand for.

Importing this package imports no pipeline: a class is loaded when it is asked for.
"""

from pipelines.registry import PipelineEntry, PipelineLookupError, from_pipe, from_pretrained, get, registered

__all__ = ["PipelineEntry", "PipelineLookupError", "from_pipe", "from_pretrained", "get", "registered"]
