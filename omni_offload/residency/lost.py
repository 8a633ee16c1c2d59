"""Weights that a rank cannot get back: their tensors are empty, and nobody may take them for weights."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from omni_offload.discovery import refuse_meta
from omni_offload.errors import OffloadStateError, listed

__all__ = ["note_lost", "refuse_weightless"]

_LOST = WeakIdKeyDictionary()


def note_lost(tensors: Iterable[torch.Tensor]) -> None:
    """Note that what tensors held is gone, until they hold something again."""
    for tensor in tensors:
        _LOST[tensor] = True


def refuse_weightless(modules: Mapping[str, nn.Module], *, pipeline: object) -> None:
    """Refuse modules whose weights were never loaded, or are lost.

    Args:
        modules: Path -> module.
        pipeline: Whose modules they are, for the message.

    Raises:
        OffloadStateError: There are such; the message names them.
    """
    refuse_meta(modules, pipeline=pipeline)
    names = [
        f"{path}.{name}"
        for path, module in modules.items()
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
        if tensor.numel() == 0 and tensor in _LOST
    ]
    if names:
        raise OffloadStateError(
            f"Offload of {type(pipeline).__name__} needs weights, and these were lost when the ranks that held parts of them came out of "
            f"step or were shut down: {listed(names)}; load their components again"
        )
