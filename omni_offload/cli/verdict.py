"""What the contract said, as tables and as JSON."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_offload.testing import CheckReport, CheckResult, Outcome

__all__ = ["CheckedCase", "Verdict", "show_case", "show_total"]

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.EXPECTED_FAILURE: "yellow",
    Outcome.UNEXPECTED_PASS: "bold magenta",
    Outcome.NOT_RUN: "dim",
}
_ROOMY = 120
"""Columns from which on the rule and the reason have one each."""


@attrs.frozen(kw_only=True)
class CheckedCase:
    """A case, and how its checks ended.

    Attributes:
        target: What named the case.
        dtype: The type that it was cast to; None: as it is made.
        report: The results.
        seconds: How long it took.
    """

    target: str
    dtype: str | None
    report: CheckReport
    seconds: float

    @property
    def title(self) -> str:
        """The case, the mode where it is not the default, and where it ran."""
        mode = "" if self.report.mode == "module" else f" in mode {self.report.mode}"
        return f"{self.report.case}{mode} on {self.report.device}"


@attrs.define(kw_only=True)
class Verdict:
    """How everything ended.

    Attributes:
        seed: Of the samples.
        exhaustive: Whether everything was tried.
        cases: What was checked.
        without_cases: Registered pipelines that have nothing to check.
        interrupted: Whether it was ended from the keyboard.
        seconds: How long it took.
    """

    seed: int
    exhaustive: bool
    cases: list[CheckedCase] = attrs.field(factory=list)
    without_cases: list[str] = attrs.field(factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether no check failed, or passed that was expected to fail."""
        return not any(checked.report.failures for checked in self.cases)

    @property
    def counts(self) -> dict[str, int]:
        """How many checks ended how."""
        found = Counter(result.outcome for checked in self.cases for result in checked.report.results)
        return {outcome.value: found[outcome] for outcome in Outcome}

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        data: dict[str, Any] = {
            "good": self.good,
            "interrupted": self.interrupted,
            "seed": self.seed,
            "exhaustive": self.exhaustive,
            "seconds": round(self.seconds, 3),
            "counts": self.counts,
            "without_cases": self.without_cases,
            "cases": [
                {"target": c.target, "dtype": c.dtype, "seconds": round(c.seconds, 3), **json.loads(c.report.to_json())} for c in self.cases
            ],
        }
        return json.dumps(data, indent=2)


def _asked(report: CheckReport) -> list[CheckResult]:
    return [result for result in report.results if result.reason != "not asked for"]


def show_case(checked: CheckedCase, console: Console) -> None:
    """Print a row for every check of a case that was asked for; what something is to be done about comes first."""
    rows = sorted(_asked(checked.report), key=lambda result: result.good)
    roomy = console.width >= _ROOMY
    table = Table(box=box.SIMPLE, pad_edge=False, title=Text(checked.title), title_justify="left", title_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("time/s", justify="right", no_wrap=True)
    for head in ("rule", "reason") if roomy else ("rule and reason",):
        table.add_column(head, overflow="fold", ratio=1)
    for result in rows:
        outcome = Text(result.outcome.value, style=_STYLES[result.outcome])
        table.add_row(Text(result.check), outcome, f"{result.seconds:.2f}", *_texts(result, roomy=roomy))
    console.print(table)
    console.print(Text(f"{checked.title}: {_counted(rows)} ({checked.seconds:.1f} s)"), soft_wrap=True)


def _texts(result: CheckResult, *, roomy: bool) -> list[Text]:
    style = "" if result.good else _STYLES[result.outcome]
    rule, reason = Text(result.rule), Text(" ".join(result.reason.split()), style=style)
    if roomy:
        return [rule, reason]
    return [Text("\n").join([rule, reason]) if result.reason else rule]


def show_total(verdict: Verdict, console: Console) -> None:
    """Print a row for every case, where there are several, and the sum."""
    if len(verdict.cases) > 1:
        console.print(_cases_table(verdict))
    for name in verdict.without_cases:
        console.print(Text(f"{name} has no case, so nothing of it was checked"), soft_wrap=True)
    counts = _counted(result for checked in verdict.cases for result in _asked(checked.report))
    failed = sum(bool(checked.report.failures) for checked in verdict.cases)
    ending = "interrupted" if verdict.interrupted else f"{failed} with failures" if failed else "all right"
    cases = f"{len(verdict.cases)} case{'s' if len(verdict.cases) != 1 else ''}"
    console.print(Text(f"{cases}: {ending} ({counts}; {verdict.seconds:.1f} s)"), soft_wrap=True)


def _cases_table(verdict: Verdict) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("case", overflow="fold")
    for outcome in Outcome:
        table.add_column(outcome.value.replace("_", " ").lower(), justify="right")
    table.add_column("time/s", justify="right")
    for checked in sorted(verdict.cases, key=lambda checked: not checked.report.failures):
        counts = [len(checked.report.named(outcome)) for outcome in Outcome]
        cells = [Text(str(count or "-"), style=_STYLES[o] if count else "dim") for o, count in zip(Outcome, counts, strict=True)]
        table.add_row(Text(checked.report.case), *cells, f"{checked.seconds:.1f}")
    return table


def _counted(results: Iterable[CheckResult]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]) or "nothing done"
