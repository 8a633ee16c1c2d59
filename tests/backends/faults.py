"""Where a rank can fail: each call of a function of what ranks do together, found by tracing a run that goes well; and failing there."""

import collections
import contextlib
import inspect
import sys

from omni_offload import ranks
from omni_offload.accelerator import Accelerator
from omni_offload.backends import agreement, communicators, distributed_layerwise, distributed_rotation, gathering, guard, sharded
from omni_offload.residency import sharded_block, shards

#: The files of which each call is a step. Where ranks meet, each does something else: that has tests of its own.
TOGETHER = [agreement, communicators, distributed_layerwise, distributed_rotation, gathering, guard, ranks, sharded, sharded_block, shards]


class FaultError(Exception):
    """What a rank was told to fail with."""


class Steps:
    """Counts the steps of one rank, in its thread, and does something at one of them.

    Args:
        at: The step: (phase, function, which call of it in the phase, counted from 0); None: no step.
        fault: What is done there.
    """

    def __init__(self, at=None, fault=None):
        self.at = at
        self.found = collections.Counter()
        self.done = False
        self._fault = fault
        self._phase = ""
        self._files = {module.__file__ for module in TOGETHER}
        self._files.add(sys.modules[Accelerator.__module__].__file__)

    @contextlib.contextmanager
    def phase(self, name):
        """Count what runs in the context as steps of a phase."""
        self._phase = name
        former = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(former)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name.startswith("<") or code.co_flags & inspect.CO_GENERATOR:
            return
        name = self._phase, code.co_qualname
        which = self.found[name]
        self.found[name] += 1
        if not self.done and (*name, which) == self.at:
            self.done = True
            self._fault()

    def steps(self):
        """Yield the first and the middle call of each function in each phase."""
        for (phase, name), count in self.found.items():
            for which in sorted({0, count // 2}):
                yield phase, name, which


def fail():
    """Raise what a rank is told to fail with."""
    raise FaultError("told to")
