"""The errors of the framework."""

import pytest

from omni_offload import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("OffloadConfigError", ValueError),
        ("ComponentPathError", ValueError),
        ("OffloadStateError", RuntimeError),
        ("ContractViolation", AssertionError),
    ],
)
def test_each_error_is_also_the_builtin_that_a_caller_expects(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, builtin)
    assert issubclass(error, errors.OffloadError)


def test_out_of_memory_is_no_error_of_ours():
    assert not issubclass(errors.OffloadError, RuntimeError)
    made_here = {name for name, value in vars(errors).items() if getattr(value, "__module__", None) == errors.__name__}
    assert {*errors.__all__} == made_here
