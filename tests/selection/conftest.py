"""Small real modules and pipelines of every shape."""

from types import SimpleNamespace

import pytest
from torch import nn


class Net(nn.Module):
    """A component with one layer."""

    def __init__(self, size=2):
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        return self.layer(x)

    def encode(self, x):
        return self(x)

    def decode(self, x):
        return self(x)


class Stacked(nn.Module):
    """A component with a stack of blocks."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(Net() for _ in range(blocks))


class Dit(Stacked):
    """A DiT that declares its stack."""

    _layerwise_offload_blocks_attrs = ["blocks"]


def plain(lists=None, *, plan=None, extra=None, declared=True, base=object, **components):
    """A pipeline object of a fresh class, with these lists and components."""
    names = {"dit": "_dit_modules", "encoder": "_encoder_modules", "vae": "_vae_modules", "resident": "_resident_modules"}
    fields = {names[kind]: list((lists or {}).get(kind, [])) for kind in names} if declared else {}
    if plan is not None:
        fields["_offload_plan"] = plan
    pipeline = type("Pipe", (base,), {**fields, **(extra or {})})()
    for name, value in components.items():
        setattr(pipeline, name, value)
    return pipeline


@pytest.fixture
def kit():
    return SimpleNamespace(Net=Net, Stacked=Stacked, Dit=Dit, plain=plain)
