"""What stands for all bytes of a group of tensors, where ranks compare what they hold."""

import ctypes
import hashlib
from collections.abc import Iterator

import torch

from omni_offload.residency.tensors import Placement

__all__ = ["digest_of"]

#: Words of 8 bytes in a row, and bytes that are summed in one go: few enough for a cache.
_ROW = 1024
_PIECE = 1 << 20
_WORD = 8


def digest_of(placement: Placement) -> str:
    """Return what is equal on every rank where all bytes of a group are, and another where any of them differs.

    Bytes are read as integers, whose sums over rows and over columns are hashed: at the speed of memory, where a hash of all bytes takes
    seven times as long. A value that differs changes a sum; so do values that changed places. Reads everything; the host blocks.
    """
    digest = hashlib.sha256()
    with torch.inference_mode(mode=False):
        for raw in _dense(placement):
            for at in range(0, raw.numel(), _PIECE):
                digest.update(_bytes(_sums(raw[at : at + _PIECE])))
    return digest.hexdigest()[:16]


def _dense(placement: Placement) -> Iterator[torch.Tensor]:
    """Yield the bytes of a group; where none of its tensors fills it, those of each: what lies between them is nobody's."""
    tensors = [entry.tensor for entry in placement.entries]
    if any(tensor.numel() * tensor.element_size() == placement.nbytes for tensor in tensors):
        yield placement.raw()
        return
    for tensor in tensors:
        own = tensor.detach().contiguous()
        nbytes = own.numel() * own.element_size()
        raw = torch.empty(0, dtype=torch.uint8, device=own.device)
        yield raw.set_(own.untyped_storage(), own.storage_offset() * own.element_size(), (nbytes,), (1,)) if nbytes else raw


def _sums(piece: torch.Tensor) -> torch.Tensor:
    if piece.storage_offset() % _WORD:
        piece = piece.clone()  # words begin at multiples of their size
    whole = piece.numel() // _WORD * _WORD
    words = piece[:whole].view(torch.int64)
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    return torch.cat([torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :]]).view(torch.uint8), piece[whole:]])


def _bytes(raw: torch.Tensor) -> bytes:
    found = raw.cpu()
    return ctypes.string_at(found.data_ptr(), found.numel())
