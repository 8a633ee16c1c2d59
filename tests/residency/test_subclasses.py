"""Tensors with inner tensors: the inner ones are moved, the outer one follows as the same object, or it is refused by name."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from omni_offload import ModuleResidency
from omni_offload.errors import OffloadConfigError
from omni_offload.residency.tables import Tables, collect
from omni_offload.testing import sim


class Scaled(torch.Tensor):
    """Whole numbers and a scale, as quantised weights are kept; every operator works on what they stand for."""

    @staticmethod
    def __new__(cls, whole, scale, zero=None):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole, scale, zero=None):
        self.whole, self.scale, self.zero = whole, scale, zero

    def __tensor_flatten__(self):
        return [name for name in ("whole", "scale", "zero") if getattr(self, name) is not None], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Scaled(**inner)

    def stands_for(self):
        whole = self.whole.stands_for() if isinstance(self.whole, Scaled) else self.whole
        return whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale, args[0].zero)
        plain = tree_map(lambda value: value.stands_for() if isinstance(value, Scaled) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def scaled(seed=0):
    random = torch.Generator().manual_seed(seed)
    return Scaled(torch.randint(-9, 9, (6, 6), dtype=torch.int8, generator=random), torch.rand(6, 1, generator=random))


@pytest.fixture
def layer():
    layer = nn.Linear(6, 6)
    layer.weight = nn.Parameter(scaled(), requires_grad=False)
    return layer.requires_grad_(False)


@pytest.fixture(params=[True, False], ids=["pinned", "pageable"])
def pin(request):
    return request.param


def test_inner_tensors_are_moved_and_the_outer_one_follows(layer, device, pin):
    """The outer tensor and the inner ones are the same objects, on the device while loaded and on the host otherwise."""
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    expected, weight = layer(x), layer.weight
    inner, values, version = (weight.whole, weight.scale), (weight.whole.clone(), weight.scale.clone()), weight._version
    residency = ModuleResidency(layer, device, pin_memory=pin)
    for _ in range(2):
        residency.load()
        assert {t.device for t in (weight, *inner, layer.bias)} == {device}
        assert torch.equal(layer(x.to(device)).cpu(), expected)
        residency.offload()
        assert {t.device.type for t in (weight, *inner, layer.bias)} == {"cpu"}
        assert torch.equal(layer(x), expected)
    assert residency.host_bytes == 36 + 24 + 24
    assert [name for name, _ in residency.wrappers()] == ["Linear.weight"]
    assert sim.d2h_bytes() == 2 * expected.nbytes
    residency.restore()
    assert layer.weight is weight
    assert (weight.whole, weight.scale) == inner
    assert type(weight) is Scaled
    assert weight._version == version
    assert all(map(torch.equal, inner, values))


def test_weights_found_on_the_device(layer, device):
    """Weights with inner tensors that are on the device are moved to the host once, and back where enabling is undone."""
    layer.weight = nn.Parameter(Scaled(layer.weight.whole.to(device), layer.weight.scale.to(device)), requires_grad=False)
    weight = layer.weight
    residency = ModuleResidency(layer, device)
    residency.prepare(keep_origin=True)
    assert (weight.device.type, weight.whole.device.type) == ("cpu", "cpu")
    residency.restore(to_origin=True)
    assert (weight.device, weight.whole.device) == (device, device)
    layer.weight = None


def test_inner_tensors_written_on_the_device_come_back(layer, device):
    """What is written to an inner tensor on the device is in the master afterwards."""
    residency = ModuleResidency(layer, device)
    residency.load()
    with torch.no_grad():
        layer.weight.scale.mul_(2)
    expected = layer.weight.scale.cpu()
    residency.offload()
    assert torch.equal(layer.weight.scale, expected)
    residency.restore()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.weight, "scale", layer.weight.scale * 3),
        lambda layer: setattr(layer.weight, "zero", torch.ones(6, 1)),
        lambda layer: setattr(layer, "weight", nn.Parameter(scaled(1), requires_grad=False)),
        lambda layer: torch.utils.swap_tensors(layer.weight, nn.Parameter(scaled(2), requires_grad=False)),
    ],
    ids=["replaced inner", "another inner", "replaced", "swapped"],
)
def test_a_change_of_inner_tensors_is_in_force(layer, device, change):
    """An inner tensor that is replaced or added between uses, or swapped with the outer one, is managed at the next use."""
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    residency = ModuleResidency(layer, device)
    residency.load()
    residency.offload()
    change(layer)
    expected = layer(x)
    residency.validate(thorough=True)
    residency.load()
    names, _ = layer.weight.__tensor_flatten__()
    assert {getattr(layer.weight, name).device for name in names} == {device}
    assert torch.equal(layer(x.to(device)).cpu(), expected)
    residency.restore()
    assert {getattr(layer.weight, name).device.type for name in names} == {"cpu"}


def test_a_snapshot_sees_inner_tensors(layer):
    """A replaced inner tensor is a change, one more is growth."""
    _, tables = collect({"m": layer})
    assert (tables.changed(), tables.grown()) == (False, False)
    layer.weight.zero = torch.ones(6, 1)
    assert (tables.changed(), tables.grown()) == (False, True)
    layer.weight.scale = torch.ones(6, 1)
    assert tables.changed()
    assert Tables([layer]).wrappers == ()


def test_wrappers_within_wrappers(holding, device):
    """Of an outer tensor in another one both follow, and each innermost tensor is moved once, also where two share it."""
    shared = scaled()
    nested, other = Scaled(shared, torch.full((6, 1), 2.0)), Scaled(shared.whole, torch.ones(6, 1))
    expected = nested.stands_for()
    module = holding(buffers=(nested, other))
    entries, _ = collect({"m": module})
    assert [entry.name for entry in entries] == ["m.b0.whole.whole", "m.b0.whole.scale", "m.b0.scale", "m.b1.scale"]
    residency = ModuleResidency(module, device)
    residency.load()
    assert {t.device for t in (nested, nested.whole, nested.whole.scale, other, other.whole)} == {device}
    assert torch.equal(nested.stands_for().cpu(), expected)
    residency.restore()
    assert {t.device.type for t in (nested, nested.whole, nested.whole.scale, other, other.whole)} == {"cpu"}


def test_made_in_inference_mode(device, holding):
    """Outer and inner tensors made in inference mode are moved like others."""
    with torch.inference_mode():
        tensor = scaled()
    residency = ModuleResidency(holding(buffers=(tensor,)), device)
    residency.load()
    assert tensor.device == tensor.scale.device == device
    residency.restore()
    assert tensor.is_inference()
    assert tensor.device.type == "cpu"


class Hollow(Scaled):
    """Names no inner tensors."""

    def __tensor_flatten__(self):
        return [], None


def test_what_names_no_inner_tensors_is_refused(holding):
    """A wrapper without inner tensors is refused by name, before anything moves."""
    with pytest.raises(OffloadConfigError, match=r"m\.b0 \(Hollow\): it names no inner tensors"):
        collect({"m": holding(buffers=(Hollow(torch.ones(2, dtype=torch.int8), torch.ones(2)),))})


def test_inner_tensors_without_values_are_refused_by_their_names(holding):
    """An inner tensor that cannot be moved is named with its way there."""
    with pytest.raises(OffloadConfigError, match=r"m\.b0\.scale \(Tensor\): it is on the meta device"):
        collect({"m": holding(buffers=(Scaled(torch.ones(2, dtype=torch.int8), torch.ones(2, device="meta")),))})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_jagged_tensor_is_refused(holding):
    """A wrapper whose size is not that of one block of memory is refused by name."""
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(OffloadConfigError, match=r"m\.b0 \(NestedTensor\): its layout \(torch\.jagged\)"):
        collect({"m": holding(buffers=(jagged,))})


def test_a_distributed_tensor_is_moved_by_its_local_part(holding):
    """Of a tensor over a mesh of devices the local tensor is what lies somewhere; the mesh that it names is no tensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        entries, tables = collect({"m": holding(buffers=(tensor,))})
        assert [(entry.name, entry.tensor) for entry in entries] == [("m.b0._local_tensor", tensor._local_tensor)]
        assert [wrapper.tensor for wrapper in tables.wrappers] == [tensor]
    finally:
        dist.destroy_process_group()
