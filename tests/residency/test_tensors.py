"""Tensors are grouped by overlapping bytes."""

import pytest
import torch
from torch import nn

from omni_offload.errors import OffloadConfigError
from omni_offload.residency.tables import Tables, collect
from omni_offload.residency.tensors import Placements, Shapes, align, group_by_bytes, is_shaped, shape_of, view_of


def groups(module):
    entries, _ = collect({"m": module})
    return [[entry.name for entry in placement.entries] for placement in group_by_bytes(entries)]


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_sizes_are_rounded_up_to_64_bytes(nbytes, aligned):
    assert align(nbytes) == aligned


def test_the_same_object_under_two_names_is_one_tensor(holding):
    weight = nn.Parameter(torch.ones(3))
    assert groups(holding(weight, weight)) == [["m.p0"]]


def test_different_objects_on_the_same_memory_share_a_group(holding):
    base = torch.ones(4, 4)
    assert groups(holding(base, base.view(16), base[1:2])) == [["m.p0", "m.p1", "m.p2"]]


def test_overlapping_views_share_a_group_transitively(holding):
    base = torch.ones(30)
    assert groups(holding(base[0:10], base[20:30], base[5:15], base[14:21])) == [["m.p0", "m.p2", "m.p3", "m.p1"]]


def test_interleaved_slices_share_a_group(holding):
    base = torch.ones(8, 2)
    assert groups(holding(base[:, 0], base[:, 1])) == [["m.p0", "m.p1"]]


def test_a_flat_checkpoint_is_many_groups_not_one(holding):
    base = torch.ones(30)
    assert groups(holding(base[10:20], base[0:10], base[20:30])) == [["m.p0"], ["m.p1"], ["m.p2"]]


def test_tensors_on_different_devices_never_share_a_group(holding, device):
    module = holding(torch.ones(3), torch.ones(3, device=device), torch.ones(3, device="sim:1"))
    assert groups(module) == [["m.p0"], ["m.p1"], ["m.p2"]]


def test_empty_tensors_are_groups_of_their_own(holding):
    base = torch.ones(4)
    assert groups(holding(base[:0], base, base[4:], torch.empty(0, 3))) == [["m.p0"], ["m.p1"], ["m.p2"], ["m.p3"]]


def test_mixed_types_on_one_storage_start_at_a_whole_element_of_each(holding):
    base = torch.zeros(32, dtype=torch.uint8)
    module = holding(buffers=(base[3:9], base[8:16].view(torch.float32)))
    (placement,) = group_by_bytes(collect({"m": module})[0])
    start = placement.start - base.data_ptr()
    assert (start, placement.nbytes, placement.offsets) == (0, 16, (3, 8))


def test_a_group_that_begins_lower_for_its_alignment_takes_in_what_lies_there(holding):
    base = torch.zeros(64, dtype=torch.uint8)
    module = holding(buffers=(base[33:35], base[35:37], base[36:40].view(torch.float32)))
    assert groups(module) == [["m.b0", "m.b1", "m.b2"]]


def test_placements_are_taken_once(holding):
    """Those of some tensors, whole and in order; none where one is gone, not known, or has a tensor that must not be in it."""
    base = torch.ones(4)
    entries, _ = collect({"m": holding(torch.ones(1), base[:3], torch.ones(2), base[2:], torch.ones(3))})
    ids = [id(entry.tensor) for entry in entries]

    def take(placements, *numbers, but=()):
        found = placements.take({ids[number] for number in numbers}, {ids[number] for number in but})
        return None if found is None else [[entry.name for entry in placement.entries] for placement in found]

    placements = Placements(group_by_bytes(entries))
    assert take(placements, 2, 0) == [["m.p0"], ["m.p2"]]
    assert take(placements, 2) is None
    assert placements.take({ids[4], id(base)}) is None
    assert take(placements, 1, but=(3,)) is None
    assert take(placements, 4, but=(3,)) == [["m.p4"]]
    assert take(Placements(group_by_bytes(entries)), 3, but=(0,)) == [["m.p1", "m.p3"]]


def test_overlap_through_storages_of_which_none_holds_all_is_refused_by_name(holding):
    memory = bytearray(64)
    first = torch.frombuffer(memory, dtype=torch.float32, count=8)
    second = torch.frombuffer(memory, dtype=torch.float32, count=8, offset=16)
    with pytest.raises(OffloadConfigError, match=r"m\.b0, m\.b1 overlap through storages"):
        groups(holding(buffers=(first, second)))


def test_overlap_at_fractions_of_elements_is_refused_by_name(holding):
    memory = bytearray(64)
    first = torch.frombuffer(memory, dtype=torch.float32, count=16)
    second = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=2)
    with pytest.raises(OffloadConfigError, match="whole elements"):
        groups(holding(buffers=(first, second)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[1:, 2:],
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x[0].expand(5, -1),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to(torch.complex64).conj().imag,
    ],
    ids=["transposed", "sliced", "0-dim", "empty", "expanded", "conj", "neg"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_view_of_other_bytes_has_shape_strides_bits_and_kind_of_its_tensor(make, inference):
    with torch.inference_mode(mode=inference):
        like = make(torch.arange(12.0).view(3, 4))
    view = view_of(torch.zeros(256, dtype=torch.uint8), 64, like)
    assert (view.shape, view.stride(), view.dtype) == (like.shape, like.stride(), like.dtype)
    assert (view.is_conj(), view.is_neg(), view.is_inference()) == (like.is_conj(), like.is_neg(), inference)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.clone(),
        lambda x: x.t(),
        lambda x: x.view(torch.int64),
        lambda x: x[:1],
        lambda x: x.conj(),
    ],
)
def test_a_tensor_that_was_bound_elsewhere_or_seen_otherwise_is_told_from_its_shape(change):
    base = torch.zeros(3, 3, dtype=torch.complex64)
    tensor = base[:]
    shape = shape_of(tensor)
    assert is_shaped(tensor, shape)
    assert not is_shaped(change(base), shape)


