"""An interrupt at any line that the framework runs."""

import linecache
import sys


class Interrupter:
    """Raise KeyboardInterrupt at the n-th line that the framework runs.

    The interpreter handles signals at calls, jumps back and the start of functions only. Two line events that stand elsewhere, outside the
    handlers of an enclosing `with`, are left out: that of a `try`, and the second one of a `with`, before its `__exit__`.

    Args:
        at: Which line, counted from 0.
        error: What is raised there.
        within: Parts of paths; lines of files count in whose path one of them is.
    """

    def __init__(self, at, error=KeyboardInterrupt, within=("/omni_offload/",)):
        self.left = at
        self._within = within
        self.error = error
        self.done = False

    def _trace(self, frame, event, arg):
        path = frame.f_code.co_filename
        if not any(part in path for part in self._within) or "/testing/" in path:
            return None
        entered = set()

        def trace(frame, event, arg):
            text = linecache.getline(path, frame.f_lineno).strip() if event == "line" else "try:"
            if text != "try:" and not self.done and frame.f_lineno not in entered:
                if text.startswith("with "):
                    entered.add(frame.f_lineno)
                self.left -= 1
                if self.left < 0:
                    self.done = True
                    raise self.error
            return trace

        return trace

    def __enter__(self):
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._former)


def lines(action, within=("/omni_offload/",)):
    """How many lines of the framework an action runs."""
    counter = Interrupter(10**9, within=within)
    with counter:
        action()
    return 10**9 - counter.left
