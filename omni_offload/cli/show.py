"""What a run did, for people and as JSON."""

import json
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from omni_offload.cli.generate import Outcome
from omni_offload.cli.places import Kind, Place
from omni_offload.cli.recordings import RecordingFiles
from omni_offload.config import format_bytes

__all__ = ["Summary", "show"]


@attrs.frozen(kw_only=True)
class Summary:
    """A run, from the question to the picture."""

    target: str
    prompt: str | None
    seed: int
    place: Place
    outcome: Outcome
    output: Path
    files: RecordingFiles
    seconds: float

    def to_json(self) -> str:
        """Return everything as one JSON object; sizes are bytes."""
        outcome = self.outcome
        data: dict[str, Any] = {
            "target": self.target,
            "pipeline": outcome.pipeline,
            "prompt": self.prompt,
            "seed": self.seed,
            "device": str(self.place.device),
            "device_kind": self.place.kind.value,
            "missing": self.place.missing,
            "strategy": outcome.strategy,
            "weight_bytes": outcome.weight_bytes,
            "capacity_bytes": outcome.capacity,
            "peak_bytes": outcome.peak,
            "resident_run_peak_bytes": outcome.resident_peak,
            "equal_to_resident_run": outcome.equal,
            "not_compared_because": outcome.unequal_reason,
            "races": outcome.races,
            "components": [attrs.asdict(component) for component in outcome.components],
            "output": str(self.output),
            "timeline": _text(self.files.timeline),
            "trace": _text(self.files.trace),
            "seconds": round(self.seconds, 3),
        }
        return json.dumps(data, indent=2)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def show(summary: Summary, console: Console) -> None:
    """Print a table of the components, and what the device had to hold."""
    place, outcome = summary.place, summary.outcome
    simulated = ", the simulated accelerator" if place.kind is Kind.SIMULATED else ""
    prompt = f", prompt {summary.prompt!r}" if summary.prompt is not None else ""
    head = f"{summary.target} ({outcome.pipeline}) on {place.device}{simulated}{prompt}, seed {summary.seed}"
    _print(console, head)
    console.print(_table(outcome, offloaded=place.kind is not Kind.CPU))
    for line in _lines(summary):
        _print(console, line)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(outcome: Outcome, *, offloaded: bool) -> Table:
    table = Table(box=box.SIMPLE, show_footer=len(outcome.components) > 1, pad_edge=False)
    table.add_column("component", footer="total")
    rows = outcome.components
    table.add_column("weights", footer=format_bytes(sum(c.weight_bytes for c in rows)), justify="right")
    if offloaded:
        table.add_column("loads", footer=str(sum(c.loads for c in rows)), justify="right")
        table.add_column("moved in", footer=format_bytes(sum(c.bytes_in for c in rows)), justify="right")
        table.add_column("moved out", footer=format_bytes(sum(c.bytes_out for c in rows)), justify="right")
        table.add_column("resident now", footer=format_bytes(sum(c.resident_bytes for c in rows)), justify="right")
    for row in rows:
        cells = [str(row.loads), *map(format_bytes, (row.bytes_in, row.bytes_out, row.resident_bytes))] if offloaded else []
        table.add_row(row.name, format_bytes(row.weight_bytes), *cells)
    return table


def _lines(summary: Summary) -> list[str]:
    place, outcome = summary.place, summary.outcome
    where = [f"picture: {summary.output} ({summary.seconds:.1f} s)"]
    if place.kind is Kind.CPU:
        return [f"made on the CPU, so nothing was moved and the table is short: {place.missing}", *where]
    lines = []
    if outcome.capacity is not None and outcome.peak is not None:
        lines.append(f"device:  capacity {format_bytes(outcome.capacity)}{_beside_weights(summary)}; peak {format_bytes(outcome.peak)}")
    if outcome.resident_peak is not None:
        lines.append(f"resident run: peak {format_bytes(outcome.resident_peak)}")
    lines.append(f"equal to a resident run: {_equal(outcome)}")
    if outcome.races is not None:
        lines.append(f"missing waits found: {outcome.races}")
    if summary.files.timeline is not None:
        where.append(f"timeline: {summary.files.timeline}")
    if summary.files.trace is not None:
        where.append(f"trace: {summary.files.trace} (ui.perfetto.dev shows it)")
    return [*lines, *where]


def _beside_weights(summary: Summary) -> str:
    outcome = summary.outcome
    if outcome.capacity is None or summary.place.kind is not Kind.SIMULATED:
        return ""
    weights = format_bytes(outcome.weight_bytes)
    if outcome.capacity < outcome.weight_bytes:
        return f", less than the {weights} of weights"
    return f", more than the {weights} of weights: it holds the activations too"


def _equal(outcome: Outcome) -> str:
    if outcome.equal is None:
        return f"not known, {outcome.unequal_reason}"
    return "yes" if outcome.equal else "no"
