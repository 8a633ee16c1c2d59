"""Where the recording of a run goes: a picture, a trace file, or both."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import attrs

from omni_offload.cli.picture import check_file
from omni_offload.cli.problems import InputError
from omni_offload.trace import Recording

__all__ = ["RecordingFiles"]


@attrs.frozen(kw_only=True)
class RecordingFiles:
    """The files that were asked for.

    Attributes:
        timeline: A PNG with the lanes and the residency curve; None: not wanted.
        trace: A JSON file in the trace-event format; None: not wanted.
    """

    timeline: Path | None = None
    trace: Path | None = None

    @property
    def wanted(self) -> list[Path]:
        """The files, in the order in which they are written."""
        return [path for path in (self.trace, self.timeline) if path is not None]

    def check(self, picture: Path) -> None:
        """Make sure that everything can be written; nothing is.

        Args:
            picture: The picture that is made, which is another file.

        Raises:
            InputError: Something stands against it.
        """
        if self.timeline is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise InputError("--timeline is drawn by matplotlib, which is not installed: pip install 'omni-offload[plot]'")
            check_file(self.timeline, option="--timeline", suffix=".png", what="the timeline")
        if self.trace is not None:
            check_file(self.trace, option="--trace", suffix=".json", what="the trace")
        if self.timeline is not None and self.timeline.resolve() == picture.resolve():
            raise InputError(f"--timeline {self.timeline} is the picture's file too; give another")

    def refuse_cpu(self, reason: str | None) -> None:
        """Refuse to record where nothing is moved.

        Raises:
            InputError: A file was asked for.
        """
        if self.wanted:
            options = " and ".join(self._options())
            raise InputError(f"{options}: a run on the CPU moves nothing that could be recorded ({reason})")

    def write(self, recording: Recording) -> None:
        """Write the files.

        Raises:
            InputError: One cannot be written.
        """
        for path in self.wanted:
            try:
                if path is self.trace:
                    path.write_text(recording.to_chrome(), encoding="utf-8")
                else:
                    recording.draw(path)
            except OSError as error:
                raise InputError(f"the recording cannot be written to {path}: {error.strerror or error}") from error

    def _options(self) -> Iterator[str]:
        if self.timeline is not None:
            yield "--timeline"
        if self.trace is not None:
            yield "--trace"
