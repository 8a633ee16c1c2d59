"""A wait that cannot end is refused: a call that waits for a thread which waits for the call."""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from omni_offload.backends.waits import awaited_by
from omni_offload.errors import OffloadStateError

LONG = 60


@pytest.fixture(autouse=True)
def _offloaded(pipe, device):
    with pipe.enable_omni_offload(device=device):
        yield


@pytest.fixture
def within(pipe, x):
    """Return a function that does something within a call, in a thread of its own, and returns what that made or raised."""

    def run(work):
        made = []

        def on_step(_, latents):
            if not made:
                made.append(work())
            return latents

        def call():
            pipe.on_step = on_step
            try:
                pipe(x)
            except BaseException as error:
                made.append(str(error))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive(), "the call hangs"
        return made[-1]

    return run


@pytest.fixture
def using(pipe, x):
    """Return a function that uses a component, and one that says what came of it."""
    caught = []

    def use():
        try:
            with torch.no_grad():
                pipe.vae.decode(x)
            caught.append(None)
        except OffloadStateError as error:  # its traceback holds device tensors
            caught.append(str(error))

    return use, caught


def test_a_joined_thread_is_refused(within, using):
    use, caught = using

    def work():
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join()
        return "joined"

    assert within(work) == "joined"
    assert "do not join a thread that uses a component" in caught[0]


@pytest.mark.parametrize("how", ["result", "exception"])
def test_a_future_that_is_waited_for_is_refused(within, using, how):
    use, caught = using

    def work():
        with ThreadPoolExecutor(1) as pool:
            return getattr(pool.submit(use), how)()

    assert within(work) is None
    assert "do not join a thread that uses a component" in caught[0]


def test_a_call_gets_the_error_of_the_future_that_it_waits_for(pipe, x, within):
    def work():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(pipe.vae.decode, x).result()

    assert "do not join a thread that uses a component" in within(work)


def test_a_thread_that_is_waited_for_through_another_is_refused(within, using):
    use, caught = using

    def work():
        def between():
            inner = threading.Thread(target=use, daemon=True)
            inner.start()
            inner.join()

        outer = threading.Thread(target=between, daemon=True)
        outer.start()
        outer.join()
        return "joined"

    assert within(work) == "joined"
    assert "do not join a thread that uses a component" in caught[0]


def test_a_wait_that_ends_by_itself_is_none_in_vain(within, using):
    """The thread takes its turn after the call."""
    use, caught = using
    threads = []

    def work():
        threads.append(threading.Thread(target=use, daemon=True))
        threads[0].start()
        threads[0].join(0.5)
        return list(caught)

    assert within(work) == []
    threads[0].join(LONG)
    assert caught == [None]


def test_a_thread_that_nobody_waits_for_takes_its_turn(within, using):
    use, caught = using
    threads = []

    def work():
        threads.append(threading.Thread(target=use, daemon=True))
        threads[0].start()

    assert within(work) is None
    threads[0].join(LONG)
    assert caught == [None]


def blocked(thread):
    """Wait until a thread waits for a future."""
    for _ in range(100_000):
        frame = sys._current_frames()[thread.ident]
        while frame is not None and frame.f_code is not Future.result.__code__:
            frame = frame.f_back
        if frame is not None:
            return
        thread.join(0.001)
    raise AssertionError("the thread does not get there")


def test_who_works_on_a_future_is_told_and_who_will_is_not():
    go, started, worker = threading.Event(), threading.Event(), []

    def work():
        worker.append(threading.get_ident())
        started.set()
        go.wait(LONG)

    with ThreadPoolExecutor(1) as pool:
        running, pending = pool.submit(work), pool.submit(int)
        assert started.wait(LONG)
        waiting = [threading.Thread(target=future.result, daemon=True) for future in (running, pending)]
        try:
            for thread in waiting:
                thread.start()
                blocked(thread)
            assert [awaited_by(thread.ident) for thread in waiting] == [worker[0], None]
        finally:
            go.set()
        for thread in waiting:
            thread.join(LONG)


def test_a_thread_that_runs_or_is_gone_waits_for_none():
    assert awaited_by(threading.get_ident()) is None
    assert awaited_by(-1) is None
