"""What changes the weights of an offloaded pipeline gives what it gives on a resident one, bit for bit, from the next use on."""

import itertools

import pytest
import torch
from stages import MOMENTS, SETTINGS, life, moment
from weight_edits import EDITS, LIVES

#: What peft itself says of a second adapter, on any pipeline.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")

#: The settings of the families that are not tried under all of them.
WIDE = ("tight", "kept pageable", "layers", "layers half resident", "layers kept")

CELLS = [
    (family, edit.name, when, setting)
    for edit in EDITS
    for family, when, setting in itertools.product(edit.families, MOMENTS, SETTINGS)
    if (when != "within" or edit.within) and setting in (SETTINGS if family == "flux" else WIDE)
]
FAST = [
    ("flux", "load and fuse", "before", "tight"),
    ("flux", "load with the text encoder's", "enabled", "plain"),
    ("flux", "load, fuse and unload", "after", "plain"),
    ("flux", "swap in place of another rank", "between", "kept"),
    ("sd", "textual inversion", "before", "tight"),
    ("sd", "no textual inversion", "after", "kept pageable"),
    ("sd", "IP-Adapter", "enabled", "tight"),
    ("wan", "fuse", "within", "kept pageable"),
    ("wan", "load", "within", "layers"),
    ("flux", "fuse in half precision", "between", "layers tight"),
    ("sd", "unload", "between", "layers kept"),
]
RUNS = [
    (family, name, where, setting)
    for name, (families, _) in LIVES.items()
    for family, where, setting in itertools.product(families, ("between", "within"), SETTINGS)
]
FAST_RUNS = [
    ("flux", "adapters", "between", "tight"),
    ("flux", "adapters", "within", "kept"),
    ("flux", "weights", "between", "pageable"),
    ("flux", "weights", "within", "plain"),
    ("sd", "stable diffusion", "between", "kept"),
    ("wan", "casts", "between", "kept"),
    ("wan", "casts", "within", "pageable"),
    ("wan", "adapters", "within", "layers half resident"),
]


def marked(cells, fast):
    assert set(fast) <= set(cells)
    return [pytest.param(*cell, marks=() if cell in fast else pytest.mark.exhaustive, id="-".join(cell)) for cell in cells]


@pytest.mark.parametrize(("family", "name", "where", "setting"), marked(RUNS, FAST_RUNS))
def test_one_edit_after_the_other(family, name, where, setting, device):
    """A pipeline goes through edit after edit, each between two calls or within one, with a call after each and one after disable."""
    twin = life(family, name, where, device, setting)
    steps = [outputs[0] for outputs in twin.outputs]
    assert sum(a.dtype != b.dtype or not torch.equal(a, b) for a, b in itertools.pairwise(steps)) > len(steps) // 2


@pytest.mark.parametrize(("family", "name", "when", "setting"), marked(CELLS, FAST))
def test_one_edit(family, name, when, setting, device):
    """One edit before enabling, before the first call, between calls, within a call or after disable."""
    moment(family, name, when, device, setting)
