"""What is registered: a name, the class it stands for, and the cases that it is tested with."""

import importlib
import re
from typing import Any

import attrs

from omni_offload.errors import OffloadError

__all__ = ["PREFIX", "PipelineEntry", "PipelineLookupError"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
PREFIX = "Omni"
"""What the names of our classes begin with, before the upstream name."""


class PipelineLookupError(OffloadError, LookupError):
    """No registered pipeline answers to what was asked for; the message says what there is, and how to declare one."""


def _check_name(_entry: "PipelineEntry", _attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"a pipeline's name must be lower-case letters, digits, '_', '-' and '.': got {value!r}")


def _check_reference(_entry: "PipelineEntry", _attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise ValueError(f"a reference must read 'package.module:Name': got {value!r}")


@attrs.frozen
class PipelineEntry:
    """A registered pipeline. Nothing it names is imported before it is asked for.

    Args:
        name: What users call it: lower-case, unique among all entries.
        pipeline: Its class as `"package.module:Class"`. Several entries may name one class. A class `OmniX` stands for
            the upstream class `X`.
        cases: Its `PipelineCase`s as `"package.module:CASE"`, the first of which shows it best.
    """

    name: str = attrs.field(validator=_check_name)
    pipeline: str = attrs.field(kw_only=True, validator=_check_reference)
    cases: tuple[str, ...] = attrs.field(
        kw_only=True,
        default=(),
        validator=attrs.validators.deep_iterable(_check_reference, attrs.validators.instance_of(tuple)),
    )

    @property
    def class_name(self) -> str:
        """The name of the class."""
        return self.pipeline.partition(":")[2]

    @property
    def upstream_name(self) -> str:
        """The name of the upstream class that it stands for; its own name where it stands for none."""
        return self.class_name.removeprefix(PREFIX) or self.class_name

    def load(self) -> type:
        """Import the class.

        Returns:
            The class that `pipeline` names.

        Raises:
            PipelineLookupError: The module has no such name, or it is no class.
            ImportError: A package that the module needs is not installed.
        """
        found = self._resolve(self.pipeline)
        if not isinstance(found, type):
            raise PipelineLookupError(f"pipeline {self.name!r} names {self.pipeline!r}, which is no class but {found!r}")
        return found

    def load_cases(self) -> tuple[Any, ...]:
        """Import the cases.

        Returns:
            What `cases` names, in its order.

        Raises:
            PipelineLookupError: A module has no such name.
            ImportError: A package that a module needs is not installed.
        """
        return tuple(self._resolve(reference) for reference in self.cases)

    def _resolve(self, reference: str) -> Any:
        module, _, attribute = reference.partition(":")
        loaded = importlib.import_module(module)
        if not hasattr(loaded, attribute):
            raise PipelineLookupError(f"pipeline {self.name!r} names {reference!r}, but module {module!r} has no {attribute!r}")
        return getattr(loaded, attribute)
