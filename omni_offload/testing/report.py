"""What a run of the contract found: one result for every check."""

import json
from enum import Enum

import attrs

from omni_offload.errors import ContractViolation

__all__ = ["CheckReport", "CheckResult", "Outcome"]


class Outcome(str, Enum):  # noqa: UP042  (as the enums of the configuration)
    """How one check ended."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    EXPECTED_FAILURE = "EXPECTED_FAILURE"
    UNEXPECTED_PASS = "UNEXPECTED_PASS"  # noqa: S105  (no password)
    NOT_RUN = "NOT_RUN"


@attrs.frozen(kw_only=True)
class CheckResult:
    """How one check ended on one case.

    Attributes:
        check: The check's name.
        rule: The rule that it checks, one line.
        outcome: How it ended.
        reason: Why it failed or was not run; what a passed check left out; empty where there is nothing to say.
        seconds: How long it took.
    """

    check: str
    rule: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is to be done about it."""
        return self.outcome not in (Outcome.FAILED, Outcome.UNEXPECTED_PASS)


@attrs.frozen(kw_only=True)
class CheckReport:
    """The results of all checks that were asked for, in the order of the list. `str()` is a table.

    Attributes:
        case: The case's name.
        device: The device that it ran on.
        mode: How weights were moved: `module` or `layer`.
        results: One result for every check.
    """

    case: str
    device: str
    mode: str = "module"
    results: tuple[CheckResult, ...]

    @property
    def title(self) -> str:
        """The case, how weights were moved where that is not by whole components, and where it ran."""
        return f"{self.case!r}{'' if self.mode == 'module' else f' in mode {self.mode}'} on {self.device}"

    def named(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the names of the checks that ended in one way.

        Args:
            outcome: How they ended.
        """
        return tuple(result.check for result in self.results if result.outcome is outcome)

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The results that something is to be done about: failures, and passes that were expected to fail."""
        return tuple(result for result in self.results if not result.good)

    def raise_for_failures(self) -> None:
        """Raise one error that names every failure, if there is any.

        Raises:
            ContractViolation: A check failed, or passed that was expected to fail.
        """
        if self.failures:
            lines = [f"  {result.check} {result.outcome.value}: {result.reason}" for result in self.failures]
            raise ContractViolation(f"case {self.title}: {len(lines)} of {len(self.results)} checks failed:\n" + "\n".join(lines))

    def to_json(self) -> str:
        """Return everything as a JSON object."""
        results = [{**attrs.asdict(result), "outcome": result.outcome.value} for result in self.results]
        counts = {outcome.value: len(self.named(outcome)) for outcome in Outcome}
        return json.dumps({"case": self.case, "device": self.device, "mode": self.mode, "counts": counts, "results": results}, indent=2)

    def __str__(self) -> str:
        width = max((len(result.check) for result in self.results), default=5)
        rows = [
            f"{result.check:<{width}}  {result.outcome.value:<16}  {result.seconds:6.2f}  {_one_line(result.reason)}".rstrip()
            for result in self.results
        ]
        counts = ", ".join(f"{len(names)} {outcome.value}" for outcome in Outcome if (names := self.named(outcome)))
        head = f"{'check':<{width}}  {'outcome':<16}  {'time/s':>6}  reason"
        return "\n".join([f"contract of {self.title}: {counts or 'no checks'}", head, *rows])


def _one_line(text: str) -> str:
    return " ".join(text.split())
