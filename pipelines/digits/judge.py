"""Which digit an image shows, by its nearest neighbours among real handwritten digits."""

from functools import cache
from typing import Any

import torch
from torch.nn import functional

__all__ = ["TRAINING_DIGITS", "handwritten_digits", "judge"]

TRAINING_DIGITS = 1500
"""How many of the 1,797 digits are used for training and as neighbours; the others are held out."""

_NEIGHBOURS = 5


@cache
def handwritten_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's digits in a fixed random order.

    Returns:
        Images `[1797, 1, 8, 8]` in -1..1, and labels `[1797]`.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415  (only needed to train and to judge)

    data: Any = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    return images[order], torch.tensor(data.target, dtype=torch.long)[order]


def judge(images: torch.Tensor) -> torch.Tensor:
    """Return the digit that most of the five nearest real digits are.

    Args:
        images: `[B, C, H, W]` in 0..1, of 8 x 8 pixels or a multiple.

    Returns:
        Digits, `[B]`.
    """
    known, labels = handwritten_digits()
    known, labels = known[:TRAINING_DIGITS], labels[:TRAINING_DIGITS]
    grey = functional.interpolate(images.float().mean(1, keepdim=True) * 2 - 1, (8, 8), mode="area")
    distances = torch.cdist(grey.flatten(1), known.flatten(1))
    nearest = distances.topk(_NEIGHBOURS, largest=False).indices
    return torch.mode(labels[nearest], 1).values
