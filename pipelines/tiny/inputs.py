"""Inputs of calls, and outputs as tensors."""

from typing import Any

import numpy as np
import torch
from PIL import Image

__all__ = ["as_tensors", "miniature", "picture"]

_MINIATURE_AREA = 32 * 32


def picture(*, width: int = 32, height: int = 32) -> Image.Image:
    """Return a picture of three colour ramps."""
    row, column = np.mgrid[0:height, 0:width]
    ramps = (column * 255 // width, row * 255 // height, (row + column) * 255 // (height + width))
    return Image.fromarray(np.stack(ramps, -1).astype(np.uint8))


class _Ratio(float):
    """What a miniature's sides divided by each other make. It takes the place of every area that it is multiplied by."""

    def __rmul__(self, _area: object) -> float:  # the area that was meant
        return _MINIATURE_AREA * float(self)


class _Side(int):
    """A side of a miniature."""

    def __truediv__(self, other: Any) -> _Ratio:
        return _Ratio(int(self) / int(other))


class _Miniature(Image.Image):
    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = super().size
        return _Side(width), _Side(height)


def miniature() -> Image.Image:
    """Return a square picture for pipelines that scale every picture to an area of their own, of a million pixels or so.

    They compute the sides from that area, times the ratio of the picture's sides; of this picture they make 32 x 32 pixels.
    """
    made = picture()
    made.__class__ = _Miniature
    return made


def as_tensors(result: Any) -> list[torch.Tensor]:
    """Return what a call made: the tensors of the first field of its output; arrays and pictures become tensors."""
    value = next(iter(result.values())) if hasattr(result, "values") else result[0]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    return [torch.from_numpy(np.array(part)).float() / 255 if isinstance(part, Image.Image) else torch.as_tensor(part) for part in value]
