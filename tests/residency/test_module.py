"""A module's weights go to the device and back as the same tensor objects."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from omni_offload import ModuleResidency
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.residency import ResidencyContext, recording
from omni_offload.testing import sim

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def test_nothing_is_touched_before_the_first_load(block, device):
    pointers = [p.data_ptr() for p in block.parameters()]
    ModuleResidency(block, device)
    assert [p.data_ptr() for p in block.parameters()] == pointers
    assert (sim.allocated(), sim.pinned_bytes()) == (0, 0)


@pytest.mark.parametrize("pin", [True, False])
def test_load_binds_the_same_objects_on_the_device_and_offload_brings_them_back(block, device, photograph, pin):
    check = photograph(block)
    x = torch.randn(4, 6)
    with torch.no_grad():
        expected = block(x)
        residency = ModuleResidency(block, device, pin_memory=pin)
        residency.load()
        assert residency.loaded
        assert all(t.device == device for t in [*block.parameters(), *block.buffers()])
        assert torch.equal(block(x.to(device)).cpu(), expected)
        residency.offload()
        assert not residency.loaded
        check()
        assert torch.equal(block(x), expected)
    assert sim.allocated() == 0
    residency.restore()
    check()
    assert sim.pinned_bytes() == 0


def test_autocast_keeps_nothing_on_the_device(device):
    """Casts of weights that count as trained would stay until the context ends; the next load casts anew."""
    linear = nn.Linear(64, 64)
    residency = ModuleResidency(linear, device)
    with torch.no_grad(), torch.autocast("sim", torch.bfloat16):
        x = torch.ones(2, 64, device=device)
        for weight in (1.0, 2.0):
            linear.weight.fill_(weight)
            linear.bias.zero_()
            residency.load()
            assert linear(x).cpu().unique().tolist() == [64 * weight]
            residency.offload()
            assert sim.allocated() == 512  # the input
    residency.restore()


def test_every_method_is_idempotent(block, device, photograph):
    check = photograph(block)
    residency = ModuleResidency(block, device)
    residency.offload()
    residency.restore()
    for _ in range(2):
        residency.load()
        residency.load()
        residency.offload()
        residency.offload()
        check()
    for _ in range(2):
        residency.restore()
    residency.offload()
    check()
    assert residency.counters.loads == 2


def test_a_restored_residency_can_load_again(block, device, photograph):
    check = photograph(block)
    residency = ModuleResidency(block, device)
    for _ in range(2):
        residency.load()
        assert residency.loaded
        assert block.linear.weight.device == device
        residency.restore()
        check()


def test_what_changed_between_creation_and_the_first_load_is_taken_in(block, device):
    residency = ModuleResidency(block, device)
    block.linear = nn.Linear(6, 6)
    block.late = torch.ones(3)
    residency.load()
    assert block.linear.weight.device == block.late.device == device
    residency.restore()


def test_bytes_are_exact_on_the_host_and_padded_on_the_device(holding, device):
    module = holding(torch.ones(3), torch.ones(100, dtype=torch.uint8))
    residency = ModuleResidency(module, device)
    assert (residency.host_bytes, residency.padded_bytes, residency.device_bytes, residency.pinned_bytes) == (112, 192, 0, 0)
    residency.load()
    assert (residency.host_bytes, residency.device_bytes, residency.pinned_bytes, residency.meter.current) == (112, 192, 112, 192)
    assert (residency.fetched, residency.overlaps, residency.pins) == (True, True, True)
    assert residency.counters.bytes_in == 112
    residency.restore()
    assert (residency.device_bytes, residency.meter.current, residency.meter.peak) == (0, 0, 192)


def test_pageable_masters_do_not_overlap(block, device):
    residency = ModuleResidency(block, device, pin_memory=False)
    residency.load()
    assert (residency.overlaps, residency.pins, residency.pinned_bytes) == (False, False, 0)
    residency.restore()


def test_masters_without_pinning_are_the_original_memory(block, device):
    pointers = [p.data_ptr() for p in block.parameters()]
    residency = ModuleResidency(block, device, pin_memory=False)
    residency.load()
    residency.offload()
    assert [p.data_ptr() for p in block.parameters()] == pointers
    residency.restore()


def test_a_module_without_tensors_takes_part_without_effect(device):
    residency = ModuleResidency(nn.Identity(), device)
    residency.load()
    assert (residency.loaded, residency.host_bytes, residency.overlaps) == (False, 0, True)
    residency.restore()


def test_several_modules_move_together_and_are_named(device, make_block):
    modules = [make_block(), make_block()]
    residency = ModuleResidency(modules, device, name="pair")
    residency.load()
    assert all(p.device == device for m in modules for p in m.parameters())
    assert next(residency.tensors())[0] == "pair[0].scale"
    residency.restore()
    assert ModuleResidency(modules, device).name == "Block"


def test_the_index_of_the_device_is_kept_while_another_is_current(block, photograph):
    check = photograph(block)
    residency = ModuleResidency(block, "sim:1")
    x = torch.randn(4, 6)
    expected = block(x)
    residency.load()
    assert torch.accelerator.current_device_index() == 0
    assert residency.device == torch.device("sim", 1)
    assert block.linear.weight.device == torch.device("sim", 1)
    assert (sim.allocated(0), sim.allocated(1) > 0) == (0, True)
    with torch.device("sim:1"):
        assert torch.equal(block(x.to("sim:1")).cpu(), expected)
        residency.offload()
    check()
    residency.restore()


def test_a_default_device_and_function_modes_are_not_seen(block, photograph, device):
    check = photograph(block)
    torch.set_default_device(device)
    try:
        residency = ModuleResidency(block, device)
        residency.load()
        residency.restore()
    finally:
        torch.set_default_device(None)
    check()


def test_a_missing_index_means_the_current_device(block, device):
    assert ModuleResidency(block, "sim").device == torch.device("sim", 0)


def test_a_listener_is_told_of_every_new_residency(block, device):
    made = []
    token = recording.set((made,))
    residency = ModuleResidency(block, device)
    recording.reset(token)
    ModuleResidency(nn.Identity(), device)
    assert made == [residency]


# ---- kinds of tensors ----


def run_all(module, device, photograph, equal_bytes, **how):
    """Load, compare every tensor with a resident copy, offload, load again, restore."""
    check = photograph(module)
    resident = {name: t.detach().clone().to(device) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    residency = ModuleResidency(module, device, **how)
    for _ in range(2):
        residency.load()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            assert tensor.device == device
            assert equal_bytes(tensor.detach(), resident[name]), name
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0 or len(residency._groups) < len(resident)
        residency.offload()
        check()
    residency.restore()
    check()
    return residency


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_travels_bit_for_bit(dtype, pin, holding, device, photograph, equal_bytes):
    values = torch.arange(24).view(4, 6).to(dtype)
    run_all(holding(values, values[:0], values[1, 2], values.t().contiguous()), device, photograph, equal_bytes, pin_memory=pin)


@pytest.mark.parametrize("pin", [True, False])
def test_every_layout_travels_bit_for_bit(pin, holding, device, photograph, equal_bytes):
    base = torch.randn(2, 3, 4, 5)
    module = holding(
        base.clone().transpose(0, 1), base.to(memory_format=torch.channels_last), base.clone()[:, 1:, ::2], base.clone()[0, 0, 0, 0],
        torch.empty(0, 7), torch.empty(3, 0, 2), torch.randn(1, 4).expand(3, 4), torch.empty_strided((2, 2), (5, 1)).fill_(1.0),
        buffers=(torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag),
    )  # fmt: skip
    run_all(module, device, photograph, equal_bytes, pin_memory=pin)


@pytest.mark.parametrize("pin", [True, False])
def test_a_flat_checkpoint_stays_many_views_with_a_copy_each(pin, holding, device, photograph, equal_bytes):
    flat = torch.randn(60)
    residency = run_all(holding(flat[:7], flat[7:20].view(13, 1), flat[20:60]), device, photograph, equal_bytes, pin_memory=pin)
    assert residency.host_bytes == 240


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("shift", [0, 4, 8, 20, 64])
def test_misaligned_memory_gives_the_results_of_a_resident_run_and_keeps_those_of_the_host(shift, pin, device):
    memory = bytearray(4 * 64 * 33 + shift)
    weight = torch.frombuffer(memory, dtype=torch.float32, offset=shift).view(64, 33)
    torch.manual_seed(0)
    weight.normal_()
    module = nn.Linear(33, 64, bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 33)
    on_host = module(x)
    with torch.no_grad():
        resident = nn.functional.linear(x.to(device), weight.to(device)).cpu()
        residency = ModuleResidency(module, device, pin_memory=pin)
        residency.load()
        assert torch.equal(module(x.to(device)).cpu(), resident)
        residency.offload()
        assert torch.equal(module(x), on_host)
        assert module.weight.data_ptr() % 64 == (weight.data_ptr() % 64)
        residency.restore()
    assert torch.equal(module(x), on_host)


@pytest.mark.parametrize("pin", [True, False])
def test_ties_are_one_master_and_one_device_copy(pin, device, photograph):
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4), "d": nn.Linear(4, 2)})
    module["b"].weight = module["a"].weight
    module["c"].weight = nn.Parameter(module["a"].weight.detach())
    module["d"].weight = nn.Parameter(module["a"].weight.detach()[1:3])
    check = photograph(module)
    residency = ModuleResidency(module, device, pin_memory=pin)
    assert residency.host_bytes == 64 + 3 * 16 + 8
    residency.load()
    assert module["b"].weight is module["a"].weight
    assert module["c"].weight.data_ptr() == module["a"].weight.data_ptr()
    assert module["d"].weight.data_ptr() == module["a"].weight.data_ptr() + 16
    with torch.no_grad():
        module["c"].weight[1, 0] = 42.0
    assert module["d"].weight[0, 0].item() == 42.0
    residency.restore()
    check(values_too=False)
    assert module["a"].weight[1, 0].item() == 42.0


def test_mixed_types_on_one_storage_travel_together(holding, device, photograph, equal_bytes):
    base = torch.arange(64, dtype=torch.uint8)
    run_all(holding(buffers=(base[3:9], base[8:16].view(torch.float32), base[16:32].view(torch.int64))), device, photograph, equal_bytes)


class Quantised(nn.Parameter):
    """A parameter subclass with a constructor argument of its own and torch functions that must not see the binding."""

    def __new__(cls, data, kind=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.kind = kind
        return made

    seen = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_subclass_keeps_its_class_and_attributes_and_sees_nothing(device):
    module = nn.Module()
    weight = Quantised(torch.arange(8, dtype=torch.uint8), kind="Q4")
    module.register_parameter("weight", weight)
    Quantised.seen.clear()
    residency = ModuleResidency(module, device)
    residency.load()
    assert Quantised.seen == []
    assert weight.device == device
    Quantised.seen.clear()
    residency.unbind()
    residency.load()
    assert not residency.outdated()
    residency.forget_copies()
    residency.offload()
    residency.restore()
    assert Quantised.seen == []
    assert module.weight is weight
    assert (type(weight), weight.kind) == (Quantised, "Q4")
    assert weight.tolist() == list(range(8))


def test_a_tensor_that_cannot_move_is_refused_by_name_before_anything_is_touched(block, device):
    block.register_buffer("ghost", torch.empty(1, device="meta"))
    with pytest.raises(OffloadConfigError, match=r"Block\.ghost"):
        ModuleResidency(block, device)


def test_plain_tensor_attributes_travel_too(block, device):
    block.plain = torch.arange(3.0)
    plain = block.plain
    residency = ModuleResidency(block, device)
    residency.load()
    assert plain.device == device
    residency.restore()
    assert block.plain is plain
    assert plain.tolist() == [0.0, 1.0, 2.0]


# ---- copies of a module ----


@pytest.mark.parametrize("loaded", [True, False])
def test_state_dict_deepcopy_pickle_and_save_are_whole_at_any_time(loaded, block, device, equal_bytes):
    values = {name: t.clone() for name, t in block.state_dict().items()}
    residency = ModuleResidency(block, device)
    residency.load()
    if not loaded:
        residency.offload()
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    clones = [
        block.state_dict(),
        copy.deepcopy(block).state_dict(),
        torch.load(file),
        pickle.loads(pickle.dumps(block.linear)).state_dict(),
    ]
    residency.restore()
    for clone in clones[:3]:
        assert all(equal_bytes(clone[name], values[name]) for name in clone)
    assert equal_bytes(clones[3]["weight"], values["linear.weight"])


def test_a_copy_made_while_offloaded_is_independent(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert block.linear.weight.any()
    residency.restore()


# ---- owners ----


def test_a_second_owner_is_refused_by_name_at_creation(block, device):
    first = ModuleResidency(block, device)
    first.load()
    with pytest.raises(OffloadStateError, match=r"Linear: Linear\.weight is managed by another"):
        ModuleResidency(block.linear, device)
    first.restore()
    ModuleResidency(block.linear, device)


def test_a_second_owner_that_was_made_before_the_first_loaded_is_refused_when_it_loads(block, device, photograph):
    check = photograph(block)
    first, second = ModuleResidency(block, device), ModuleResidency(block, device)
    first.load()
    with pytest.raises(OffloadStateError, match="managed by another"):
        second.load()
    second.restore()
    assert block.linear.weight.device == device
    first.restore()
    check()
    second.load()
    second.restore()


def test_an_owner_that_is_gone_owns_nothing(block, device):
    residency = ModuleResidency(block, device)
    residency.load()
    residency.offload()
    del residency
    import gc

    gc.collect()
    ModuleResidency(block, device).restore()


def test_residencies_of_one_context_share_a_tied_group_and_nest(device, make_block, photograph):
    from omni_offload.accelerator import Accelerator

    a, b = make_block(), make_block()
    b.linear.weight = a.linear.weight
    checks = photograph(a), photograph(b)
    context = ResidencyContext(Accelerator.of(torch.device("sim", 0)))
    first, second = ModuleResidency(a, device, context=context), ModuleResidency(b, device, context=context)
    first.prepare()
    second.prepare()
    first.load()
    held = sim.allocated()
    second.load()
    assert sim.allocated() < 2 * held
    first.unbind()
    assert a.linear.weight.device == device  # still bound for the second
    assert a.linear.bias.device.type == "cpu"
    first.drop()
    with torch.no_grad():
        b.linear.weight.fill_(3.0)
    second.offload()
    assert a.linear.weight.device.type == "cpu"
    assert bool((a.linear.weight == 3.0).all())
    first.load()
    second.fetch()
    first.offload()
    assert second.fetched  # the shared group too
    first.restore()
    second.restore()
    context.close()
    for check in checks:
        check(values_too=False)
    assert sim.allocated() == 0


def test_what_two_residencies_share_is_in_one_buffer_a_type_and_what_others_share_in_another(device):
    """Seventy small tensors take no seventy allocations; each buffer leaves with the last of those that share what is in it."""
    from omni_offload.accelerator import Accelerator

    def linears(number, dtype):
        return nn.ModuleList(nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(number))

    by_two, by_three, halves = linears(40, torch.float32), linears(20, torch.float32), linears(10, torch.bfloat16)
    parts = [nn.ModuleList([by_two, by_three, halves]), nn.ModuleList([by_two, by_three, halves]), nn.ModuleList([by_three])]
    context = ResidencyContext(Accelerator.of(torch.device("sim", 0)))
    residencies = [ModuleResidency(part, device, context=context) for part in parts]
    for residency in residencies:
        residency.prepare()
    for residency in residencies:
        residency.load()
    of_two, of_three, of_halves = 40 * 256, 20 * 256, 1536  # an allocation takes a multiple of 512 bytes: ten halves 1280, 70 alone 35840
    assert sim.allocated() == of_two + of_three + of_halves
    residencies[0].offload()
    assert sim.allocated() == of_two + of_three + of_halves
    residencies[1].offload()
    assert sim.allocated() == of_three
    residencies[2].offload()
    assert sim.allocated() == 0
    for residency in residencies:
        residency.restore()
    context.close()


def test_giving_up_one_of_two_residencies_leaves_the_shared_group_to_the_other(device, make_block):
    from omni_offload.accelerator import Accelerator

    a, b = make_block(), make_block()
    b.linear.weight = a.linear.weight
    context = ResidencyContext(Accelerator.of(torch.device("sim", 0)))
    first, second = ModuleResidency(a, device, context=context), ModuleResidency(b, device, context=context)
    first.load()
    second.load()
    first.restore()
    assert b.linear.weight.device == device
    second.restore()
    context.close()
    assert b.linear.weight.device.type == "cpu"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_tie_that_appears_in_one_residency_regroups_the_other_too(device, make_block, loaded):
    from omni_offload.accelerator import Accelerator

    a, b = make_block(), make_block()
    b.linear.weight = a.linear.weight
    context = ResidencyContext(Accelerator.of(torch.device("sim", 0)), pin_memory=False)
    first, second = ModuleResidency(a, device, context=context), ModuleResidency(b, device, context=context)
    for residency in (first, second):
        residency.load()
        residency.offload()
    a.register_buffer("tie", a.linear.weight.detach()[1:])
    first.load()
    if not loaded:
        first.offload()
    second.load()
    assert b.linear.weight.data_ptr() == a.linear.weight.data_ptr() == a.tie.data_ptr() - 24
    assert a.tie.device == device
    first.restore()
    second.restore()
    context.close()