def test_empty_tensors_are_told_apart_by_their_device(device):
    assert not is_shaped(torch.empty(0, device=device), shape_of(torch.empty(0)))


# ---- tables ----


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:.*quantized.*:UserWarning",
    "ignore:.*Sparse.*:UserWarning",
    "ignore:.*quantization.*:DeprecationWarning",
    "ignore:.*Quantized.*:UserWarning",
)
def test_everything_that_is_no_plain_memory_is_refused_in_one_error_by_name():
    cut = torch.ones(4)
    cut.untyped_storage().resize_(0)
    module = nn.Module()
    buffers = {
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "wrapped": Wrapper(torch.ones(2)),
        "cut": cut,
        "good": torch.ones(2),
    }
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    module.lazy = nn.LazyLinear(3)
    with pytest.raises(OffloadConfigError) as caught:
        collect({"m": module})
    message = str(caught.value)
    for name in [*buffers, "lazy.weight"]:
        assert (f"m.{name} (" in message) == (name != "good"), name
    assert "0 bytes, fewer than its 4 elements span" in message


def test_many_tensors_with_one_problem_are_named_in_short():
    """A message holds the first ones, with what to do once."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(10)))
    with pytest.raises(OffloadConfigError) as caught:
        collect({"m": module})
    named = ", ".join(f"m.{index}.weight (Parameter)" for index in range(8))
    assert str(caught.value).endswith(f": {named} and 2 more: it is on the meta device and has no values; load the weights first")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_torchscript_module_is_refused_by_name():
    module = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    with pytest.raises(OffloadConfigError, match=r"m\.0 \(.*\): TorchScript"):
        collect({"m": module})


def test_a_fake_tensor_is_refused_like_a_meta_one():
    from torch._subclasses import FakeTensorMode

    module = nn.Module()
    with FakeTensorMode():
        module.register_buffer("fake", torch.empty(2))
    with pytest.raises(OffloadConfigError, match=r"m\.fake .*meta device"):
        collect({"m": module})


def test_a_module_under_two_names_is_walked_once(holding):
    inner = holding(torch.ones(2))
    entries, _ = collect({"a": nn.ModuleList([inner, inner]), "b": inner})
    assert [entry.name for entry in entries] == ["a.0.p0"]


def test_a_fresh_snapshot_sees_no_change(block):
    tables = Tables(block.modules())
    assert (tables.changed(), tables.grown()) == (False, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "scale", torch.ones(6)),
        lambda m: setattr(m, "linear", nn.Linear(6, 6)),
        lambda m: setattr(m.linear, "bias", None),
        lambda m: delattr(m, "scale"),
        lambda m: m.register_buffer("more", torch.ones(1)),
        lambda m: m.register_module("more", nn.Identity()),
        lambda m: m.linear.__dict__.update(_parameters=dict.fromkeys(m.linear._parameters)),
    ],
)
def test_a_snapshot_sees_what_is_put_in_taken_out_or_replaced(block, change):
    tables = Tables(block.modules())
    change(block)
    assert tables.changed()


def test_a_successor_at_the_same_address_is_seen(block):
    tables = Tables(block.modules())
    for _ in range(20):
        del block.norm
        block.norm = nn.BatchNorm1d(6)
    assert tables.changed()


def test_a_new_tensor_attribute_is_growth_and_a_replaced_one_a_change(block):
    block.plain = torch.ones(1)
    tables = Tables(block.modules())
    block.other = torch.ones(1)
    assert (tables.changed(), tables.grown()) == (False, True)
    block.plain = torch.ones(1)
    assert tables.changed()


def test_a_tensor_whose_storage_was_cut_short_is_refused_by_name(holding):
    module = holding(torch.ones(8))
    entries, _ = collect({"m": module})
    module.p0.untyped_storage().resize_(16)
    with pytest.raises(OffloadConfigError, match=r"m\.p0"):
        group_by_bytes(entries)


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda t: t.t(),
        lambda t: t.view(torch.int32),
        lambda t: t[:2],
        lambda t: t.view(torch.complex64),
    ],
    ids=["memory", "strides", "type", "size", "size and type"],
)
def test_shapes_tell_any_other_binding(change):
    """Many tensors fit the shapes that were taken of them, until one is bound to anything else."""
    tensors = [torch.ones(3), torch.zeros(4, 4), torch.empty(0, 2), torch.ones(2, dtype=torch.complex64)]
    shapes = Shapes(tensors)
    assert shapes.fit(tensors)
    tensors[1].data = change(tensors[1].data)
    assert not shapes.fit(tensors)


def test_shapes_tell_a_conjugate():
    """A complex tensor of the same memory is another binding where it is conjugated."""
    tensors = [torch.ones(2, dtype=torch.complex64)]
    shapes = Shapes(tensors)
    tensors[0].data = tensors[0].data.conj()
    assert not shapes.fit(tensors)
