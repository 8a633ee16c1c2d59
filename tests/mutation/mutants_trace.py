"""Mutants of the recording: what happened when."""

from mutant import Mutant

TRACE = (
    Mutant(
        "copies-recorded-without-their-bytes",
        "trace/recorder.py",
        "self._running.copying, source.numel(), stream)",
        "self._running.copying, 0, stream)",
        "a trace does not say how much was copied",
        ("tests/backends/test_recording.py::test_copies_are_those_of_the_report",),
    ),
    Mutant(
        "gathers-recorded-over-one-another",
        "trace/recorder.py",
        "            start = max(start, self._clock.seconds(gather.first))\n",
        "            start = self._clock.seconds(gather.first)\n",
        "a trace shows a link that does two things at once",
        ("tests/backends/test_recorded_gathers.py::test_gathers_are_those_of_the_device",),
    ),
    Mutant(
        "freed-memory-not-recorded",
        "residency/device.py",
        "                recorder.holds(self._meter)\n",
        "                pass\n",
        "the residency curve never falls",
        ("tests/backends/test_recording.py::test_the_residency_curve_is_what_the_report_says",),
    ),
    Mutant(
        "another-pipelines-bytes-in-the-curve",
        "trace/recorder.py",
        "        if any(meter is one for one in self._meters):\n",
        "        self._meters.append(meter)\n        if True:\n",
        "the residency curve shows what other pipelines hold",
        ("tests/backends/test_recording.py::test_another_pipelines_bytes_are_not_in_the_curve",),
    ),
    Mutant(
        "blocks-not-recorded",
        "backends/block_ring.py",
        "            recorder.begins(block.name)\n",
        "            pass\n",
        "a block's computing is shown as its component's",
        ("tests/backends/test_recording.py::test_blocks_have_their_names",),
    ),
    Mutant(
        "waits-shown-as-computing",
        "trace/recorder.py",
        "self._mark(Lane.WAIT, name)",
        "self._mark(Lane.COMPUTE, name)",
        "a device that waits for copies looks busy",
        ("tests/backends/test_recording.py::test_it_agrees_with_the_simulated_device",),
    ),
    Mutant(
        "left-running-after-an-interrupt",
        "trace/recorder.py",
        "        self._running.names.clear()\n        self._calls",
        "        self._calls",
        "what an interrupt left running is in every later recorded call",
        ("tests/backends/test_recording.py::test_what_an_interrupt_left_running_ends_with_the_call",),
    ),
    Mutant(
        "recorder-left-on-the-device",
        "trace/recorder.py",
        "            self._accelerator.recorder = None\n",
        "            pass\n",
        "after a recording every call is recorded, for nothing",
        ("tests/backends/test_recording.py::test_without_a_recording_no_moment_is_noted",),
    ),
    Mutant(
        "second-recording-takes-over",
        "trace/recorder.py",
        "            if self._accelerator.recorder is not None:\n",
        "            if False:\n",
        "a recording within another one ends it silently",
        ("tests/backends/test_recording.py::test_one_recording_a_device",),
    ),
)
