import json

import pytest

from omni_offload import OffloadReport
from omni_offload.trace import ComponentReport

REPORT = OffloadReport(
    strategy="model_level",
    device="sim:0",
    components=(
        ComponentReport(
            name="text_encoder", treatment="rotate", weight_bytes=2 << 20, bytes_in=4 << 20, loads=2, misses=1, prefetch_hits=1
        ),
        ComponentReport(name="vae", treatment="stay", weight_bytes=1 << 19, resident_bytes=1 << 19, wasted_copies=3, transfer="serial"),
    ),
    peak_device_bytes=3 << 20,
    pinned_host_bytes=1 << 20,
)


def test_totals_are_sums():
    """Totals add up every count and size."""
    totals = REPORT.totals
    assert totals["weight_bytes"] == (2 << 20) + (1 << 19)
    assert (totals["loads"], totals["misses"], totals["prefetch_hits"], totals["wasted_copies"]) == (2, 1, 1, 3)


def test_the_text_is_a_table():
    """One line a component, a head and a total, in MiB."""
    lines = str(REPORT).splitlines()
    assert lines[0] == "model_level: peak 3.00 MiB on sim:0, 1.00 MiB pinned (sizes in MiB)"
    assert lines[1].split() == [
        "component",
        "treatment",
        "weights",
        "resident",
        "pinned",
        "mapped",
        "in",
        "out",
        "loads",
        "hits",
        "misses",
        "wasted",
        "transfer",
    ]
    assert lines[2].split() == ["text_encoder", "rotate", "2.00", "0.00", "0.00", "0.00", "4.00", "0.00", "2", "1", "1", "0", "overlapped"]
    assert lines[3].split()[-2:] == ["3", "serial"]
    assert lines[4].split()[:2] == ["total", "2.50"]
    assert not any(line.endswith(" ") for line in lines)


def test_json_holds_everything():
    """Every field, and the totals."""
    data = json.loads(REPORT.to_json())
    assert data["totals"] == REPORT.totals
    assert data["components"][1]["transfer"] == "serial"
    assert data["peak_device_bytes"] == 3 << 20


def test_a_report_cannot_be_changed():
    """It is a fact of one moment."""
    with pytest.raises(AttributeError):
        REPORT.device = "cpu"


def test_a_report_without_components():
    """An empty table is a table."""
    assert len(str(OffloadReport(strategy="model_level", device="sim:0", components=())).splitlines()) == 3
