"""What the checks inject and see: interrupts at lines, failing methods and registrations, snapshots."""

import threading

import pytest
import torch
from contract_tiny import Base, Tiny, case_of
from torch import nn

from omni_offload import HookRegistry, ModelHook
from omni_offload.testing.inject import Faults, Injected, Interrupt, failing_registration, interrupted_at, lines_of
from omni_offload.testing.observe import Target, device_size, same_values, tensors_in, watching
from omni_offload.testing.runner import make_bench
from omni_offload.testing.snapshot import Snapshot

LOCK = threading.Lock()


def returns(log):
    with LOCK:
        return [*log, "held"]


def work(log):
    with LOCK:
        log.append("held")
        for _ in range(3):
            log.append("again")
    log.append("released")


def here(file):
    return file == __file__


def test_lines_are_listed_first_and_last():
    """Every line counts with its first and its last execution; the exit of a with block, which no signal reaches, does not."""
    start = work.__code__.co_firstlineno
    found = [(line.number - start, line.nth) for line in lines_of(lambda: work([]), here) if start < line.number <= start + 5]
    assert found == [(1, 0), (2, 0), (3, 0), (3, 3), (4, 0), (4, 2), (5, 0)]


def test_interrupts_land_on_every_line():
    """An interrupt lands where it was asked for, and a lock that is held meanwhile is released."""
    for line in lines_of(lambda: work([]), here):
        if line.number <= work.__code__.co_firstlineno or line.number > work.__code__.co_firstlineno + 5:
            continue
        with interrupted_at(line) as landing, pytest.raises(Interrupt):
            work([])
        assert landing.reached
        assert not landing.in_finaliser
        assert not LOCK.locked()


def test_no_interrupt_between_a_body_and_its_exit():
    """A body that returns is left before any line on which an interrupt lands."""
    start = returns.__code__.co_firstlineno
    found = [(line.number - start, line.nth) for line in lines_of(lambda: returns([]), here) if start < line.number <= start + 2]
    assert found == [(1, 0), (2, 0)]


def test_faults_are_raised_once():
    """An armed method fails at its nth use from then on, once, before or after its work, and not after the block."""
    module = nn.Linear(2, 2)
    target = Target("part", module, "forward")
    x = torch.ones(1, 2)
    with Faults([target]) as faults:
        faults.arm("part.forward", nth=1, after=False)
        module(x)
        with pytest.raises(Injected):
            module(x)
        module(x)
        faults.arm("part.forward", nth=0, after=True)
    module(x)
    assert "forward" not in vars(module)


def test_failing_registration():
    """The nth registration fails, before or after it was done; the registry is as before afterwards."""
    original = HookRegistry.register_hook
    for after in (False, True):
        module = nn.Linear(2, 2)
        with failing_registration(0, after=after) as made, pytest.raises(Injected):
            HookRegistry.get_or_create(module).register_hook("x", ModelHook())
        assert made == [0]
        assert ("forward" in vars(module)) is after
    assert HookRegistry.register_hook is original


def test_watching_puts_methods_back():
    """A wrapper that stood there before is put back, and one that was put over ours is left alone."""
    module = nn.Linear(2, 2)
    mine = lambda x: x  # noqa: E731
    vars(module)["forward"] = mine
    with watching([Target("part", module, "forward")], lambda _target, method, args, kwargs: method(*args, **kwargs)):
        assert module.forward is not mine
    assert module.forward is mine
    with watching([Target("part", module, "forward")], lambda _target, method, args, kwargs: method(*args, **kwargs)):
        over = lambda x: x  # noqa: E731
        vars(module)["forward"] = over
    assert module.forward is over


CHANGES = {
    "has other values": lambda m: m.weight.data.add_(1),
    "is another object": lambda m: m._parameters.update(weight=nn.Parameter(m.weight.detach().clone())),
    "has strides": lambda m: setattr(m.weight, "data", m.weight.data.T.contiguous().T),
    "has dtype": lambda m: m.double(),
    "was added": lambda m: setattr(m, "note", 1),
    "was removed": lambda m: m._parameters.pop("bias"),
    "torch hooks": lambda m: m.register_forward_hook(lambda *_: None),
    "shares memory": lambda m: setattr(m.tied, "data", m.tied.data.clone()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_snapshots_see_changes(what):
    """A snapshot tells every kind of change, and none where there is none."""
    module = nn.Linear(3, 3)
    module.register_buffer("tied", module.weight.detach())
    snapshot = Snapshot({"part": module})
    assert snapshot.differences() == []
    CHANGES[what](module)
    assert any(what in line for line in snapshot.differences()), snapshot.differences()


def test_sizes_count_distinct_bytes():
    """Shared and overlapping memory counts once, and every range is rounded up."""
    module = nn.Linear(16, 16, bias=False)
    assert device_size([module]) == 1024
    module.register_buffer("part", module.weight.detach()[2:4])
    assert device_size([module, module]) == 1024
    module.register_buffer("other", torch.zeros(3))
    assert device_size([module]) == 1536


def test_tensors_are_found_in_results():
    """Tensors are found in containers and in plain objects, and compared bit for bit, NaN with NaN."""

    class Result:
        def __init__(self, value):
            self.value = value

    nan = torch.tensor([1.0, float("nan")])
    found = tensors_in({"a": [nan, (Result(nan),)], "b": Result({"c": nan}), "d": "text", "e": nn.Linear(1, 1)})
    assert len(found) == 3
    assert same_values(found, [nan.clone()] * 3)
    assert not same_values([nan], [nan.double()])
    assert not same_values([nan], [torch.tensor([1.0, 2.0])])
    assert not same_values([nan], [])


def test_reference_of_a_case(device):
    """A reference has the uses in their order, the arguments of each method, also of the VAE's other half, and the bytes."""
    bench = make_bench(case_of(Tiny), device)
    bench.prepare()
    reference = bench.reference
    assert [use.name for use in reference.uses] == ["text_encoder.forward", *["transformer.forward"] * 3, "vae.decode"]
    assert set(reference.recordings) == {"text_encoder.forward", "transformer.forward", "vae.decode", "vae.encode", "vae.forward"}
    assert reference.probes["transformer"] == ("blocks.0", "blocks.1", "blocks.2")
    weights = sum(device_size([part]) for part in Base().parts().values())
    assert abs(reference.weights - weights) < 8192
    assert 0 < reference.activations < 65536
    assert reference.left == 0
