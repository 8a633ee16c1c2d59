"""Errors of the framework; each is also the builtin that a caller would expect.

A `torch.OutOfMemoryError`, and any exception of the user's own code, passes unchanged.
"""

from collections.abc import Sequence

__all__ = ["ComponentPathError", "ContractViolation", "OffloadConfigError", "OffloadError", "OffloadStateError", "listed", "quoted"]

#: Most characters of a value, and most names, that stand in a message.
_LONGEST, _MOST = 200, 8


class OffloadError(Exception):
    """Base of all errors that the framework raises itself."""


class OffloadConfigError(OffloadError, ValueError):
    """What was asked for cannot be served; the message names every problem. Nothing was touched."""


class ComponentPathError(OffloadError, ValueError):
    """A declared path and the pipeline disagree; the message names every such path."""


class OffloadStateError(OffloadError, RuntimeError):
    """The call is not possible in the present state, or a weight was used outside its activation."""


class ContractViolation(OffloadError, AssertionError):  # noqa: N818  (a fixed public name)
    """A contract check found a pipeline that does not keep the contract."""


def quoted(value: object) -> str:
    """Return a value as it stands in a message: its `repr`, cut where it is long; its type where its `repr` fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (a message about a wrong value must not be replaced by another error)
        text = f"<{type(value).__qualname__} whose repr fails>"
    return text if len(text) <= _LONGEST else f"{text[:120]} ... {text[-40:]}"


def listed(names: Sequence[str]) -> str:
    """Return names as they stand in a message: the first ones of the thousands that a model may have, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
