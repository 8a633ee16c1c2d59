"""Where the ranks of a group wait for one another in torch's store, before any of them makes a communicator.

A communicator leaves the addresses of its ranks in the store, under its name; one that is made anew under that name finds them, also
where those who left them have gone. So ranks meet first, and agree on a name that no other attempt has.

The first rank of a group calls the others. `here/<rank>` is written by that rank alone: the attempt that it makes, or nothing;
`call/<rank>` by the first one alone: which attempt it has called, and the name. An attempt that was called once is over.
"""

import datetime as dt
import json
import time
import uuid
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

__all__ = ["meet"]

#: Seconds between two looks at what the others have said.
_PAUSE = 0.005


def meet(store: Store, ranks: Sequence[int], rank: int, *, offers: Sequence[str] = (), limit: dt.timedelta) -> str:
    """Wait for the other ranks, and return a name that is the same for all: one that all of them offer, or a new one. The host blocks.

    Whoever gives up, for the limit or an interrupt, takes back that it came: it stands in nobody's way at the next attempt.

    Args:
        store: What all of them see, and nobody else writes to.
        ranks: The global ranks of the group, in its order.
        rank: This one.
        offers: Names of communicators that this rank has still.
        limit: How long it waits.

    Raises:
        TimeoutError: Not all of them came.
    """
    attempt, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    if rank == ranks[0]:
        return _call(store, ranks[1:], attempt, offers, deadline)
    try:
        store.set(f"here/{rank}", json.dumps([attempt, *offers]))
        while (called := _read(store, f"call/{rank}"))[:1] != [attempt]:
            _pause(deadline, f"rank {ranks[0]} has called nobody")
    except BaseException:
        store.set(f"here/{rank}", "[]")
        raise
    return called[1]


def _call(store: Store, others: Sequence[int], attempt: str, offers: Sequence[str], deadline: float) -> str:
    while missing := [rank for rank in others if not _attempt(store, rank)]:
        _pause(deadline, f"there is nothing of {', '.join(f'rank {rank}' for rank in missing)}")
    came = {rank: _attempt(store, rank) for rank in others}
    name = next((offer for offer in reversed(offers) if all(offer in said[1:] for said in came.values())), attempt)
    for rank, said in came.items():
        store.set(f"call/{rank}", json.dumps([*said[:1], name]))
    return name


def _attempt(store: Store, rank: int) -> list[str]:
    """Return the attempt that a rank makes now, and what it offers; nothing where it makes none."""
    said = _read(store, f"here/{rank}")
    return said if said[:1] != _read(store, f"call/{rank}")[:1] else []


def _read(store: Store, key: str) -> list[str]:
    found: list[str] = json.loads(store.get(key)) if store.check([key]) else []
    return found


def _pause(deadline: float, missing: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(missing)
    time.sleep(_PAUSE)
