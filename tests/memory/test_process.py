"""What offloading does to a process's memory: measured in processes of their own, with real pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("measure.py")
MIB = 1 << 20
#: What an allocator may keep or an interpreter may grow by, whatever was done.
NOISE = 4 * MIB
OBJECTS = 20
#: Device bytes that are not weights: what the last generation made.
SMALL = 4096

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc, as Linux has it")
exhaustive = pytest.mark.exhaustive


def _run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def quick():
    """All measurements once, small, in one process."""
    return _run("all", "--heads", 8, "--count", 5)


@pytest.fixture
def measure(request):
    """Return the small measurement of a name, or make the full one with its arguments."""

    def measure(name, full):
        return _run(name, *full) if full else request.getfixturevalue("quick")[name]

    return measure


def _sizes(*full):
    return pytest.mark.parametrize("full", [(), pytest.param(full, marks=exhaustive)], ids=["quick", "full"])


@_sizes("--heads", 16)
def test_enabling_without_pinning_is_free(measure, full):
    """The original memory is the master: enabling adds less than 2 % of the weights to the process, also on the way."""
    found = measure("enable", full)
    assert found["weights"] > (1 << 30 if full else 1 << 28)
    assert found["enabled"] - found["before"] < 0.02 * found["weights"]
    assert found["peak"] - found["before"] < 0.02 * found["weights"]
    assert found["disabled"] - found["before"] < 0.02 * found["weights"]
    assert found["pinned"] == found["on_device"] == 0


@exhaustive
def test_pinning_does_not_double_the_weights():
    """The pinned arena takes the place of the original memory: only the tensors on their way from one to the other exist twice."""
    found = _run("enable", "--heads", 16, "--pin")
    assert found["weights"] > 1 << 30
    assert found["weights"] <= found["pinned"] < found["weights"] + MIB  # alignment only
    assert found["peak"] - found["before"] < 0.1 * found["largest_component"]
    assert found["enabled"] - found["before"] < 0.02 * found["weights"]
    assert found["disabled"] - found["before"] < 0.02 * found["weights"]
    assert found["pinned_at_the_end"] == found["on_device"] == 0


@_sizes("--count", 200)
def test_cycles_leave_nothing(measure, full):
    """Enable, call, disable, again and again: host, device and pinned bytes, hooks and objects stay where they began."""
    found = measure("cycles", full)
    before, after = found["before"], found["after"]
    assert after["pinned"] == before["pinned"] == 0
    assert after["device"] == before["device"] < SMALL
    assert after["hooks"] == before["hooks"]
    assert abs(after["objects"] - before["objects"]) < OBJECTS
    assert after["resident"] - before["resident"] < NOISE


@_sizes("--heads", 16)
def test_a_dropped_pipeline_frees_everything(measure, full):
    """Without a disable, the garbage collector frees host, device and pinned memory with the pipeline."""
    found = measure("drop", full)
    assert found["pinned"] >= found["weights"]
    assert found["on_device"] >= found["weights"]  # it was all there
    assert found["on_device_after"] < SMALL
    assert found["pinned_after"] == 0
    assert found["after"] - found["before"] < NOISE


@_sizes("--count", 50)
def test_casting_up_and_down_does_not_leak(measure, full):
    """A managed, pinned component is cast to float64 and back with a use after each cast: nothing grows."""
    found = measure("flips", full)
    before, after = found["before"], found["after"]
    for name in ("pinned", "device", "hooks"):
        assert after[name] == before[name]
    assert abs(after["objects"] - before["objects"]) < OBJECTS
    assert after["resident"] - before["resident"] < NOISE
    assert found["disabled"]["pinned"] == 0
    assert found["disabled"]["device"] < SMALL
