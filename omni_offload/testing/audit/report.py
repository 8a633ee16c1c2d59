"""What an audit found."""

import json

import attrs

from omni_offload.errors import ContractViolation
from omni_offload.testing.audit.declared import Item

__all__ = ["AuditReport", "Finding", "HostRead"]


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that no declaration covers.

    Attributes:
        item: What is to be declared, or to be done by code; None where neither helps.
        component: The component.
        problem: What was found.
        tensors: The weights that were read, by their full names.
        calls: The methods that ran at the first such read, the outermost first.
        where: File and line of the innermost one.
        line: What to add, and where.
    """

    item: Item | None
    component: str
    problem: str
    tensors: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    where: str = ""
    line: str

    def __str__(self) -> str:
        rows = [f"{self.component}: {self.problem}"]
        if self.calls:
            rows.append(f"  by {' > '.join(self.calls)} ({self.where})")
        return "\n".join([*rows, f"  add {self.line}"])


@attrs.frozen(kw_only=True)
class HostRead:
    """A weight that was read on the host and brought to the device from there: right as it is.

    Attributes:
        tensor: Its full name.
        calls: The methods that ran, the outermost first.
        where: File and line of the innermost one.
    """

    tensor: str
    calls: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        return f"{self.tensor} is read on the host, and that is right, by {' > '.join(self.calls)} ({self.where})"


@attrs.frozen(kw_only=True)
class AuditReport:
    """What an audit of one call found. `str()` is a text for people.

    Attributes:
        case: The case's name.
        pipeline: The pipeline's class.
        findings: What no declaration covers.
        suggestions: Public methods of the pipeline that use components and count as no call: to be declared where people call them by
            themselves.
        host_reads: Weights that were read on the host.
        needed: What is declared and this call needs.
        not_exercised: What is declared, and this call would have run without.
        uses: The components in the order in which they were used.
    """

    case: str
    pipeline: str
    findings: tuple[Finding, ...]
    suggestions: tuple[Finding, ...] = ()
    host_reads: tuple[HostRead, ...] = ()
    needed: tuple[Item, ...] = ()
    not_exercised: tuple[Item, ...] = ()
    uses: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether every read is covered, and every component and stack is declared."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raise one error that names every finding, if there is any.

        Raises:
            ContractViolation: Something is not declared.
        """
        if self.findings:
            raise ContractViolation(str(self))

    def to_json(self) -> str:
        """Return everything as a JSON object."""
        data = attrs.asdict(self)
        return json.dumps({**data, "clean": self.clean}, indent=2)

    def __str__(self) -> str:
        count = len(self.findings)
        found = f"{count} finding{'' if count == 1 else 's'}" if count else "clean"
        head = f"audit of {self.case!r} ({self.pipeline}): {found}"
        rows = [head, *map(str, self.findings)]
        rows += [f"suggestion: {suggestion}" for suggestion in self.suggestions]
        rows += map(str, self.host_reads)
        if self.not_exercised:
            rows.append(f"declared, and not needed by this call: {', '.join(map(str, self.not_exercised))}")
        return "\n".join(rows)
