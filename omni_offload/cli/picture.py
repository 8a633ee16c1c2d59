"""Pictures and frames as one PNG that can be looked at."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from omni_offload.cli.problems import InputError

__all__ = ["check_file", "check_output", "default_output", "save_png", "tile"]

_SMALLEST_SIDE = 256
"""Pixels: smaller pictures are enlarged, each pixel as a square."""

_CHANNELS = (1, 3)


def default_output(name: str, prompt: str | None) -> Path:
    """Return where a picture goes that was given no place: `outputs/NAME-PROMPT.png`."""
    stem = "-".join(part for part in (Path(name).name, prompt) if part)
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in stem)
    return Path("outputs") / f"{safe[:80]}.png"


def check_output(path: Path, *, make_folder: bool) -> None:
    """Make sure that the picture can be written.

    Args:
        path: The file.
        make_folder: Whether its folder is made where it is missing.

    Raises:
        InputError: It cannot.
    """
    check_file(path, option="--output", suffix=".png", what="the picture", make_folder=make_folder)


def check_file(path: Path, *, option: str, suffix: str, what: str, make_folder: bool = False) -> None:
    """Make sure that a file can be written, by opening it; one that is there keeps its contents.

    Args:
        path: The file.
        option: What named it.
        suffix: What its name must end in: `.png`.
        what: What is written there.
        make_folder: Whether its folder is made where it is missing.

    Raises:
        InputError: It cannot.
    """
    if path.suffix.lower() != suffix:
        raise InputError(f"{what} is a {suffix[1:].upper()}, so {option} must end in {suffix}, not {path.name!r}")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; name a file in it")
    new = not path.exists()
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise InputError(f"{what} cannot be written to {path}: {error.strerror or error}") from error


def tile(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put all pictures and frames side by side, about as many in a row as in a column.

    Args:
        outputs: Values in 0..1: `[C, H, W]`, `[B, C, H, W]` or `[B, T, C, H, W]`, one or three channels.

    Returns:
        One picture of bytes, `[H, W, 3]`.

    Raises:
        InputError: A tensor is no picture.
    """
    frames = [frame for output in outputs for frame in _frames(output)]
    rows, columns = _grid(len(frames), videos=len(outputs[0]) if outputs[0].dim() == 5 else 0)
    height, width = frames[0].shape[-2:]
    sheet = torch.zeros(3, rows * height, columns * width)
    for index, frame in enumerate(frames):
        top, left = index // columns * height, index % columns * width
        sheet[:, top : top + height, left : left + width] = frame.expand(3, -1, -1)
    factor = (
        max(1, math.ceil(_SMALLEST_SIDE / min(height, width))) if len(frames) == 1 else max(1, _SMALLEST_SIDE // 2 // min(height, width))
    )
    enlarged = sheet.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    return (enlarged.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def save_png(picture: torch.Tensor, path: Path) -> None:
    """Write a picture of bytes, `[H, W, 3]`.

    Raises:
        InputError: The file cannot be written.
    """
    from PIL import Image  # noqa: PLC0415  (of the extra `pipelines`)

    try:
        Image.fromarray(picture.numpy()).save(path, format="PNG")
    except OSError as error:
        raise InputError(f"the picture cannot be written to {path}: {error.strerror or error}") from error


def _frames(output: torch.Tensor) -> list[torch.Tensor]:
    values = output.detach().float().cpu()
    if values.dim() < 3 or values.dim() > 5 or values.shape[-3] not in _CHANNELS or not values.numel():
        raise InputError(f"the pipeline made no picture: its output has the shape {list(output.shape)}")
    return list(values.reshape(-1, *values.shape[-3:]))


def _grid(count: int, *, videos: int) -> tuple[int, int]:
    """Return rows and columns: one row a video, else about a square."""
    if videos:
        return videos, count // videos
    columns = math.ceil(math.sqrt(count))
    return math.ceil(count / columns), columns
