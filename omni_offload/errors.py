"""Errors of the framework; each is also the builtin that a caller would expect.

A `torch.OutOfMemoryError`, and any exception of the user's own code, passes unchanged.
"""

__all__ = ["ComponentPathError", "ContractViolation", "OffloadConfigError", "OffloadError", "OffloadStateError"]


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
