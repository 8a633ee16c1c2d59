"""Cleanup that finishes: every step runs, whatever a step raises."""

import logging
import traceback
from collections.abc import Callable, Iterable

__all__ = ["run_cleanup_steps"]

logger = logging.getLogger(__name__)


def run_cleanup_steps(steps: Iterable[tuple[str, Callable[[], None]]]) -> BaseException | None:
    """Run every step in order and return the first failure, if any; the caller raises it.

    Args:
        steps: Pairs of a name, for the log, and a callable without arguments.

    Returns:
        The first exception that a step raised (a `KeyboardInterrupt` too), with the later ones added to it as notes; None
        where every step succeeded.
    """
    first: BaseException | None = None
    for name, step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001  (an interrupt must not skip the remaining steps)
            logger.warning("cleanup step %r failed: %s", name, repr(error))
            traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep what the step held, on the device
            if first is None:
                first = error
            elif error is not first:
                first.add_note(f"cleanup step {name!r} failed too: {error!r}")
    try:
        return first
    finally:
        first = None  # the error's traceback holds this frame: no cycle
