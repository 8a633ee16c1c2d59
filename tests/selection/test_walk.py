"""What lies within a module, as torch's own iterators tell it."""

import torch
from torch import nn

from omni_offload.discovery import modules_of, named_modules_of, weights_of


class Nested(nn.Module):
    """A module that stands twice, one that is None, a buffer that is None, and a weight tied across modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.second = nn.ModuleDict({"again": self.first[0], "other": nn.Linear(2, 2, bias=False)})
        self.second["other"].weight = self.first[0].weight
        self.nothing = None
        self.register_module("none", None)
        self.register_buffer("empty", None)


def test_modules_are_torchs():
    """Each module comes once, in torch's order, under torch's names, with a prefix too."""
    root = Nested()
    assert list(modules_of(root)) == list(root.modules())
    assert list(named_modules_of(root)) == list(root.named_modules())
    assert list(named_modules_of(root, "top")) == list(root.named_modules(prefix="top"))


def test_weights_are_torchs():
    """All parameters and buffers come, those of modules that stand twice once; None is left out."""
    root = Nested()
    found = list(weights_of(root))
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    assert all(isinstance(tensor, torch.Tensor) for tensor in found)
    assert len(found) == 2 + 2 + 3 + 1  # a layer, a norm's weights and buffers, and the tied weight again
