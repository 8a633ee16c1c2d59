"""A recording as a picture: a lane each for what the device and the host did, and the bytes held below."""

from pathlib import Path
from typing import Any

from omni_offload.errors import OffloadStateError
from omni_offload.trace.recording import Lane, Recording, Span

__all__ = ["draw"]

_COLOURS = {
    Lane.CALL: "#7f7f7f",
    Lane.USE: "#9467bd",
    Lane.COMPUTE: "#2ca02c",
    Lane.WAIT: "#d62728",
    Lane.COPY_IN: "#1f77b4",
    Lane.COPY_WAIT: "#ff9896",
    Lane.GATHER: "#e377c2",
    Lane.COPY_OUT: "#17becf",
    Lane.HOST_WAIT: "#ff7f0e",
}
_MIB = float(2**20)
_WIDTH = 14.0
_SHADES = (0.9, 0.6)
"""Neighbours in a lane take turns, so that their border is seen."""

_NAMED = 0.004
"""Part of the width that a letter takes; a span has its name written into it where there is room."""


def draw(recording: Recording, path: Path) -> None:
    """Write a recording as a PNG.

    Raises:
        OffloadStateError: The recording has not ended, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    recording.require_end()
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise OffloadStateError("a timeline is drawn by matplotlib, which is not installed: pip install 'omni-offload[plot]'") from error
    lanes = [lane for lane in Lane if recording.lane(lane)]
    figure = Figure(figsize=(_WIDTH, 2.6 + 0.42 * len(lanes)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.42 * len(lanes) + 0.2, 1.6))
    for row, lane in enumerate(reversed(lanes)):
        _draw_lane(upper, row, recording.lane(lane), 1e3 * recording.seconds)
    upper.set_yticks(range(len(lanes)), [lane.value for lane in reversed(lanes)])
    upper.set_ylim(-0.5, max(len(lanes), 1) - 0.5)
    upper.set_title(f"{recording.title} on {recording.device}\ntimes by {recording.clock}", fontsize=9, loc="left", wrap=True)
    _draw_held(lower, recording)
    figure.savefig(path, format="png", dpi=110)


def _draw_lane(axes: Any, row: int, spans: tuple[Span, ...], whole: float) -> None:
    for index, span in enumerate(spans):
        start, length = 1e3 * span.start, 1e3 * span.seconds
        axes.broken_barh([(start, length)], (row - 0.4, 0.8), color=_COLOURS[span.lane], alpha=_SHADES[index % 2], linewidth=0)
        if length > _NAMED * len(span.name) * whole:
            axes.text(start + length / 2, row, span.name, ha="center", va="center", fontsize=6, clip_on=True)


def _draw_held(axes: Any, recording: Recording) -> None:
    times = [1e3 * held.start for held in recording.held]
    sizes = [held.nbytes / _MIB for held in recording.held]
    axes.step([*times, 1e3 * recording.seconds], [*sizes, *sizes[-1:]], where="post", color="#8c564b")
    axes.axhline(recording.peak / _MIB, color="#8c564b", linewidth=0.7, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1e3 * recording.seconds or 1)
    axes.set_ylabel("held (MiB)")
    axes.set_xlabel("ms")
