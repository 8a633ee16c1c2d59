"""Random weights that are the same every time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["fill_constants", "generator", "seeded"]

_NOISE = 0.02


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the CPU's generator as if it had just been seeded; its state is put back at the end, in any case."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def generator(seed: int = 0) -> torch.Generator:
    """Return a fresh generator on the CPU."""
    return torch.Generator("cpu").manual_seed(seed)


def fill_constants(module: nn.Module) -> None:
    """Add noise to every parameter that has one value only.

    Biases of zeros and gains of ones are equal in all blocks: a block that ran with another's would not be noticed.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
