"""A rank's part of a block: which bytes it keeps, how they are gathered, and how the block becomes whole again.

A block is one flat buffer, its groups of tensors at multiples of 64 bytes, its length a multiple of 64 bytes a rank. It is cut into
chunks, and each chunk into one piece a rank: gathering a chunk writes the ranks' pieces one behind the other, in place. What a rank
keeps are its pieces, one behind the other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import attrs
import torch

from omni_offload.accelerator import PinnedMemory
from omni_offload.errors import OffloadStateError
from omni_offload.refusals import UNWATCHED_WEIGHTS
from omni_offload.residency.contents import digest_of
from omni_offload.residency.slots import Layout
from omni_offload.residency.tensors import ALIGNMENT, Placement, align, view_of

__all__ = ["Gatherer", "Shard", "chunks_of", "padded_to_ranks"]

_Result = TypeVar("_Result")


class Landing(Protocol):
    """A collective that may be under way."""

    def wait(self) -> object:
        """Let the current stream wait for it, or the host where it runs there."""


class Gatherer(Protocol):
    """The ranks that a block is spread over."""

    rank: int
    size: int
    chunk_bytes: int

    def gather_block(self, name: str, work: Callable[[], None]) -> None:
        """Do what gathers a block on the device. However it fails, nothing is gathered any more.

        Raises:
            OffloadStateError: The ranks are not in step any more.
        """

    def make_whole(self, name: str, work: Callable[[], _Result]) -> _Result:
        """Do what gathers a block on the host, which blocks. However it fails, nothing is gathered any more."""

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> Landing:
        """Gather a chunk on the device, into which this rank's piece was copied last."""

    def landed(self, landings: Sequence[Landing]) -> torch.Event:
        """Return an event that fires when chunks are there."""

    def collect(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Gather a chunk on the host, which blocks."""

    def lose(self, name: str) -> bool:
        """Whether a block cannot become whole again, since ranks are not in step any more; its name is noted then."""


def padded_to_ranks(nbytes: int, ranks: int) -> int:
    """Return the bytes of a flat buffer of which every rank keeps as much, in whole multiples of `ALIGNMENT`."""
    unit = ALIGNMENT * ranks
    return -(-nbytes // unit) * unit


def chunks_of(nbytes: int, ranks: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return offset and size of the chunks of a padded buffer; each is a multiple of `ALIGNMENT` bytes a rank, and at least that.

    Args:
        nbytes: Bytes of the buffer.
        ranks: How many ranks there are.
        chunk_bytes: Most bytes of a chunk.
    """
    unit = ALIGNMENT * ranks
    size = max(chunk_bytes // unit, 1) * unit
    return [(at, min(size, nbytes - at)) for at in range(0, nbytes, size)]


@attrs.frozen(eq=False)
class _Home:
    """Where a group of tensors lies in the flat buffer, and how on the host when it is whole: its address modulo `ALIGNMENT` stays."""

    at: int
    nbytes: int
    phase: int
    offsets: tuple[int, ...]


class Shard:
    """What one rank keeps of a block.

    Attributes:
        tensors: The block's tensors, in the order of the flat buffer.
        likes: Per tensor one on the meta device that has its shape.
        layout: How they lie in a slot; what is copied there are first this rank's pieces, then come the chunks.
        pieces: This rank's bytes, a tensor a chunk.
        empty: Per tensor what it is bound to while the block does not run.

    Args:
        placements: The block's tensors and where their bytes are; groups of one type are neighbours.
        gatherer: The ranks.
        hold: Gives host memory.
    """

    def __init__(
        self, placements: Sequence[Placement], gatherer: Gatherer, hold: Callable[[int], tuple[torch.Tensor, PinnedMemory | None]]
    ) -> None:
        self._gatherer = gatherer
        self._homes = [*_homes_of(placements)]
        self.tensors = tuple(entry.tensor for placement in placements for entry in placement.entries)
        self.likes = tuple(_like(tensor) for tensor in self.tensors)
        self.empty = tuple(_empty(like) for like in self.likes)
        self._names = tuple(entry.name for placement in placements for entry in placement.entries)
        ranks, end = gatherer.size, sum(align(home.nbytes) for home in self._homes)
        self._chunks = chunks_of(padded_to_ranks(end, ranks), ranks, gatherer.chunk_bytes)
        own = [(at + gatherer.rank * (size // ranks), size // ranks) for at, size in self._chunks]
        places = [home.at + offset for home in self._homes for offset in home.offsets]
        self.layout = Layout.of(zip(places, self.likes, strict=True), [*own, *self._chunks])
        self._digests = [digest_of(placement) for placement in placements]
        self._raw, self._region = hold(sum(size for _, size in own))
        self.pieces = torch.split_with_sizes(self._raw, [size for _, size in own]) if own else ()
        self._fill(placements, own)

    @property
    def nbytes(self) -> int:
        """Host bytes of this rank's pieces."""
        return self._raw.numel()

    @property
    def region(self) -> PinnedMemory | None:
        """The pinned memory that they lie in."""
        return self._region

    @property
    def pinned(self) -> bool:
        """Whether copies from them leave the host free."""
        return self._region is not None and self._region.pinned

    def _fill(self, placements: Sequence[Placement], own: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode(mode=False):
            for placement, home in zip(placements, self._homes, strict=True):
                raw = placement.raw()
                for piece, (at, size) in zip(self.pieces, own, strict=True):
                    first, end = max(at, home.at), min(at + size, home.at + home.nbytes)
                    if first < end:
                        piece[first - at : end - at].copy_(raw[first - home.at : end - home.at])

    def describe(self) -> Iterator[str]:
        """Yield a line for the chunks, and for each tensor: where it lies, what it is, and what stands for its values."""
        yield f"chunks {self._chunks}"
        digests = [digest for digest, home in zip(self._digests, self._homes, strict=True) for _ in home.offsets]
        for name, at, like, digest in zip(self._names, self.layout.offsets, self.likes, digests, strict=True):
            yield f"{name}: {like.dtype} {[*like.shape]} strides {[*like.stride()]} at {at}, values {digest}"

    def chunks(self, targets: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield of every chunk this rank's piece on the host, its place on the device, and the chunk's.

        Args:
            targets: The places of the layout in a slot.
        """
        count = len(self.pieces)
        return zip(self.pieces, targets[:count], targets[count:], strict=True)

    def make_whole(self) -> list[torch.Tensor]:
        """Gather the block on the host, which blocks; all ranks do so. Returns per tensor what it is to be bound to.

        Every group has memory of its own, at the address modulo `ALIGNMENT` that it had, so that results on the host stay the same.
        """
        with torch.inference_mode(mode=False):
            flat = torch.empty(sum(size for _, size in self._chunks), dtype=torch.uint8, device="cpu")
            for (at, size), piece in zip(self._chunks, self.pieces, strict=True):
                self._gatherer.collect(flat[at : at + size], piece)
            raws = []
            for home in self._homes:
                raw = torch.empty(home.nbytes + home.phase, dtype=torch.uint8, device="cpu")[home.phase :]
                raws.append(raw.copy_(flat[home.at : home.at + home.nbytes]))
        offsets = [(raw, offset) for raw, home in zip(raws, self._homes, strict=True) for offset in home.offsets]
        return [view_of(raw, offset, like) for (raw, offset), like in zip(offsets, self.likes, strict=True)]


def _homes_of(placements: Sequence[Placement]) -> Iterator[_Home]:
    at = 0
    for placement in placements:
        yield _Home(at, placement.nbytes, placement.start % ALIGNMENT if placement.device.type == "cpu" else 0, placement.offsets)
        at += align(placement.nbytes)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    like = like.conj() if tensor.is_conj() else like
    return torch._neg_view(like) if tensor.is_neg() else like  # noqa: SLF001  (the only way to set the bit)


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype, device="cpu")


def refuse_unfit(name: str, placements: Sequence[Placement]) -> None:
    """Refuse tensors of which nothing would tell that they were written while their block ran.

    Raises:
        OffloadStateError: There are such; all by name.
    """
    unfit = [entry.name for placement in placements for entry in placement.entries if entry.always_written()]
    if unfit:
        raise OffloadStateError(
            UNWATCHED_WEIGHTS.of(
                f"{name} is to be gathered from all ranks, and whether a block writes {', '.join(unfit)} cannot be told: they are "
                "inference tensors, or buffers of modules in training mode"
            )
        )
