"""Tiny modules for residency, and the rule that holds after every test: no race, nothing left on the device or pinned."""

import copy

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """A linear layer, a buffer and a batch norm: what a block is made of."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.register_buffer("hidden", torch.arange(6.0), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x) * self.scale + self.hidden)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def make_block():
    return Block


@pytest.fixture
def holding():
    """Return a function that makes a module of given tensors: parameters, unless they are under `buffers`."""

    def make(*parameters, buffers=()):
        module = nn.Module()
        for index, tensor in enumerate(parameters):
            module.register_parameter(
                f"p{index}", tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            )
        for index, tensor in enumerate(buffers):
            module.register_buffer(f"b{index}", tensor)
        return module

    return make


@pytest.fixture
def tensors():
    """Return a function that lists the tensors of a module by name, ties under each name, plain attributes too."""

    def walk(module):
        found = {}
        for path, sub in module.named_modules():
            for table in (sub._parameters, sub._buffers, {k: v for k, v in sub.__dict__.items() if isinstance(v, torch.Tensor)}):
                found.update({f"{path}.{name}": value for name, value in table.items() if value is not None})
        return found

    return walk


@pytest.fixture
def photograph(tensors):
    """Return a function that notes a module's tensors and returns another one, which asserts that they are whole on the host."""

    def take(module):
        before = tensors(module)
        values = {name: copy.deepcopy(tensor.detach().cpu()) for name, tensor in before.items()}
        facts = {name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor)) for name, tensor in before.items()}
        ties = {(a, b) for a, x in before.items() for b, y in before.items() if x.numel() and x.data_ptr() == y.data_ptr()}

        def check(*, values_too=True):
            after = tensors(module)
            assert list(after) == list(before)
            for name, tensor in after.items():
                assert tensor is before[name], name
                assert tensor.device.type == "cpu", name
                assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor)) == facts[name], name
                if values_too:
                    assert torch.equal(bytes_of(tensor), bytes_of(values[name])), name
            assert ties == {(a, b) for a, x in after.items() for b, y in after.items() if x.numel() and x.data_ptr() == y.data_ptr()}

        return check

    return take


def bytes_of(tensor):
    """Return a tensor's bytes, so that NaN equals NaN and every type compares."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().clone()
    return plain.reshape(-1).view(torch.uint8)


@pytest.fixture
def equal_bytes():
    return lambda a, b: torch.equal(bytes_of(a.cpu()), bytes_of(b.cpu()))


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left):
    """Every test here ends with an empty device, no pinned byte and no race."""
