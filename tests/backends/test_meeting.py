"""Ranks meet in a store before they make communicators, and agree on a name. Ranks are threads here."""

import concurrent.futures
import datetime as dt

import pytest
import torch.distributed as dist

from omni_offload.backends import meeting
from omni_offload.backends.meeting import meet

SOON, LATE = dt.timedelta(seconds=0.05), dt.timedelta(seconds=30)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request, tmp_path):
    """Each of the stores that a world is made with."""
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def together(store, offers=((), (), ())):
    """Let the ranks 3, 1 and 7 meet; returns the name that each got."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        names = [pool.submit(meet, store, (3, 1, 7), rank, offers=offer, limit=LATE) for rank, offer in zip((3, 1, 7), offers, strict=True)]
        return [name.result() for name in names]


def test_a_name_of_their_own(store):
    """All get one name, and another one each time; one that all of them offer, where there is such."""
    first, second = together(store), together(store)
    assert len({*first}) == len({*second}) == 1
    assert first != second
    assert together(store, [["a", "b", "c"], ["b", "a"], ["d", "a", "b"]]) == ["b"] * 3
    assert {*together(store, [["a"], ["b"], ["a"]])}.isdisjoint("ab")


def test_who_gives_up_stands_in_nobodys_way(store):
    """A rank that waited in vain says what it found, and takes back that it came; the next attempt is as if it had not been there."""
    with pytest.raises(TimeoutError, match="there is nothing of rank 1, rank 7"):
        meet(store, (3, 1, 7), 3, limit=SOON)
    for rank in (1, 7):
        with pytest.raises(TimeoutError, match="rank 3 has called nobody"):
            meet(store, (3, 1, 7), rank, limit=SOON)
    with pytest.raises(TimeoutError, match="rank 1, rank 7"):
        meet(store, (3, 1, 7), 3, limit=SOON)
    assert len({*together(store)}) == 1


def test_an_attempt_is_called_once(store):
    """Where the first rank fails after it has called the others, they are not there for its next attempt until they come again."""
    assert len({*together(store)}) == 1
    with pytest.raises(TimeoutError, match="there is nothing of rank 1, rank 7"):
        meet(store, (3, 1, 7), 3, limit=SOON)
    assert len({*together(store)}) == 1


def test_an_interrupt(store, monkeypatch):
    """Whoever is interrupted while it waits takes back that it came."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "_pause", interrupt)
        for rank in (1, 3):
            with pytest.raises(KeyboardInterrupt):
                meet(store, (3, 1), rank, limit=SOON)
    with pytest.raises(TimeoutError, match="there is nothing of rank 1"):
        meet(store, (3, 1), 3, limit=SOON)
