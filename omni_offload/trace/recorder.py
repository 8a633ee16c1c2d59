"""What notes the moments while a recording runs; the core calls it where an accelerator has one.

A stream is a row of marks. Each mark says what begins there, and ends what the mark before it began, so that the spans of a stream
follow one another whatever nests, fails or is interrupted. Marks are events: nothing waits for them before the recording ends.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator

import attrs
import torch

from omni_offload.accelerator import Accelerator, DeviceClock, Meter
from omni_offload.errors import OffloadStateError
from omni_offload.trace.recording import HeldBytes, Lane, Recording, Span

__all__ = ["Recorder", "recording_of"]

Moment = torch.Event | float


@attrs.frozen
class _Mark:
    """From this moment on a stream does this; None: nothing that is noted."""

    moment: Moment
    lane: Lane | None = None
    name: str = ""
    nbytes: int = 0


@attrs.define(eq=False)
class _Gather:
    """A collective; it cannot begin before its first moment, and is done at the last, None: nobody has waited for it.

    Attributes:
        work: The collective itself: while it is kept, no other has its identity.
    """

    work: object
    name: str
    nbytes: int
    stream: int
    first: Moment
    last: Moment | None = None


@attrs.define
class _Running:
    """What a thread does.

    Attributes:
        names: The components and blocks that run, the innermost last, each with its start where it is a component.
        copying: Whose weights are copied.
        waiting: What the host waits for, and since when.
    """

    names: list[tuple[str, Moment | None]] = attrs.Factory(list)
    copying: str = ""
    waiting: tuple[str, Moment] | None = None


class Recorder:
    """Notes what one device does for the components of a pipeline.

    Args:
        accelerator: The device.
        meters: What counts the bytes that the pipeline's weights take on the device.
    """

    def __init__(self, accelerator: Accelerator, meters: Iterable[Meter]) -> None:
        self._accelerator = accelerator
        self._meters = list(meters)
        self._threads = threading.local()
        self._lock = threading.RLock()  # the collector may free device memory within it
        self._marks: dict[int, tuple[torch.Stream, list[_Mark]]] = {}
        self._spans: list[tuple[Lane, str, int | None, Moment, Moment]] = []
        self._gathers: dict[int, _Gather] = {}
        self._held: list[tuple[Moment, int]] = []
        self._calls: list[Moment] = []
        self._clock = DeviceClock(accelerator)

    # ---- begin and end -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to note.

        Raises:
            OffloadStateError: Another recording of the device runs.
        """
        with self._lock:
            if self._accelerator.recorder is not None:
                raise OffloadStateError(f"{self._accelerator.device} is being recorded already; end that recording first")
            self._held.append((self._clock.now(), self._bytes_held))
            self._accelerator.recorder = self

    def stop(self) -> None:
        """Note nothing more. Idempotent."""
        if self._accelerator.recorder is self:
            self._accelerator.recorder = None
            with self._lock:
                for stream, marks in self._marks.values():
                    marks.append(_Mark(self._clock.at(stream)))

    def fill(self, recording: Recording) -> None:
        """Read the moments, and fill a recording with what they say. The host waits for the device."""
        clock = self._clock
        end = clock.seconds(clock.now())
        spans = [*self._spans_of_streams(), *self._spans_of_gathers(), *self._other_spans()]
        recording.spans = tuple(sorted(spans, key=lambda span: (span.start, -span.end)))
        recording.held = tuple(HeldBytes(start=clock.seconds(moment), nbytes=nbytes) for moment, nbytes in self._held)
        recording.seconds = max([end, *(span.end for span in spans)])
        recording.clock = "events on the device" if clock.problem is None else _host_clock(clock.problem)
        recording.complete = True

    def _spans_of_streams(self) -> Iterator[Span]:
        for stream, (_, marks) in self._marks.items():
            times = [self._clock.seconds(mark.moment) for mark in marks]
            for mark, start, end in zip(marks, times, times[1:], strict=False):
                if mark.lane is not None and (end > start or mark.nbytes):
                    yield Span(lane=mark.lane, name=mark.name, start=start, end=max(start, end), stream=stream, nbytes=mark.nbytes)

    def _spans_of_gathers(self) -> Iterator[Span]:
        """Yield gathers one after another, as a communicator runs them: none ends after the next one."""
        done = [(gather, self._clock.seconds(gather.last)) for gather in self._gathers.values() if gather.last is not None]
        ends = [*itertools.accumulate((end for _, end in reversed(done)), min)][::-1]
        start = 0.0
        for (gather, _), end in zip(done, ends, strict=True):
            start = max(start, self._clock.seconds(gather.first))
            yield Span(lane=Lane.GATHER, name=gather.name, start=start, end=max(start, end), stream=gather.stream, nbytes=gather.nbytes)
            start = max(start, end)

    def _other_spans(self) -> Iterator[Span]:
        for lane, name, stream, first, last in self._spans:
            start, end = self._clock.seconds(first), self._clock.seconds(last)
            if end > start:
                yield Span(lane=lane, name=name, start=start, end=end, stream=stream)

    # ---- calls and uses ----------------------------------------------------------------------------------------------------

    def call_begins(self) -> None:
        """Note that the outermost call on the pipeline begins in this thread; what an interrupt left running is forgotten."""
        self._running.names.clear()
        self._calls.append(self._clock.now())

    def call_ends(self) -> None:
        """Note that it ends."""
        while self._calls:
            self._spans.append((Lane.CALL, "call", None, self._calls.pop(), self._clock.now()))
        if self._running.names:
            self._running.names.clear()
            self._resume()

    def begins(self, name: str, *, whole: bool = False) -> None:
        """Note that a component (`whole`) or a block runs from here on, on the current stream."""
        moment = self._mark(Lane.COMPUTE, name)
        self._running.names.append((name, moment if whole else None))

    def ends(self, name: str) -> None:
        """Note that it has run; what it ran in goes on. What was not begun does not end."""
        names = self._running.names
        index = next((i for i in reversed(range(len(names))) if names[i][0] == name), None)
        if index is not None:
            start = names[index][1]
            del names[index:]
            moment = self._resume()
            if start is not None and all(outer != name for outer, _ in names):
                self._spans.append((Lane.USE, name, None, start, moment))

    def _resume(self) -> Moment:
        names = self._running.names
        return self._mark(Lane.COMPUTE, names[-1][0]) if names else self._mark(None)

    # ---- copies and waits --------------------------------------------------------------------------------------------------

    def copies_for(self, name: str) -> None:
        """Say whose weights this thread copies from here on."""
        self._running.copying = name

    def copy_begins(self, stream: torch.Stream, source: torch.Tensor, *, blocks: bool) -> None:
        """Note a copy to the device, or (where the source is there) to the host, and whether it keeps the host waiting."""
        lane = Lane.COPY_IN if source.device.type == "cpu" else Lane.COPY_OUT
        self._mark(lane, self._running.copying, source.numel(), stream)
        if blocks:
            self.host_waits(self._running.copying)

    def copy_ends(self, stream: torch.Stream, source: torch.Tensor) -> None:
        """Note that it is queued, or done where it keeps the host waiting."""
        self.host_goes_on()
        if source.device.type != "cpu":
            self._resume()
        else:
            self._mark(None, stream=stream)

    def copies_wait(self, stream: torch.Stream) -> None:
        """Note that copies wait from here on, until what is overwritten is not in use any more."""
        self._mark(Lane.COPY_WAIT, self._running.copying, stream=stream)

    def copies_go_on(self, stream: torch.Stream) -> None:
        """Note that they do not."""
        self._mark(None, stream=stream)

    def gather_begins(self, stream: torch.Stream, work: object, nbytes: int) -> None:
        """Note a collective that may begin when the stream has done what is queued on it, and how much comes from other ranks."""
        with self._lock:
            moment = self._clock.at(stream)
            self._gathers[id(work)] = _Gather(work, self._running.copying, nbytes, stream.stream_id, moment)

    def gather_ends(self, stream: torch.Stream, work: object) -> None:
        """Note that it is done when the stream has done what is queued on it."""
        with self._lock:
            gather = self._gathers.get(id(work))
            if gather is not None:
                gather.last = self._clock.at(stream)

    def waits(self, name: str) -> None:
        """Note that the current stream waits for the copies of a component or a block from here on."""
        self._mark(Lane.WAIT, name)

    def has_waited(self) -> None:
        """Note that the current stream has waited."""
        self._resume()

    def host_waits(self, name: str = "copies") -> None:
        """Note that the host waits from here on."""
        self._running.waiting = name, self._clock.now()

    def host_goes_on(self) -> None:
        """Note that it does not."""
        if self._running.waiting is not None:
            (name, start), self._running.waiting = self._running.waiting, None
            self._spans.append((Lane.HOST_WAIT, name, None, start, self._clock.now()))

    def holds(self, meter: Meter) -> None:
        """Note what a meter counts now."""
        if any(meter is one for one in self._meters):
            with self._lock:
                self._held.append((self._clock.now(), self._bytes_held))

    # ---- marks -------------------------------------------------------------------------------------------------------------

    @property
    def _bytes_held(self) -> int:
        return sum(meter.current for meter in self._meters)

    @property
    def _running(self) -> _Running:
        running: _Running = self._threads.__dict__.setdefault("running", _Running())
        return running

    def _mark(self, lane: Lane | None, name: str = "", nbytes: int = 0, stream: torch.Stream | None = None) -> Moment:
        stream = self._accelerator.current_stream() if stream is None else stream
        with self._lock:
            moment = self._clock.at(stream)
            _, marks = self._marks.setdefault(stream.stream_id, (stream, []))
            marks.append(_Mark(moment, lane, name, nbytes))
        return moment


def _host_clock(problem: str) -> str:
    return f"the host's clock, which tells when things were queued, not when they ran: {problem}"


@contextlib.contextmanager
def recording_of(accelerator: Accelerator, meters: Iterable[Meter], *, title: str) -> Iterator[Recording]:
    """Record a device; the recording is filled on exit, also after an exception, which goes on.

    Where the device fails so that its events cannot be read, the recording stays empty, and a note on the exception says so.

    Args:
        accelerator: The device.
        meters: What counts the bytes that the pipeline's weights take on the device.
        title: What is recorded.

    Raises:
        OffloadStateError: A recording of the device runs already.
    """
    recorder, recording = Recorder(accelerator, meters), Recording(device=str(accelerator.device), title=title)
    try:
        recorder.start()
        yield recording
    except BaseException as error:
        recorder.stop()
        try:
            recorder.fill(recording)
        except Exception as second:  # noqa: BLE001  (the first counts)
            error.add_note(f"the recording is lost: {second!r}")
        raise
    finally:
        recorder.stop()
    recorder.fill(recording)
