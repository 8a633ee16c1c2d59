"""Random weights that are the same every time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["fill_constants", "generator", "seeded", "seeded_pipeline"]

_NOISE = 0.02


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the CPU's generator as if it had just been seeded; its state is put back at the end, in any case."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def seeded_pipeline(seed: int, make_pipeline: Callable[[], Any]) -> Any:
    """Return what a function makes while it draws from a seed: a pipeline, which from then on shows no progress."""
    with seeded(seed):
        pipeline = make_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generator(seed: int = 0) -> torch.Generator:
    """Return a fresh generator on the CPU."""
    return torch.Generator("cpu").manual_seed(seed)


def fill_constants(module: nn.Module) -> None:
    """Add noise to every parameter that has one value only.

    Biases of zeros and gains of ones are equal in all blocks: a block that ran with another's would not be noticed.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            first = parameter.flatten()[:2].tolist()
            if first[:1] == first[-1:] and parameter.numel() and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
