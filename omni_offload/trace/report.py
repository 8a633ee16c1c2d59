"""What happened: the report of one owner's transfers and residency."""

import json
from typing import Any

import attrs

__all__ = ["ComponentReport", "OffloadReport"]


@attrs.frozen(kw_only=True)
class ComponentReport:
    """One component. All sizes are bytes; transfers count as copied, padding included.

    Attributes:
        name: Its path in the pipeline.
        treatment: What is done with it: `rotate`, `stream`, `stay` (on the device while enabled), or `own` (its pipeline drives it).
        weight_bytes: Distinct weights and buffers, without padding.
        use_bytes: What its use takes on the device, padding included: of one that streams its rest, its resident blocks and its slots.
        resident_bytes: What of it is on the device now, padding included.
        pinned_bytes: What of its masters is pinned.
        mapped_bytes: What of its masters is a mapped file.
        bytes_in: Copied to the device.
        bytes_out: Copied back: what was written there, or found there when it was enabled.
        loads: How often it was brought to the device.
        prefetch_hits: Uses that found it there because it was fetched ahead.
        misses: Uses that had to wait for a whole copy.
        wasted_copies: Copies that were never used, or had to be made again because the master changed.
        transfer: `overlapped` (pinned), `staged` (some of it pageable, through the pinned ring) or `serial` (pageable: the host blocks).
        unmapped: Which of its weights are not in the mapped file, though there is one, and why: a line for each reason.
        costs: By which times of its blocks residents were chosen: `measured`, or `assumed` from their sizes; empty where none stream.
    """

    name: str
    treatment: str
    weight_bytes: int
    use_bytes: int = 0
    resident_bytes: int = 0
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    loads: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    wasted_copies: int = 0
    transfer: str = "overlapped"
    unmapped: tuple[str, ...] = ()
    costs: str = ""


_COLUMNS = ("weight_bytes", "resident_bytes", "pinned_bytes", "mapped_bytes", "bytes_in", "bytes_out")
_COUNTS = ("loads", "prefetch_hits", "misses", "wasted_copies")


@attrs.frozen(kw_only=True)
class OffloadReport:
    """What one backend did since it was enabled. `str()` is a table.

    Attributes:
        strategy: The strategy's name.
        device: The device.
        components: One report each, in plan order.
        peak_device_bytes: Most bytes of weights and buffers that the framework held on the device at once.
        pinned_host_bytes: Pinned host bytes held now, a staging ring's included.
    """

    strategy: str
    device: str
    components: tuple[ComponentReport, ...]
    peak_device_bytes: int = 0
    pinned_host_bytes: int = 0

    @property
    def totals(self) -> dict[str, int]:
        """The sums over all components."""
        return {name: sum(getattr(component, name) for component in self.components) for name in (*_COLUMNS, *_COUNTS)}

    def to_json(self) -> str:
        """Return everything as a JSON object."""
        data: dict[str, Any] = attrs.asdict(self)
        return json.dumps({**data, "totals": self.totals}, indent=2)

    def __str__(self) -> str:
        names = ("weights", "resident", "pinned", "mapped", "in", "out")
        head = ("component", "treatment", *names, "loads", "hits", "misses", "wasted", "transfer")
        rows = [
            (c.name, c.treatment, *(_mib(getattr(c, n)) for n in _COLUMNS), *(str(getattr(c, n)) for n in _COUNTS), c.transfer)
            for c in self.components
        ]
        totals = self.totals
        rows.append(("total", "", *(_mib(totals[n]) for n in _COLUMNS), *(str(totals[n]) for n in _COUNTS), ""))
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
        peak = f"peak {_mib(self.peak_device_bytes)} MiB on {self.device}, {_mib(self.pinned_host_bytes)} MiB pinned"
        notes = [f"{c.name}, not mapped: {reason}" for c in self.components for reason in c.unmapped]
        return "\n".join([f"{self.strategy}: {peak} (sizes in MiB)", *lines, *notes])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"
