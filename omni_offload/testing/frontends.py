"""The checks as pytest tests. pytest is imported when they are used, not before."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from omni_offload.config import OffloadMode
from omni_offload.errors import ContractViolation
from omni_offload.testing.bench import Bench
from omni_offload.testing.case import PipelineCase
from omni_offload.testing.report import Outcome
from omni_offload.testing.runner import Check, asked_checks, make_bench, refuse_unknown_failures, run_check

__all__ = ["BoundCheck", "PipelineContractTests", "parametrize_with_checks"]


class BoundCheck:
    """One check on one case; called, it does what a test does.

    Args:
        case: The case.
        check: The check.
        bench: Returns the case's bench, which all its checks share.
        mode: How weights are moved.
    """

    def __init__(
        self, case: PipelineCase, check: Check, bench: Callable[[], Bench], *, mode: OffloadMode | str = OffloadMode.MODULE
    ) -> None:
        self.case = case
        self.mode = OffloadMode(mode)
        self.check = check
        self._bench = bench

    def __repr__(self) -> str:
        mode = "" if self.mode is OffloadMode.MODULE else f"-{self.mode.value}"
        return f"{self.case.name}{mode}-{self.check.__name__}"

    def __call__(self) -> None:
        """Run it: pass, skip with the reason, or fail.

        Raises:
            ContractViolation: It failed, or passed where a failure was expected.
        """
        import pytest  # noqa: PLC0415  (only where pytest runs)

        result = run_check(self.check, self._bench())
        if result.outcome is Outcome.NOT_RUN:
            pytest.skip(result.reason)
        if result.outcome is Outcome.EXPECTED_FAILURE:
            pytest.xfail(result.reason)
        if not result.good:
            raise ContractViolation(f"{result.check} {result.outcome.value}: {result.reason}")


def _bound(cases: Iterable[PipelineCase], device: Any, *, mode: OffloadMode | str, checks: Any, exhaustive: bool) -> list[BoundCheck]:
    bound: list[BoundCheck] = []
    asked = asked_checks(checks)
    for case in cases:
        refuse_unknown_failures(case)
        bench = functools.cache(functools.partial(make_bench, case, device, mode=mode, exhaustive=exhaustive))
        bound += [BoundCheck(case, check, bench, mode=mode) for check in asked]
    return bound


def parametrize_with_checks(
    cases: Sequence[PipelineCase],
    *,
    device: Any = None,
    mode: OffloadMode | str = OffloadMode.MODULE,
    checks: Iterable[Check | str] | None = None,
    exhaustive: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a test that takes `check` and calls it: one test for every check on every case.

    Args:
        cases: The cases.
        device: As for `check_pipeline`.
        mode: As for `check_pipeline`.
        checks: As for `check_pipeline`.
        exhaustive: As for `check_pipeline`.

    Raises:
        OffloadConfigError: `checks`, or a case's expected failures, name what is no check.
    """
    import pytest  # noqa: PLC0415  (only where pytest runs)

    bound = _bound(cases, device, mode=mode, checks=checks, exhaustive=exhaustive)
    return pytest.mark.parametrize("check", bound, ids=map(repr, bound))


class PipelineContractTests:
    """Subclass it as `TestMyPipeline`, name the `cases`, and pytest runs every check on each.

    Attributes:
        cases: The cases.
        device: As for `check_pipeline`.
        mode: As for `check_pipeline`.
        exhaustive: As for `check_pipeline`.
    """

    cases: ClassVar[Sequence[PipelineCase]] = ()
    device: ClassVar[Any] = None
    mode: ClassVar[OffloadMode | str] = OffloadMode.MODULE
    exhaustive: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the class's tests, one for every check on every case."""
        super().__init_subclass__(**kwargs)

        def test_contract(self: Any, check: BoundCheck) -> None:  # noqa: ARG001  (a method)
            check()

        test_contract.__doc__ = "The pipeline keeps one rule of the contract."
        decorate = parametrize_with_checks(cls.cases, device=cls.device, mode=cls.mode, exhaustive=cls.exhaustive)
        cls.test_contract = decorate(test_contract)  # type: ignore[attr-defined]  # what pytest collects
