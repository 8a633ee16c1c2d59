"""What is written on the device comes back; what is edited, replaced, added or moved on the host is in force at the next use."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from omni_offload import ModuleResidency
from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim


@pytest.fixture(params=["normal", "inference"])
def mode(request):
    """Create the weights in or out of inference mode."""
    return request.param == "inference"


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def pin(request):
    return request.param


# ---- written on the device ----


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.zero_(),
        lambda t: t[0].fill_(9.0),
        lambda t: t.detach().mul_(2),
        lambda t: t.copy_(torch.full_like(t, 3.0)),
    ],
)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_what_is_written_on_the_device_is_on_the_host_afterwards(write, guard, block, device, equal_bytes, pin):
    expected = copy.deepcopy(block)
    residency = ModuleResidency(block, device, pin_memory=pin)
    residency.load()
    with guard():
        for module in (block, expected):
            write(module.linear.weight)
            write(module.scale)
    residency.offload()
    for name, tensor in expected.state_dict().items():
        assert equal_bytes(block.state_dict()[name], tensor), name
    assert residency.counters.bytes_out == 6 * 6 * 4 + 6 * 4
    residency.restore()


def test_weights_that_were_not_written_are_never_copied_back(block, device):
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        for _ in range(3):
            residency.load()
            block(torch.randn(2, 6, device=device))
            residency.offload()
    residency.restore()
    assert (residency.counters.bytes_out, sim.d2h_bytes()) == (0, 0)


def test_statistics_of_a_batch_norm_in_training_mode_come_back(block, device, equal_bytes):
    x = torch.randn(4, 6)
    block.train()
    twin = copy.deepcopy(block)
    residency = ModuleResidency(block, device)
    with torch.no_grad():
        for _ in range(2):
            twin(x)
            residency.load()
            block(x.to(device))
            residency.offload()
    assert equal_bytes(block.norm.running_mean, twin.norm.running_mean)
    assert equal_bytes(block.norm.running_var, twin.norm.running_var)
    residency.restore()


def test_a_buffer_written_past_its_counter_comes_back_in_training_mode_only(block, device):
    for training in (True, False):
        block.train(training)
        block.scale.fill_(1.0)
        residency = ModuleResidency(block, device)
        residency.load()
        block.scale.data.fill_(5.0)
        residency.offload()
        assert bool((block.scale == (5.0 if training else 1.0)).all())
        residency.restore()


def test_statistics_come_back_also_where_training_mode_ended_before_the_offload(block, device, equal_bytes):
    x = torch.randn(4, 6)
    twin = copy.deepcopy(block)
    residency = ModuleResidency(block, device)
    residency.load()
    for module, value in ((twin, x), (block, x.to(device))):
        with torch.no_grad():
            module.train()
            module(value)
            module.eval()
    residency.offload()
    assert equal_bytes(block.norm.running_mean, twin.norm.running_mean)
    residency.restore()


def test_a_buffer_that_forward_reassigns_keeps_its_new_value(device):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            self.count = self.count + 1
            self.seen = x * 2
            return x * self.weight

    module = Counting()
    residency = ModuleResidency(module, device)
    with torch.no_grad():
        for turn in range(1, 4):
            residency.load()
            assert module.count.device == device
            module(torch.ones(2, device=device))
            residency.offload()
            assert module.count.device.type == "cpu"
            assert module.count.tolist() == [turn, turn]
            assert module.seen.device.type == "cpu"
    residency.restore()
    assert module.seen.tolist() == [2.0, 2.0]


def test_copy_back_brings_everything_also_what_no_counter_tells(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    block.scale.data.fill_(7.0)
    residency.restore(copy_back=True)
    assert block.scale.tolist() == [7.0] * 6


# ---- inference tensors ----


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("restore", [False, True])
def test_inference_mode_may_be_on_or_off_at_creation_load_offload_and_restore(
    mode, load, offload, restore, make_block, device, photograph, pin
):
    with torch.inference_mode(mode=mode):
        block = make_block().eval()
    check = photograph(block)
    x = torch.randn(4, 6)
    with torch.inference_mode():
        expected = block(x)
    with torch.inference_mode(mode=load):
        residency = ModuleResidency(block, device, pin_memory=pin)
        residency.load()
    with torch.inference_mode():
        assert torch.equal(block(x.to(device)).cpu(), expected)
        if mode:
            block.scale.mul_(2)  # an inference tensor has no counter
    with torch.inference_mode(mode=offload):
        residency.offload()
        check(values_too=False)
    with torch.inference_mode(mode=not load):
        residency.load()
        residency.offload()
    with torch.inference_mode(mode=restore):
        residency.restore()
        check(values_too=not mode)
    assert block.linear.weight.is_inference() == mode
    assert block.scale.tolist() == [3.0 if mode else 1.5] * 6
    with torch.inference_mode(mode=mode), torch.no_grad():
        block.linear.weight.add_(1)


# ---- edited on the host ----


EDITS = {
    "in place": lambda m: m.linear.weight.mul_(2),
    "one element": lambda m: m.linear.weight[3, 3].fill_(9.0),
    "data": lambda m: m.linear.weight.data.mul_(2),
    "data replaced": lambda m: setattr(m.linear.weight, "data", torch.ones(6, 6)),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(6, 6))),
    "buffer": lambda m: setattr(m, "scale", torch.ones(6)),
    "removed": lambda m: setattr(m.linear, "bias", None),
    "module": lambda m: setattr(m, "norm", nn.Identity()),
    "added": lambda m: setattr(m, "norm", nn.Sequential(m.norm, nn.PReLU(6, 0.1))),
    "shape": lambda m: setattr(m.scale, "data", torch.ones(1)),
    "layout": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "hidden": lambda m: m.hidden.fill_(2.0),
    "storage": lambda m: setattr(m, "scale", nn.Parameter(m.scale)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_edit_on_the_host_is_in_force_at_the_next_use_exactly_once(edit, cached, guard, block, device, pin):
    x = torch.randn(4, 6)
    twin = copy.deepcopy(block)
    residency = ModuleResidency(block, device, pin_memory=pin)
    residency.load()
    residency.unbind() if cached else residency.offload()
    with guard():
        edit(block)
        edit(twin)
        expected = twin(x)
        for _ in range(2):
            residency.load()
            assert torch.equal(block(x.to(device)).cpu(), expected)
            residency.unbind()
            assert torch.equal(block(x), expected)
        residency.restore()
        assert torch.equal(block(x), expected)


def test_an_edit_while_the_device_copy_is_prefetched_is_not_forgotten_by_a_repair(block, device):
    residency = ModuleResidency(block, device)
    residency.fetch()
    with torch.no_grad():
        block.scale.fill_(5.0)
    residency.unbind(force=True)
    residency.load()
    assert block.scale.cpu().tolist() == [5.0] * 6
    residency.restore()


def test_an_edit_between_fetch_and_bind_is_read_at_the_next_fetch(block, device):
    residency = ModuleResidency(block, device)
    residency.fetch()
    torch.accelerator.synchronize(device)  # the copy has the old value
    with torch.no_grad():
        block.scale.fill_(5.0)
    residency.bind()
    residency.unbind()
    assert block.scale.tolist() == [5.0] * 6
    residency.load()
    assert block.scale.cpu().tolist() == [5.0] * 6
    residency.restore()


@pytest.mark.parametrize("edit", [lambda p: p[5].fill_(7.0), lambda p: p.data[-1].fill_(7.0)], ids=["counted", "through .data"])
def test_an_edit_of_one_element_is_in_force_at_the_next_use(holding, device, edit):
    module = holding(torch.zeros(1 << 12))
    residency = ModuleResidency(module, device)
    residency.load()
    residency.unbind()
    edit(module.p0)
    residency.load()
    assert module.p0.cpu().sum().item() == 7.0
    residency.restore()


def test_what_was_copied_back_need_not_be_copied_in_again(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    block.scale.fill_(5.0)
    residency.unbind()
    before = residency.counters.bytes_in
    residency.load()
    assert block.scale.cpu().tolist() == [5.0] * 6
    assert residency.counters.bytes_in == before
    residency.restore()


def test_a_view_that_its_user_moved_while_loaded_keeps_its_new_memory(holding, device):
    base = torch.zeros(8)
    module = holding(buffers=(base[:6], base[2:]))  # one group
    residency = ModuleResidency(module, device)
    residency.load()
    module.b1.data = torch.full((6,), 3.0)
    residency.offload()
    assert module.b0.tolist() == [0.0] * 6
    assert module.b1.tolist() == [3.0] * 6
    residency.restore()
    assert module.b1.tolist() == [3.0] * 6


def test_an_edit_of_the_master_during_an_activation_is_read_at_the_next(block, device):
    alias = block.linear.weight.data
    residency = ModuleResidency(block, device, pin_memory=False)
    residency.load()
    alias.fill_(4.0)
    residency.unbind()
    residency.load()
    assert bool((block.linear.weight == 4.0).all())
    residency.restore()


def test_forget_copies_reads_every_master_again(holding, device):
    module = holding(torch.zeros(1 << 16))
    residency = ModuleResidency(module, device)
    residency.load()
    residency.unbind()
    module.p0.data[12345] = 1.0  # too sparse for the samples
    residency.forget_copies()
    residency.load()
    assert module.p0[12345].item() == 1.0
    residency.restore()


def test_editing_a_master_right_after_unbind_does_not_reach_a_copy_in_flight(holding, device):
    module = holding(torch.ones(1 << 18))
    residency = ModuleResidency(module, device)
    sim.configure(h2d_gbps=0.1)
    residency.load()
    residency.unbind()
    module.p0.zero_()
    residency.bind()
    assert module.p0[-1].item() == 1.0
    residency.restore()


def test_an_edit_while_a_prefetch_is_in_flight_is_read_again(holding, device):
    module = holding(torch.ones(1 << 18))
    residency = ModuleResidency(module, device)
    sim.configure(h2d_gbps=0.1)
    residency.fetch()
    module.p0.fill_(2.0)
    residency.load()
    assert bool((module.p0 == 2.0).all())
    residency.restore()


def test_a_storage_that_its_user_resized_is_taken_in(holding, device):
    module = holding(torch.arange(4.0))
    residency = ModuleResidency(module, device, pin_memory=False)
    residency.load()
    residency.unbind()
    module.p0.resize_(1 << 16).fill_(2.0)
    residency.load()
    assert (module.p0.numel(), module.p0.device) == (1 << 16, device)
    residency.restore()
    assert bool((module.p0 == 2.0).all())


def test_a_fingerprint_of_memory_that_was_moved_matches_nothing(holding, device):
    tensor = torch.arange(4.0)
    residency = ModuleResidency(holding(tensor), device, pin_memory=False)
    residency.prepare()
    master = residency._groups[0].master
    assert master.fingerprint() is not None
    tensor.untyped_storage().resize_(1 << 20)
    assert master.fingerprint() is None
    residency.restore()


# ---- moved while managed ----


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_while_managed_is_kept_both_ways(loaded, dtype, block, device):
    x = torch.randn(4, 6)
    twin = copy.deepcopy(block).to(dtype)
    residency = ModuleResidency(block, device)
    residency.load()
    if not loaded:
        residency.offload()
    block.to(dtype)
    residency.offload()
    with torch.no_grad():
        residency.load()
        assert block.linear.weight.device == device
        assert torch.equal(block(x.to(device, dtype)).cpu(), twin(x.to(dtype)))
        residency.offload()
        block.float()
        residency.load()
        assert block.linear.weight.dtype == torch.float32
    residency.restore()
    assert torch.equal(block.linear.weight, twin.float().linear.weight)


def test_weights_that_the_user_moved_to_the_device_go_back_to_the_host(block, device, photograph):
    check = photograph(block)
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    pointers = {id(t): t for t in block.parameters()}
    block.to(device)
    residency.load()
    residency.offload()
    assert sim.allocated() == 0
    residency.restore()
    assert all(id(t) in pointers for t in block.parameters())
    check_values = photograph(block)
    check_values()
    del check


def test_weights_that_the_user_moved_to_the_host_while_loaded_stay_there(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    block.cpu()
    with torch.no_grad():
        block.linear.weight.fill_(2.0)
    residency.offload()
    assert bool((block.linear.weight == 2.0).all())
    residency.load()
    assert block.linear.weight.device == device
    residency.restore()


def test_weights_found_on_the_device_are_moved_to_the_host_once_and_counted(block, device):
    block.to(device)
    held = sim.allocated()
    weights = [*block.parameters(), *block.buffers()]
    residency = ModuleResidency(block, device)
    residency.prepare(keep_origin=True)
    assert residency.counters.bytes_out == residency.host_bytes
    assert sim.allocated() == held
    residency.commit()
    assert sim.allocated() == 0
    residency.load()
    residency.restore()
    assert [*map(id, weights)] == [*map(id, [*block.parameters(), *block.buffers()])]
    assert all(t.device.type == "cpu" for t in weights)


def test_an_undo_puts_weights_back_where_they_were_found(block, device):
    block.to(device)
    pointers = [p.data_ptr() for p in block.parameters()]
    residency = ModuleResidency(block, device)
    residency.prepare(keep_origin=True)
    residency.restore(to_origin=True)
    assert [p.data_ptr() for p in block.parameters()] == pointers
    assert sim.pinned_bytes() == 0
    block.cpu()


def test_weights_on_another_device_are_moved_too(block, device):
    block.to("sim:1")
    residency = ModuleResidency(block, device)
    residency.load()
    assert block.linear.weight.device == device
    residency.restore()
    assert block.linear.weight.device.type == "cpu"


def test_outdated_tells_what_changed_while_loaded(block, device):
    residency = ModuleResidency(block, device)
    residency.prepare()
    assert not residency.outdated()
    residency.load()
    assert not residency.outdated()
    assert not residency.validate()
    block.linear.weight.data = torch.ones(6, 6)
    assert residency.outdated()
    residency.unbind()
    assert residency.validate()
    assert not residency.validate()
    residency.restore()


def test_a_new_tensor_that_cannot_move_is_named_and_the_next_look_finds_it_again(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    block.register_buffer("ghost", torch.empty(1, device="meta"))
    for _ in range(2):
        with pytest.raises(OffloadConfigError, match=r"Block\.ghost"):
            residency.load()
    del block.ghost
    residency.load()
    residency.restore()


def test_large_weights_that_appear_late_are_pinned_and_small_ones_are_not(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    pinned = residency.pinned_bytes
    block.small = torch.ones(8)
    residency.validate(thorough=True)
    assert residency.pinned_bytes == pinned
    assert residency.overlaps  # a little does not make the copies serial
    block.large = torch.ones(1 << 18)
    residency.load()
    residency.unbind()
    residency.validate(thorough=True)
    assert residency.pinned_bytes == pinned + (1 << 20)
    residency.restore()


def test_a_view_put_in_the_place_of_its_whole_counts_alone(block, device, pin):
    """A parameter replaced by a part of its own memory counts with that part, and nothing keeps the former one alive."""
    residency = ModuleResidency(block, device, pin_memory=pin)
    residency.load()
    residency.offload()
    before, former = residency.host_bytes, weakref.ref(block.linear.weight)
    block.linear.weight = nn.Parameter(block.linear.weight.data[:3], requires_grad=False)
    expected = block.linear.weight.detach().clone()
    residency.load()
    assert residency.host_bytes == before - 3 * 6 * 4
    assert torch.equal(block.linear.weight.cpu(), expected)
    residency.offload()
    gc.collect()
    assert former() is None
    residency.restore()
