"""Failures and interrupts: the host state is intact, a retry works, and restore repairs what an interrupt left at any line."""

import linecache
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import omni_offload
from omni_offload import ModuleResidency
from omni_offload.testing import sim

WATCHED = [str(Path(omni_offload.__file__).parent / name) for name in ("residency", "accelerator", "cleanup.py")]
WATCHED += [str(Path(name).resolve()) for name in WATCHED]


@pytest.fixture
def tied():
    """Two modules with a tied weight, overlapping buffers and a plain attribute: few tensors, as every line is interrupted."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    module["a"].linear, module["b"].linear = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
    module["b"].linear.weight = module["a"].linear.weight
    module["a"].register_buffer("scale", torch.ones(6))
    base = torch.arange(12.0)
    module.register_buffer("low", base[:8])
    module.register_buffer("high", base[4:])
    module.plain = torch.ones(3)
    return module


@pytest.mark.parametrize("pin", [True, False])
def test_out_of_memory_at_any_allocation_leaves_the_host_intact_and_a_retry_works(pin, tied, device, photograph):
    check = photograph(tied)
    residency = ModuleResidency(tied, device, pin_memory=pin)
    sim.reset_counters()
    residency.load()
    count = sim.allocation_count()
    residency.restore()
    assert count >= 1
    for n in range(count):
        residency = ModuleResidency(tied, device, pin_memory=pin)
        sim.configure(fail_alloc_in=n)
        with pytest.raises(torch.OutOfMemoryError):
            residency.load()
        assert sim.allocated() == residency.device_bytes == residency.meter.current == 0
        check()
        residency.load()
        residency.restore()
        check()


def test_out_of_memory_in_the_middle_frees_what_came_before(holding, device):
    module = holding(torch.ones(64), torch.ones(64, dtype=torch.bfloat16))  # types that lie in a buffer each
    residency = ModuleResidency(module, device)
    sim.configure(fail_alloc_in=1)
    with pytest.raises(torch.OutOfMemoryError):
        residency.load()
    assert sim.allocated() == residency.device_bytes == residency.meter.current == 0
    residency.load()
    assert residency.loaded
    residency.restore()


def test_out_of_memory_where_a_part_was_there_already_frees_only_what_is_not_bound(tied, device, photograph):
    from omni_offload.accelerator import Accelerator
    from omni_offload.residency import ResidencyContext

    check = photograph(tied)
    context = ResidencyContext(Accelerator.of(torch.device("sim", 0)))
    first = ModuleResidency(tied["a"], device, context=context)
    second = ModuleResidency(tied["b"], device, context=context)
    first.prepare()
    second.prepare()
    first.load()
    sim.configure(fail_alloc_in=0)
    with pytest.raises(torch.OutOfMemoryError):
        second.load()
    assert tied["a"].linear.weight.device == device
    second.load()
    first.restore()
    second.restore()
    context.close()
    check()


def test_a_refused_pinning_leaves_the_weights_as_they_were_and_a_retry_works(tied, device, photograph):
    check = photograph(tied)
    residency = ModuleResidency(tied, device)
    for _ in range(2):
        sim.configure(fail_pin_in=0)
        with pytest.raises(RuntimeError, match="pin"):
            residency.load()
        assert sim.pinned_bytes() == 0
        check()
    residency.load()
    assert residency.loaded
    residency.restore()
    check()


def test_a_refused_pinning_can_be_given_up(tied, device, photograph):
    check = photograph(tied)
    residency = ModuleResidency(tied, device)
    sim.configure(fail_pin_in=0)
    with pytest.raises(RuntimeError, match="pin"):
        residency.load()
    residency.restore()
    check()
    ModuleResidency(tied, device).restore()


def test_a_refused_pinning_of_late_weights_leaves_them_and_a_retry_takes_them_in(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    block.extra = nn.Parameter(torch.ones(1 << 18))
    sim.configure(fail_pin_in=0)
    with pytest.raises(RuntimeError, match="pin"):
        residency.load()
    assert bool((block.extra == 1).all())
    residency.load()
    assert block.extra.device == device
    residency.restore()


def test_one_group_that_cannot_come_back_does_not_keep_the_others_and_stays_managed(tied, device, photograph, monkeypatch, caplog):
    check = photograph(tied)
    residency = ModuleResidency(tied, device)
    residency.load()
    with torch.no_grad():
        tied["a"].linear.weight.add_(0)
    bad = next(g for g in residency._groups if g.entries[0].tensor is tied["a"].linear.weight)
    monkeypatch.setattr(bad, "_to_master", lambda *_args, **_kw: (_ for _ in ()).throw(RuntimeError("link down")))
    with pytest.raises(RuntimeError, match="link down"):
        residency.restore()
    assert tied["a"].linear.weight.device == device
    assert tied["b"].linear.bias.device.type == "cpu"
    monkeypatch.undo()
    residency.restore()
    check()
    caplog.clear()  # its traceback holds the device copy


def test_a_residency_whose_new_tensors_cannot_be_taken_in_still_gives_everything_else_back(block, device):
    from omni_offload.errors import OffloadConfigError

    residency = ModuleResidency(block, device)
    residency.load()
    block.register_buffer("ghost", torch.empty(1, device="meta"))
    with pytest.raises(OffloadConfigError, match="ghost"):
        residency.restore()
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)
    assert block.linear.weight.device.type == "cpu"


# ---- interrupts ----


class Interrupt:
    """Raise `KeyboardInterrupt` at the n-th line of the watched files that runs in a `with` block.

    Not at a `with` line itself, where a trace function could raise after the body and before `__exit__`, nor at a `try:`, which stands
    outside the handlers of an enclosing `with`: a signal is handled at neither, and torch's guards would stay on for good.
    """

    def __init__(self, n):
        self.left = n
        self.at = "nowhere"

    def __enter__(self):
        self.former = sys.gettrace()
        sys.settrace(self._calls)

    def __exit__(self, *exc):
        sys.settrace(self.former)

    def _calls(self, frame, event, arg):
        return self._lines if frame.f_code.co_filename.startswith(tuple(WATCHED)) else None

    def _lines(self, frame, event, arg):
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:")):
            self.left -= 1
            if self.left == -1:
                self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._lines


def lines_of(action):
    counter = Interrupt(1 << 60)
    with counter:
        action()
    return (1 << 60) - counter.left


def at_every_line(make, action, check, stride=1):
    """Interrupt an action at every line it runs, on a fresh subject each time, and check afterwards."""
    subject = make()
    total = lines_of(lambda: action(subject))
    check(subject, -1)
    for n in range(0, total, stride):
        subject = make()
        interrupt = Interrupt(n)
        try:
            with interrupt:
                action(subject)
        except KeyboardInterrupt:
            pass
        check(subject, interrupt.at)
    return total


def whole(photo):
    def check(residency, n):
        residency.restore()
        photo()
        assert (sim.allocated(), sim.pinned_bytes()) == (0, 0), n

    return check


pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning")

CASES = {
    "load": (lambda _: None, lambda r: r.load()),
    "load of cached": (lambda r: (r.load(), r.unbind()), lambda r: r.load()),
    "offload": (lambda r: r.load(), lambda r: r.offload()),
    "restore of loaded": (lambda r: r.load(), lambda r: r.restore()),
    "restore of offloaded": (lambda r: (r.load(), r.offload()), lambda r: r.restore()),
    "restore of prefetched": (lambda r: r.fetch(), lambda r: r.restore()),
}


@pytest.mark.traced
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("case", CASES)
def test_restore_repairs_an_interrupt_at_any_line(case, pin, stride, tied, device, photograph):
    photo = photograph(tied)
    before, action = CASES[case]

    def make():
        residency = ModuleResidency(tied, device, pin_memory=pin)
        before(residency)
        return residency

    assert at_every_line(make, action, whole(photo), stride) > 50


@pytest.mark.traced
@pytest.mark.parametrize("case", ["load", "offload"])
def test_after_an_interrupt_at_any_line_the_action_can_simply_be_repeated(case, tied, device, photograph):
    photo = photograph(tied)
    before, action = CASES[case]

    def make():
        residency = ModuleResidency(tied, device)
        before(residency)
        return residency

    def check(residency, n):
        action(residency)
        assert residency.loaded == (case == "load"), n
        wanted = device if case == "load" else torch.device("cpu")
        assert {t.device for _, t in residency.tensors()} == {wanted}, n
        if case == "offload":
            assert (sim.allocated(), residency.meter.current) == (0, 0), n
        residency.restore()
        photo()

    at_every_line(make, action, check, stride=5)


@pytest.mark.traced
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_what_was_written_on_the_device_survives_an_interrupt_of_the_offload(pin, tied, device):
    def make():
        residency = ModuleResidency(tied, device, pin_memory=pin)
        residency.load()
        with torch.no_grad():
            tied["a"].scale.fill_(2.0)
            tied.low.fill_(3.0)
        return residency

    def check(residency, n):
        residency.restore()
        assert tied["a"].scale.tolist() == [2.0] * 6, n
        assert tied.high[:4].tolist() == [3.0] * 4, n
        with torch.no_grad():
            tied["a"].scale.fill_(1.0)
            tied.low.fill_(1.0)

    at_every_line(make, lambda r: r.offload(), check, stride=5)


@pytest.mark.traced
def test_an_undo_repairs_an_interrupted_preparation_of_weights_found_on_the_device(make_block, device):
    block = nn.Linear(6, 6).to(device)
    pointers = [t.data_ptr() for t in [*block.parameters(), *block.buffers()]]

    def check(residency, n):
        residency.restore(to_origin=True)
        assert [t.data_ptr() for t in [*block.parameters(), *block.buffers()]] == pointers, n

    at_every_line(lambda: ModuleResidency(block, device), lambda r: r.prepare(keep_origin=True), check, stride=3)
    block.cpu()


@pytest.mark.traced
def test_an_interrupted_preparation_of_weights_found_on_the_device_ends_on_the_host(make_block, device):
    block = nn.Linear(6, 6)

    def make():
        block.to(device)
        return ModuleResidency(block, device)

    def check(residency, n):
        begun = residency._begun
        residency.restore()
        if begun:
            assert {t.device.type for t in [*block.parameters(), *block.buffers()]} == {"cpu"}, n

    at_every_line(make, lambda r: r.prepare(), check, stride=5)
    block.cpu()


@pytest.mark.traced
def test_an_interrupted_regrouping_is_repeated_at_the_next_use(make_block, device):
    torch.manual_seed(0)
    block = nn.ModuleDict({"linear": nn.Linear(6, 6)})
    block.linear = block["linear"]
    kept = block.linear.weight

    def make():
        block.linear.weight = kept
        residency = ModuleResidency(block, device)
        residency.load()
        residency.offload()
        block.linear.weight = nn.Parameter(torch.full((6, 6), 2.0))
        return residency

    def check(residency, n):
        residency.load()
        assert block.linear.weight.device == device, n
        assert bool((block.linear.weight == 2.0).all()), n
        residency.restore()
        assert {t.device.type for t in [kept, *block.parameters(), *block.buffers()]} == {"cpu"}, n

    at_every_line(make, lambda r: r.validate(), check, stride=5)


@pytest.mark.traced
def test_an_interrupt_in_the_repair_itself_is_repaired_by_the_next(tied, device, photograph):
    photo = photograph(tied)

    def make():
        residency = ModuleResidency(tied, device)
        residency.prepare()
        residency.fetch()
        total = lines_of(residency.bind)
        residency.unbind()
        try:
            with Interrupt(total // 2):
                residency.bind()
        except KeyboardInterrupt:
            pass
        return residency

    at_every_line(make, lambda r: r.restore(), whole(photo), stride=5)


def test_a_repair_does_not_undo_what_the_user_moved_meanwhile(block, device):
    residency = ModuleResidency(block, device)
    residency.prepare()
    residency.fetch()
    group = residency._groups[0]
    group.unsure = True  # as an interrupt leaves it before the first binding
    residency.unbind(force=True)
    block.double()
    residency.restore()
    assert block.scale.dtype == torch.float64


def test_a_binding_cut_short_is_finished_by_restore(device):
    """Where an interrupt left tensors bound to neither copy nor master, they are their masters again."""
    module = torch.nn.Linear(8, 8).requires_grad_(False)
    expected = module.weight.clone()
    residency = ModuleResidency(module, device)
    residency.load()
    residency.offload()
    (group,) = [group for group in residency._groups if any(entry.tensor is module.weight for entry in group.entries)]
    group.unsure = True
    module.weight.data = torch.zeros_like(module.weight)
    residency.restore()
    assert torch.equal(module.weight, expected)


def test_a_binding_cut_short_is_finished_by_the_next(device):
    """Where a binding to the device was begun and not finished, the next one binds everything again."""
    module = torch.nn.Linear(8, 8).requires_grad_(False)
    residency = ModuleResidency(module, device)
    residency.load()
    for group in residency._groups:
        group.unsure = True
        for entry, view in zip(group.entries, group.master.views, strict=True):
            entry.tensor.data = view
    assert not residency.loaded
    residency.load()
    assert residency.loaded
    assert all(parameter.device == device for parameter in module.parameters())
    residency.restore()
