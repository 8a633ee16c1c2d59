"""From a plain upstream pipeline to the folder of a family: the class with its declarations, and a case."""

from omni_offload.testing.scaffold.draft import Draft, make_draft
from omni_offload.testing.scaffold.source import Family, family_name

__all__ = ["Draft", "Family", "family_name", "make_draft"]
