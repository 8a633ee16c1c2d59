"""`omni-offload audit`: what the declarations of a pipeline miss."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from omni_offload.cli.cases import Subject, find_subjects, importing_from_here, without_bars
from omni_offload.cli.noise import without_noise
from omni_offload.cli.places import fewer_threads
from omni_offload.cli.problems import InputError, one_line
from omni_offload.cli.progress import shown_wait
from omni_offload.errors import OffloadError
from omni_offload.testing import AuditReport, audit_pipeline

__all__ = ["audits_json", "run_audits", "show_audit"]


def run_audits(targets: Sequence[str], *, each: Callable[[AuditReport], None]) -> list[AuditReport]:
    """Audit one call of everything that is named.

    Args:
        targets: As the command line takes them.
        each: Is passed every report at once.

    Raises:
        InputError: A target names no case, or its call fails.
        OffloadError: Declarations are wrong in themselves.
    """
    reports = []
    console = Console(stderr=True)
    with without_noise(), importing_from_here():
        with contextlib.redirect_stdout(sys.stderr):
            subjects, _ = find_subjects(targets, every=False)
        for subject in subjects:
            with shown_wait(f"auditing {subject.case.name}", console), contextlib.redirect_stdout(sys.stderr):
                reports.append(_audited(subject))
            each(reports[-1])
    return reports


def _audited(subject: Subject) -> AuditReport:
    try:
        with fewer_threads(subject.weight_bytes):
            return audit_pipeline(without_bars(subject.case))
    except OffloadError:
        raise
    except Exception as error:
        raise InputError(
            f"{subject.case.name}: the call itself fails, without any offload: {type(error).__name__}: {one_line(error)}"
        ) from error


def show_audit(report: AuditReport, console: Console) -> None:
    """Print what an audit found."""
    head, *rows = str(report).splitlines()
    console.print(Text(head, style="green" if report.clean else "bold red"), soft_wrap=True)
    for row in rows:
        console.print(Text(row, style="bold" if row.startswith("  add ") else ""), soft_wrap=True)


def audits_json(reports: Sequence[AuditReport]) -> str:
    """Return all reports as one JSON object."""
    data = {"clean": all(report.clean for report in reports), "cases": [json.loads(report.to_json()) for report in reports]}
    return json.dumps(data, indent=2)
