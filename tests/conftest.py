"""What every test runs under."""

import collections
import gc
import os
import sys
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import attrs
import pytest
import torch

torch.set_num_threads(1)

#: Objects that tests make do not come near to this number; imports do.
_MOST_OBJECTS = 50_000

#: Of the tests that take each registered case in turn, so many runs take all.
_TURNS = 8

#: Another package, with a test suite of its own: `packaging/test_third_party.py` runs it where it is installed.
collect_ignore = ["third_party"]


@pytest.fixture(autouse=True)
def torch_state():
    """Whatever a test interrupts, torch's own switches are afterwards as they were: a leak would fail some later test."""
    yield
    with torch.device("meta"):
        assert torch.empty(0).device.type == "meta", "torch function modes were left disabled"
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.fixture(autouse=True)
def nothing_asked():
    """Whatever a test interrupts, no pipeline is taken to be asked, and no backend notes, and keeps, the residencies that are made later."""
    yield
    if (backend := sys.modules.get("omni_offload.backends.model_level")) is not None:
        assert (backend.recording.get(), backend._ASKED.get()) == ((), ())


@pytest.fixture(autouse=True)
def simulated_settings():
    """What a test sets on the simulated accelerator holds for that test: a slow copy left behind would slow down all after it."""
    yield
    if hasattr(torch, "sim"):  # installed
        from omni_offload.testing import sim

        sim.configure(**attrs.asdict(sim.Settings()))


@pytest.fixture
def device():
    """Return the simulated accelerator: threads mode, poison on, races recorded; nothing may be left on it, and no race."""
    from omni_offload.testing import sim

    device = sim.install(mode="threads", races="record", poison=True)
    sim.reset_races()
    sim.reset_counters()
    sim.reset_peak()
    return device


@pytest.fixture
def nothing_left(device):
    """A test ends with an empty device, no pinned byte and no race; what a failed test before it has left does not count."""
    from omni_offload.testing import sim

    gc.collect()
    before = sim.allocated(0), sim.allocated(1), sim.pinned_bytes()
    yield
    gc.collect()
    for index in range(2):
        torch.accelerator.synchronize(torch.device("sim", index))
    assert (sim.allocated(0), sim.allocated(1), sim.pinned_bytes()) == before
    assert sim.races() == []


@pytest.hookimpl(tryfirst=True)  # before those are left out that are marked
def pytest_collection_modifyitems(items):
    """A test that takes each registered case in turn is exhaustive, but for a few cases and those whose turn it is with this commit."""
    each = [item for item in items if item.path.parent.name == "pipelines" and _case_of(item) and not item.get_closest_marker("rotating")]
    if not each:
        return
    from tests.contract.contract_cases import ALWAYS, rotation

    turn = int(rotation(), 16) % _TURNS
    for item in each:
        name = _case_of(item).name
        if name not in ALWAYS["module"]:
            item.add_marker("rotating" if zlib.crc32(name.encode()) % _TURNS == turn else "exhaustive")


def _case_of(item):
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if hasattr(case, "make_pipeline") else None


def pytest_collection_finish():
    """From here on garbage is looked for among what tests make, and not among all that was imported for them."""
    _freeze()


def pytest_runtest_logfinish():
    """What a test imported late is left alone by those after it, too."""
    if len(gc.get_objects()) > _MOST_OBJECTS:
        _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Say which part of the rotating tests ran, how to run it again, and how many variations of calls there were in them."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports if getattr(report, "when", "") == "call"]
    for line in sorted({value for report in reports for name, value in report.user_properties if name == "rotation"}):
        terminalreporter.write_line(f"rotating tests: {line}")
    for line in variations_told(value for report in reports for name, value in report.user_properties if name == "variation"):
        terminalreporter.write_line(line)


def variations_told(outcomes):
    """Return lines that say how many variations of calls ran, and how many did not, each with the reason; none where there were none.

    Args:
        outcomes: One for each case, mode and variation: `ran`, or why it did not.
    """
    counted = collections.Counter(outcomes)
    if not counted:
        return
    yield f"variations of calls: {counted.pop('ran', 0)} ran, {counted.total()} did not"
    yield from (f"  {number} {reason}" for reason, number in counted.most_common())
