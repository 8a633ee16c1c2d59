"""A recording: what the device and the host did when, as a table, as a trace file and as a picture."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

import attrs

from omni_offload.errors import OffloadStateError

__all__ = ["HeldBytes", "Lane", "Recording", "Span"]


class Lane(Enum):
    """What kind of thing a span is.

    Spans of one lane and one stream follow one another, but those of `USE`, which may nest. A stream counts as computing from the
    moment when a component or a block may run until it is done, also where the host is late with its kernels. A gather counts from the
    moment when this rank's piece is there and the gather before it is done, also where another rank is late.
    """

    CALL = "calls"
    USE = "components in use"
    COMPUTE = "compute"
    WAIT = "waits for copies"
    COPY_IN = "copies to the device"
    COPY_WAIT = "copies wait for a slot's last use"
    GATHER = "gathers from other ranks"
    COPY_OUT = "copies to the host"
    HOST_WAIT = "the host waits"


@attrs.frozen(kw_only=True)
class Span:
    """One thing, from start to end.

    Attributes:
        lane: What kind of thing.
        name: Of the component or the block.
        start: Seconds since the recording began.
        end: Seconds.
        stream: Id of the stream; None for the host.
        nbytes: What was copied, or gathered.
    """

    lane: Lane
    name: str
    start: float
    end: float
    stream: int | None = None
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@attrs.frozen(kw_only=True)
class HeldBytes:
    """What the framework holds on the device from a moment on.

    Attributes:
        start: Seconds since the recording began.
        nbytes: Weights and buffers, padding included.
    """

    start: float
    nbytes: int


@attrs.define(kw_only=True)
class Recording:
    """What was done with a pipeline while it was recorded. It is filled when the recording ends; `str()` is a table.

    Attributes:
        device: The device.
        title: The pipeline and the strategy.
        clock: What the times are: of the device's events, or of the host where the device has none.
        seconds: How long it was.
        spans: Everything that has a start and an end, in the order of their starts.
        held: The residency curve: what is held from each moment on.
        complete: Whether it has ended.
    """

    device: str
    title: str
    clock: str = ""
    seconds: float = 0.0
    spans: tuple[Span, ...] = ()
    held: tuple[HeldBytes, ...] = ()
    complete: bool = False

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """Return the spans of one lane.

        Args:
            lane: What happened in them.
        """
        return tuple(span for span in self.spans if span.lane is lane)

    @property
    def peak(self) -> int:
        """Most bytes of weights and buffers that the framework held on the device."""
        return max((held.nbytes for held in self.held), default=0)

    def to_chrome(self) -> str:
        """Return the recording as JSON in the trace-event format, which ui.perfetto.dev and chrome://tracing show.

        Raises:
            OffloadStateError: The recording has not ended.
        """
        self.require_end()
        rows: dict[tuple[Lane, int | None], int] = {}
        for span in sorted(self.spans, key=lambda span: (list(Lane).index(span.lane), span.stream or 0)):
            rows.setdefault((span.lane, span.stream), len(rows) + 1)
        events: list[dict[str, Any]] = [_named("process_name", 0, f"{self.title} on {self.device}")]
        events += [_named("thread_name", row, _row_name(rows, lane, stream)) for (lane, stream), row in rows.items()]
        events += [_named("thread_sort_index", row, row) for row in rows.values()]
        events += [_slice(span, rows[span.lane, span.stream]) for span in self.spans]
        events += [_sample(held) for held in self.held]
        other = {"device": self.device, "pipeline": self.title, "clock": self.clock}
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})

    def draw(self, path: Path | str) -> None:
        """Draw the lanes and the residency curve as a PNG.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            OffloadStateError: The recording has not ended, or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        from omni_offload.trace.timeline import draw  # noqa: PLC0415  (matplotlib is an extra)

        draw(self, Path(path))

    def require_end(self) -> None:
        """Refuse to show what is not known yet.

        Raises:
            OffloadStateError: The recording has not ended.
        """
        if not self.complete:
            raise OffloadStateError(f"the recording of {self.title} on {self.device} has not ended; read it after the `with` block")

    def __str__(self) -> str:
        self.require_end()
        lines = [f"{self.title} on {self.device}: {1e3 * self.seconds:.3f} ms by {self.clock}; at most {self.peak} bytes held"]
        for lane in Lane:
            spans = self.lane(lane)
            if spans:
                nbytes = sum(span.nbytes for span in spans)
                copied = f"  {nbytes} bytes" if nbytes else ""
                lines.append(f"{lane.value:34}{len(spans):6} spans {1e3 * sum(span.seconds for span in spans):12.3f} ms{copied}")
        return "\n".join(lines)


_PROCESS = 1


def _row_name(rows: dict[tuple[Lane, int | None], int], lane: Lane, stream: int | None) -> str:
    """Return a lane's name, with the stream where it has several."""
    alone = sum(1 for other, _ in rows if other is lane) == 1
    return lane.value if alone else f"{lane.value} (stream {stream})"


def _named(kind: str, row: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("index") else "name"
    return {"ph": "M", "ts": 0, "pid": _PROCESS, "tid": row, "name": kind, "args": {key: value}}


def _slice(span: Span, row: int) -> dict[str, Any]:
    args = {"bytes": span.nbytes} if span.nbytes else {}
    times = {"ts": 1e6 * span.start, "dur": 1e6 * span.seconds}
    return {"ph": "X", **times, "pid": _PROCESS, "tid": row, "name": span.name, "cat": span.lane.value, "args": args}


def _sample(held: HeldBytes) -> dict[str, Any]:
    return {"ph": "C", "ts": 1e6 * held.start, "pid": _PROCESS, "tid": 0, "name": "bytes held", "args": {"bytes": held.nbytes}}
