"""The communicators of gather groups: made once all ranks are there, and used again by the next backend of the same ranks."""

import datetime as dt
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from omni_offload.backends.meeting import meet
from omni_offload.ranks import open_group

__all__ = ["Communicators", "World", "backend_of_group", "current_world"]

#: A gather waits for this part of the limit, so that the ranks still hear of one another afterwards why it did not come.
_SHARE = 3


@attrs.frozen(eq=False)
class Communicators:
    """What ranks gather over.

    Attributes:
        name: What all of them know it by.
        host: For tensors on the host.
        weights: For those on the device.
    """

    name: str
    host: dist.ProcessGroup
    weights: dist.ProcessGroup


class World:
    """The processes that there are, as one of them sees them, and the communicators that nobody uses now.

    It keeps all that it has made: where one is destroyed, a rank that is not done with it yet finds its peer gone.

    Args:
        rank: This process.
        store: What all processes see.
        backend: Says what runs collectives of the world on a device.
    """

    def __init__(self, rank: int, store: Store, backend: Callable[[torch.device], str]) -> None:
        self._rank = rank
        self._store = store
        self._backend = backend
        self._spare: dict[tuple[tuple[int, ...], dt.timedelta], dict[str, Communicators]] = {}
        self._made: list[dist.ProcessGroup] = []

    def take(self, ranks: Sequence[int], device: torch.device, *, limit: dt.timedelta) -> Communicators:
        """Return communicators of ranks which all ask for them now: those that all of them have still, or new ones. The host blocks.

        Args:
            ranks: The global ranks, in their order; this one is among them.
            device: The device of this one.
            limit: The longest wait for the others, and of a collective on the host; on the device a third of it.

        Raises:
            TimeoutError: Not all of them came.
        """
        store = PrefixStore(f"omni_offload/{'_'.join(map(str, ranks))}", self._store)
        spare = self._spare_of(ranks, limit)
        name = meet(store, ranks, self._rank, offers=[*spare], limit=limit)
        return spare.pop(name, None) or self._make(name, store, ranks, device, limit)

    def give_back(self, communicators: Communicators, ranks: Sequence[int], limit: dt.timedelta) -> None:
        """Leave communicators to whoever asks for the same next."""
        self._spare_of(ranks, limit)[communicators.name] = communicators

    def _spare_of(self, ranks: Sequence[int], limit: dt.timedelta) -> dict[str, Communicators]:
        return self._spare.setdefault((tuple(ranks), limit), {})

    def _make(self, name: str, store: Store, ranks: Sequence[int], device: torch.device, limit: dt.timedelta) -> Communicators:
        rank, size = ranks.index(self._rank), len(ranks)
        host = gloo_group(PrefixStore(f"{name}/host", store), rank, size, limit, limit=limit)
        self._made.append(host)
        if self._backend(device) == "gloo":
            weights = gloo_group(PrefixStore(f"{name}/weights", store), rank, size, limit, limit=limit / _SHARE)
        else:
            weights = open_group(ranks, limit=limit / _SHARE)
        self._made.append(weights)
        return Communicators(name, host, weights)


def gloo_group(store: Store, rank: int, size: int, wait: dt.timedelta, *, limit: dt.timedelta) -> dist.ProcessGroup:
    """Connect ranks over gloo. The world does not know the group: torch would name it by how many a process has made before.

    Args:
        store: For this group alone.
        rank: This one's place.
        size: How many there are.
        wait: The longest wait while they are connected.
        limit: The longest wait of a collective.
    """
    group = dist.ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, wait)
    backend._set_default_timeout(limit)  # noqa: SLF001  (there is no public way to make a group of a given name)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)  # noqa: SLF001  (as above)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # noqa: SLF001  (as above)
    return group


def current_world() -> World:
    """Return the world that `torch.distributed` has initialised; another one after it was initialised again."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    if group not in _WORLDS:
        _WORLDS.clear()
        _WORLDS[group] = World(dist.get_rank(), group.get_group_store(), lambda device: backend_of_group(group, device))
    return _WORLDS[group]


#: The world that there is, or was last.
_WORLDS: dict[dist.ProcessGroup, World] = {}


def backend_of_group(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of what runs a group's collectives on a device; gloo, where nothing is there for that device alone."""
    try:
        return str(group._get_backend(device).name())  # noqa: SLF001  (it has no public name)
    except RuntimeError:
        return "gloo"
