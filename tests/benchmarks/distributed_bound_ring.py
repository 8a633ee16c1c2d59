"""Rings of blocks that are gathered from W ranks, run by the distributed layerwise backend on the simulated device in virtual time.

One process is one rank. The others are not there: the world is torch's `fake` backend, which gives back what this rank has, and the
simulated device takes the time that a gather of W ranks takes. So outputs are not looked at here; `distributed_bound_ranks.py` runs
the same ring with real processes, and compares them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from layerwise_bound_ring import Ring
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

from omni_offload import DiffusionParallelConfig, DLOTransfer, LayerOptions, OffloadConfig, OffloadStrategy
from omni_offload.backends import DistributedLayerwiseOffloadBackend, communicators, manage
from omni_offload.ranks import open_group
from omni_offload.schedule import BlockCost
from omni_offload.testing import sim

__all__ = ["BLOCK_BYTES", "CHUNKS", "Links", "RanksRing", "absent_ranks"]

#: What a block takes here; the links are as slow as its copies and gathers are long. And in how many pieces it is gathered.
BLOCK_BYTES, CHUNKS = 64 << 10, 8


@attrs.frozen(kw_only=True)
class Links:
    """What connects a rank.

    Attributes:
        ranks: How many ranks there are.
        host: Bytes a second from a rank's host to its device.
        peer: Bytes a second between a rank and the others, in each direction.
    """

    ranks: int
    host: float
    peer: float

    @classmethod
    def of(cls, ranks: int, *, ratio: float, seconds: float, transfer: DLOTransfer = DLOTransfer.ALLGATHER) -> "Links":
        """Return links on which a block takes so long, the one to the peers so many times as fast as the one to the host."""
        like = cls(ranks=ranks, host=1.0, peer=ratio)
        rate = like.seconds(BLOCK_BYTES, transfer) / seconds
        return cls(ranks=ranks, host=rate, peer=ratio * rate)

    def seconds(self, nbytes: float, transfer: DLOTransfer) -> float:
        """Return what a block of so many bytes takes where copies and gathers overlap."""
        if transfer is DLOTransfer.RANK_LOCAL:
            return nbytes / self.host
        return max(nbytes / (self.ranks * self.host), nbytes * (self.ranks - 1) / (self.ranks * self.peer))


class RanksRing(Ring):
    """Equal blocks; the world of their ranks has to be there when they run.

    Args:
        blocks: How many.
        compute: Seconds of one.
        links: The links; a block has `BLOCK_BYTES` bytes.
        transfer: How blocks come to the device.
        chunks: In how many pieces a block is gathered.
    """

    def __init__(
        self, blocks: int, *, compute: float, links: Links, transfer: DLOTransfer = DLOTransfer.ALLGATHER, chunks: int = CHUNKS
    ) -> None:
        self.links, self._transfer, self._chunks = links, transfer, chunks
        super().__init__([BlockCost(compute, links.seconds(BLOCK_BYTES, transfer), BLOCK_BYTES)] * blocks)

    @override
    def _links(self) -> Mapping[str, float]:
        return {"h2d_gbps": self.links.host / 1e9, "collective_gbps": self.links.peer / 1e9}

    @override
    @contextlib.contextmanager
    def _enabled(self, device: torch.device, *, residents: int = 0, slots: int = 3) -> Iterator[DistributedLayerwiseOffloadBackend]:
        config = OffloadConfig(
            strategy=OffloadStrategy.DISTRIBUTED_LAYERWISE,
            layer_options={"dit": LayerOptions(weight_transfer=self._transfer, resident_layers=residents)},
            parallel_config=DiffusionParallelConfig(data_parallel_size=self.links.ranks),
            slots=slots,
        )
        backend = DistributedLayerwiseOffloadBackend(config, device)
        backend.chunk_bytes = BLOCK_BYTES // self._chunks
        manage(self._pipeline, backend)
        try:
            yield backend
        finally:
            backend.disable()


@contextlib.contextmanager
def absent_ranks(size: int) -> Iterator[None]:
    """Make a world of which this process is the only rank that is there; communicators on the host are made up too."""
    sim.install()
    dist.init_process_group("cpu:fake,sim:fake", rank=0, world_size=size, store=FakeStore())

    def open_fake(*_: Any, **__: Any) -> dist.ProcessGroup:
        return open_group(range(size))

    try:
        with mock.patch.multiple(communicators, meet=lambda *_, **__: "a name", gloo_group=open_fake):
            yield
    finally:
        dist.destroy_process_group()
