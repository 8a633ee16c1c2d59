"""What a streamed block may hold: tensors of every kind, plain ones too, and weights that are computed; what cannot move is refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.errors import OffloadConfigError
from omni_offload.residency.derived import derived_names
from omni_offload.testing import sim

WIDTH = 16


class Block(nn.Module):
    """One block with a number beside its weights, which `prepare` may make of anything."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.prepare = lambda _: 1.0

    def forward(self, x):
        return x + torch.tanh(self.down(torch.relu(self.up(x)))) * self.prepare(self)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.eval().requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Pipe(OmniOffloadMixin):
    _dit_modules = ["transformer"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})

    def __init__(self):
        torch.manual_seed(0)
        self.transformer = Model()


def _parameter(block, name, value):
    block.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _types(block):
    """Every type that a computation on the device can read."""
    types = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in types:
        _parameter(block, f"as_{dtype}".replace(".", "_"), torch.arange(1, 20).to(dtype))
    _parameter(block, "flags", torch.tensor([True, False, True]))

    def value(block):
        parts = [getattr(block, f"as_{dtype}".replace(".", "_")).float().sum() for dtype in types]
        return torch.stack([*parts, block.flags.float().sum()]).sum() / 2048

    block.prepare = value


def _layouts(block):
    """Strides of every kind: transposed, with gaps, repeated, one number, nothing, channels last, conjugated, negated."""
    base = torch.arange(24.0)
    _parameter(block, "turned", base.view(4, 6).t())
    _parameter(block, "gaps", base[::3])
    _parameter(block, "inner", base.clone().view(4, 6)[1:3, 2:5])
    _parameter(block, "repeated", torch.tensor([[2.0], [3.0]]).expand(2, 5))
    _parameter(block, "number", torch.tensor(0.5))
    _parameter(block, "nothing", torch.empty(0, 3))
    _parameter(block, "picture", torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    _parameter(block, "mirrored", torch.tensor([1 + 2j, 3 - 1j]).conj())
    _parameter(block, "opposite", torch.tensor([1 + 2j, 3 - 1j]).conj().imag)
    strides = {name: tensor.stride() for name, tensor in block.named_parameters()}

    def value(block):
        assert {name: tensor.stride() for name, tensor in block.named_parameters()} == strides
        assert block.picture.is_contiguous(memory_format=torch.channels_last)
        parts = [getattr(block, name).sum() for name in ("turned", "gaps", "inner", "repeated", "number", "nothing", "picture", "opposite")]
        return torch.stack([*parts, block.mirrored.abs().sum()]).sum() / 2048

    block.prepare = value


def _views(block):
    """Tensors that look at the same bytes: they move as one."""
    base = torch.arange(32.0)
    _parameter(block, "whole", base)
    _parameter(block, "part", base[4:12].view(2, 4))
    block.register_buffer("other", base[8:20])

    def value(block):
        assert block.part.data_ptr() == block.whole.data_ptr() + 16
        assert block.other.data_ptr() == block.whole.data_ptr() + 32
        return (block.whole.sum() + block.part.sum() * block.other.sum()) / 2048

    block.prepare = value


def _plain(block):
    """A tensor attribute that is no parameter nor buffer moves too; one in a list is the block's own to move, as without offload."""
    block.table = torch.arange(12.0) / 12
    block.phases = torch.polar(torch.ones(4), torch.arange(4.0))
    block.kept = [torch.arange(3.0)]
    block.prepare = lambda block: block.table.sum() + block.phases.abs().sum() + block.kept[0].to(block.table.device).sum()


def _buffers(block):
    """Buffers that are written in forward, large and small, persistent or not, replaced too."""
    block.register_buffer("large", torch.zeros((1 << 18) + 5))
    block.register_buffer("runs", torch.zeros((), dtype=torch.int64), persistent=False)
    block.register_buffer("last", torch.zeros(3))

    def value(block):
        block.large.add_(1)
        block.runs += 1
        block.last = block.last * 0.5 + block.runs
        return block.large[-1] + block.last.sum()

    block.prepare = value


def _old_weight_norm(block):
    """Computed by a hook of its own before every forward: a plain attribute, which is not moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        block.up = nn.utils.weight_norm(block.up)


def _old_spectral_norm(block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        block.down = nn.utils.spectral_norm(block.down)


def _pruned(block):
    prune.l1_unstructured(block.up, "weight", amount=0.4)


def _parametrised(block):
    """Parametrisations: computed where they are read."""
    block.up = parametrizations.weight_norm(block.up)
    block.down = parametrizations.orthogonal(block.down, orthogonal_map="householder", use_trivialization=False)


class Scaled(nn.Parameter):
    """A parameter of a class with an argument more."""

    def __new__(cls, data, factor):
        self = super().__new__(cls, data, requires_grad=False)
        self.factor = factor
        return self


def _own_class(block):
    block.register_parameter("own", Scaled(torch.arange(6.0), 3))

    def value(block):
        assert type(block.own) is Scaled
        return block.own.sum() * block.own.factor / 64

    block.prepare = value


def _inference(block):
    """Tensors made under inference mode have no version counter."""
    with torch.inference_mode():
        block.up.weight = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH * WIDTH).view(2 * WIDTH, WIDTH), requires_grad=False)
        block.register_buffer("late", torch.full((3,), 0.25))
    block.prepare = lambda block: block.late.sum()


KINDS = [_types, _layouts, _views, _plain, _buffers, _old_weight_norm, _old_spectral_norm, _pruned, _parametrised, _own_class, _inference]


@pytest.fixture
def device(device):
    sim.configure(mode="virtual")
    return device


def _made(kind):
    """A pipeline of which every second block holds tensors of a kind."""
    pipe = Pipe()
    for block in pipe.transformer.blocks[::2]:
        kind(block)
    pipe.transformer.requires_grad_(False)
    return pipe


PAGEABLE = {"pin_memory": False, "layer_options": {"dit": {"resident_layers": 2}}}


@pytest.mark.parametrize("keys", [pytest.param({}, id=""), pytest.param(PAGEABLE, id="pageable, residents", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[1:])
def test_kinds(device, kind, keys):
    """Passes give what a resident model gives; afterwards every tensor is the same object, on the host, with the same strides and bits."""
    plain, pipe = _made(kind), _made(kind)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    objects = {name: id(tensor) for name, tensor in pipe.transformer.named_parameters(remove_duplicate=False)}
    with pipe.enable_omni_offload("layer", device=device, **keys), torch.inference_mode():
        for _ in range(3):
            got, want = pipe.transformer(x), plain.transformer(x)
            assert got.device == device
            assert torch.equal(got.cpu(), want)
    del got
    assert {name: id(tensor) for name, tensor in pipe.transformer.named_parameters(remove_duplicate=False)} == objects
    for (name, tensor), (_, expected) in zip(_tensors(pipe), _tensors(plain), strict=True):
        assert tensor.device.type == "cpu", name
        assert tensor.stride() == expected.stride(), name
        same = torch.float64 if tensor.dtype.itemsize == 1 else tensor.dtype  # there is no `equal` of fp8
        assert torch.equal(tensor.to(same), expected.to(same)), name
    assert sim.races() == []


def _tensors(pipe):
    """Every tensor but those that a module computes anew, which are put back as they were."""
    for path, module in pipe.transformer.named_modules():
        for table in (module._parameters, module._buffers, vars(module)):
            derived = derived_names(vars(module))
            yield from (
                (f"{path}.{name}", value) for name, value in table.items() if isinstance(value, torch.Tensor) and name not in derived
            )


def _sparse(block):
    _parameter(block, "odd", torch.eye(4).to_sparse())


def _quantised(block):
    block.register_buffer("odd", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))


def _nested(block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, says torch
        block.odd = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _freed(block):
    _parameter(block, "odd", torch.ones(64))
    block.odd.untyped_storage().resize_(0)


@pytest.mark.filterwarnings("ignore:.*(quant|Quant|sparse|nested)")
@pytest.mark.parametrize("kind", [_sparse, _quantised, _nested, _freed], ids=lambda kind: kind.__name__[1:])
def test_what_cannot_move(device, kind):
    """It is refused by the name of the tensor before anything moves, and the pipeline is as it was."""
    pipe = Pipe()
    kind(pipe.transformer.blocks[3])
    pointers = [parameter.data_ptr() for parameter in pipe.transformer.blocks[0].parameters()]
    with pytest.raises(OffloadConfigError, match=r"transformer\.blocks\.3\.odd"):
        pipe.enable_omni_offload("layer", device=device)
    assert [parameter.data_ptr() for parameter in pipe.transformer.blocks[0].parameters()] == pointers
    assert pipe.offload_backend is None
    assert sim.h2d_bytes() == 0
