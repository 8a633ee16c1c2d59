"""Random programs: the checker, the clock and the data agree with small references of their own."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_offload.testing import sim

STREAMS, BUFFERS, EVENTS, SIZE = 3, 2, 3, 2500
COPY, KERNEL = SIZE * 4 / 1e9, 3e-6

stream, buffer, event = (st.integers(0, n - 1) for n in (STREAMS, BUFFERS, EVENTS))
step = st.one_of(
    st.tuples(st.just("copy"), stream, buffer),
    st.tuples(st.just("read"), stream, buffer),
    st.tuples(st.just("spin"), stream, st.just(0)),
    st.tuples(st.just("record"), stream, event),
    st.tuples(st.just("wait"), stream, event),
    st.tuples(st.just("join"), stream, event),
    st.tuples(st.just("sync"), stream, st.just(0)),
)
programs = st.lists(step, max_size=25)
often = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


def run(device, program):
    """Run a program; return the buffers' contents and what each read saw."""
    streams = [torch.Stream(device) for _ in range(STREAMS)]
    events = [torch.Event(device) for _ in range(EVENTS)]
    buffers = [torch.zeros(SIZE, device=device) for _ in range(BUFFERS)]
    masters = [torch.full((SIZE,), float(i + 1)).pin_memory() for i in range(len(program))]
    targets = [torch.empty(SIZE, device=device) for _ in program]
    torch.accelerator.synchronize()
    start, reads = sim.clock(), []
    for i, (what, s, n) in enumerate(program):
        with streams[s]:
            if what == "copy":
                buffers[n].copy_(masters[i], non_blocking=True)
            elif what == "read":
                torch.add(buffers[n], 0, out=targets[i])
                reads.append(targets[i])
            elif what == "spin":
                sim.spin(KERNEL)
            elif what == "record":
                events[n].record()
            elif what == "wait":
                streams[s].wait_event(events[n])
            elif what == "join":
                events[n].synchronize()
            else:
                streams[s].synchronize()
    torch.accelerator.synchronize()
    return [x[0].item() for x in (*buffers, *reads)], sim.clock() - start


def has_race(program):
    """Order every two operations by reachability, from scratch."""
    before, last, recorded, host = [], [set() for _ in range(STREAMS)], [set() for _ in range(EVENTS)], set()
    uses = []
    for what, s, n in program:
        if what in ("copy", "read", "spin"):
            seen = last[s] | host
            before.append(seen)
            uses.append((what, n))
            last[s] = seen | {len(uses) - 1}
        elif what == "record":
            recorded[n] = last[s] | host
        elif what == "wait":
            last[s] = last[s] | recorded[n]
        elif what == "join":
            host |= recorded[n]
        else:
            host |= last[s]
    return any(
        "spin" not in (uses[i][0], uses[j][0]) and uses[i][1] == uses[j][1] and "copy" in (uses[i][0], uses[j][0]) and i not in before[j]
        for j in range(len(uses))
        for i in range(j)
    )


def duration(program):
    """Schedule by hand: streams in order, one copy engine, one compute engine, no time for launches."""
    streams, events, host, copy, compute = [0.0] * STREAMS, [0.0] * EVENTS, 0.0, 0.0, 0.0
    for what, s, n in program:
        if what == "copy":
            copy = streams[s] = max(streams[s], host, copy) + COPY
        elif what in ("spin", "read"):
            compute = streams[s] = max(streams[s], host, compute) + (KERNEL if what == "spin" else 0)
        elif what == "record":
            events[n] = max(streams[s], host)
        elif what == "wait":
            streams[s] = max(streams[s], events[n])
        elif what == "join":
            host = max(host, events[n])
        else:
            host = max(host, streams[s])
    return max(host, *streams)


def in_order(program):
    """What the program computes if every operation is done at once."""
    buffers, reads = [0.0] * BUFFERS, []
    for i, (what, _, n) in enumerate(program):
        if what == "copy":
            buffers[n] = float(i + 1)
        elif what == "read":
            reads.append(buffers[n])
    return [*buffers, *reads]


@often
@given(programs)
def test_races_and_times_of_random_programs(device, program):
    sim.configure(mode="virtual", races="record", h2d_gbps=1.0, launch=0.0, memory_gbps=0.0)
    sim.reset_races()
    made, took = run(device, program)
    assert bool(sim.races()) == has_race(program)
    assert abs(took - duration(program)) < 1e-9
    assert made == in_order(program)


@settings(often, max_examples=60)
@given(programs)
def test_data_of_random_programs_without_races(device, program):
    sim.configure(mode="threads", races="record", h2d_gbps=0.05)
    sim.reset_races()
    made, _ = run(device, program)
    assert bool(sim.races()) == has_race(program)
    if not has_race(program):
        assert made == in_order(program)
