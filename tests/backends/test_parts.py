"""The small parts: inputs, order of use, lock, call stack, other libraries' offloading."""

import collections
import dataclasses
import threading
import types
import typing

import attrs
import pytest
import torch
from torch import nn

from omni_offload import OffloadStateError
from omni_offload.backends import lock as lock_module
from omni_offload.backends.calls import current_rotation, enter_call, leave_call
from omni_offload.backends.failures import first_error
from omni_offload.backends.foreign import refuse_foreign_offload
from omni_offload.backends.inputs import align_inputs, tensors_in
from omni_offload.backends.lock import CallLock
from omni_offload.backends.order import UseOrder

SIM = "sim:0"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


@attrs.frozen
class Attrs:
    x: torch.Tensor
    n: int = 3


class Listed(list):
    """A list of a class of its own."""


class Named(typing.NamedTuple):
    p: torch.Tensor
    q: int


class Output(collections.OrderedDict):
    """As transformers' and diffusers' outputs: attributes and items are one."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: [1, t],
        lambda t: (t, "a"),
        lambda t: {"a": {"b": t}},
        lambda t: Named(t, 1),
        Frozen,
        lambda t: collections.defaultdict(list, a=t),
        lambda t: collections.UserDict(a=t),
        lambda t: Output(a=t),
        lambda t: Listed([t, 2]),
        lambda t: collections.deque([1, t], maxlen=5),
        lambda t: collections.UserList([t]),
        lambda t: types.MappingProxyType({"a": [t], "b": 1}),
        Attrs,
    ],
    ids=[
        *("tensor", "list", "tuple", "dict", "named tuple", "dataclass", "defaultdict", "UserDict", "output", "list's subclass", "deque"),
        *("UserList", "mappingproxy", "attrs"),
    ],
)
def test_tensors_in_containers_are_moved(device, make):
    """Every tensor of a container arrives on the device in a container of the same type; the caller's is not changed."""
    tensor = torch.ones(2)
    value = make(tensor)
    moved = align_inputs(value, torch.device(SIM))
    assert type(moved) is type(value)
    assert [t.device for t in tensors_in(moved)] == [torch.device(SIM)]
    assert [t.device.type for t in tensors_in(value)] == ["cpu"]
    assert align_inputs(moved, torch.device(SIM)) is moved


def test_model_outputs_keep_attribute_and_item_one(device):
    """An ordered dictionary with attributes is moved in both."""
    moved = align_inputs(Output(a=torch.ones(2)), torch.device(SIM))
    assert moved.a is moved["a"]
    assert moved.a.device == torch.device(SIM)


def test_other_objects_pass_as_they_are(device):
    """What is no known container is not looked into."""

    class Cache:
        t = torch.ones(1)

    cache = Cache()
    for value in (cache, None, 3, "text", Frozen, {1, 2}, torch.Size([1])):
        assert align_inputs(value, torch.device(SIM)) is value
        assert list(tensors_in(value)) == []


def use(order, *names):
    order.begin()
    for name in names:
        order.use(name)


def test_the_declared_order_comes_first():
    """Before the first call has ended the declared order is expected."""
    order = UseOrder(["a", "b", "c"])
    use(order, "a")
    assert list(order.upcoming()) == ["b", "c"]
    assert (order.distance("c"), order.distance("a"), order.distance("x")) == (1, float("inf"), float("inf"))


def test_the_order_of_the_last_call_is_learned():
    """A call that went well teaches its order; repeated use in a row is one."""
    order = UseOrder(["a", "b", "c"])
    use(order, "c", "a", "a", "b", "a")
    order.end()
    use(order, "c")
    assert list(order.upcoming()) == ["a", "b", "a"]


def test_an_aborted_call_teaches_nothing():
    """Without `end`, the former order stands."""
    order = UseOrder(["a", "b", "c"])
    use(order, "c")
    use(order, "a")
    assert list(order.upcoming()) == ["b", "c"]


def test_after_an_aborted_call_the_next_begins_at_the_start():
    """What is expected next is counted from the first use again."""
    order = UseOrder(["a", "b", "a", "c"])
    use(order, "a", "b", "a")
    order.begin()
    order.use("a")
    assert list(order.upcoming()) == ["b", "a", "c"]


def test_an_empty_call_teaches_nothing():
    """A call that uses no component leaves the expectation."""
    order = UseOrder(["a", "b"])
    order.begin()
    order.end()
    assert list(order.upcoming()) == ["a", "b"]


def test_out_of_order_uses_are_found_again():
    """A step back, a skip and an unknown name leave a usable expectation."""
    order = UseOrder(["a", "b", "c", "d"])
    use(order, "c", "a")
    assert list(order.upcoming()) == ["b", "c", "d"]
    order.use("x")
    assert list(order.upcoming()) == ["b", "c", "d"]
    order.use("d")
    assert list(order.upcoming()) == []


def test_a_shorter_first_call_does_not_last():
    """A later, longer call corrects what a short one taught."""
    order = UseOrder(["a", "b", "c"])
    use(order, "a")
    order.end()
    use(order, "a", "b", "c")
    order.end()
    order.begin()
    assert list(order.upcoming()) == ["a", "b", "c"]


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_lock_is_reentrant_and_token_based():
    """A hold ends with its token, once; unknown tokens do nothing."""
    lock, one, two = CallLock("p"), object(), object()
    lock.acquire(one)
    lock.acquire(two)
    assert lock.after(one) == [two]
    assert lock.after(object()) == []
    lock.release(one)
    lock.release(one)
    assert (lock.in_call(), lock.holds(one), lock.holds(two)) == (True, False, True)
    lock.release(two)
    assert not lock.in_call()
    in_thread(lambda: lock.run(lambda: None)).join(5)


def test_the_lock_lets_others_wait():
    """Another thread's hold begins when the last token is given up."""
    lock, got = CallLock("p"), []
    lock.acquire("a")
    thread = in_thread(lambda: (lock.acquire("b"), got.append(lock.in_call()), lock.release("b")))
    assert not got
    lock.release("a")
    thread.join(5)
    assert got == [True]


def test_who_waits_is_told(monkeypatch):
    """A thread that waits goes on when the lock is free, not when it looks again by itself."""
    monkeypatch.setattr(lock_module, "_LOOK_AGAIN", 60.0)
    lock, waits, got = CallLock("p"), threading.Event(), []
    monkeypatch.setattr(lock, "_refuse_deadlock", lambda _: waits.set())
    lock.acquire("a")
    thread = in_thread(lambda: (lock.acquire("b"), got.append("b"), lock.release("b")))
    assert waits.wait(20)
    lock.release("a")
    thread.join(20)
    assert got == ["b"]


def test_a_brief_hold_is_no_call():
    """`run` excludes other threads, ends on an error, and is not a call."""
    lock = CallLock("p")
    assert lock.run(lock.in_call) is False
    with pytest.raises(ZeroDivisionError):
        lock.run(lambda: 1 / 0)
    in_thread(lambda: lock.run(lambda: None)).join(5)


def test_a_wait_that_cannot_end_is_refused():
    """Two threads that wait for each other: the second gets an error, the first goes on."""
    a, b, ready, done = CallLock("A"), CallLock("B"), threading.Event(), []

    def first():
        b.acquire(1)
        ready.set()
        a.acquire(2)
        done.append("first")
        a.release(2)
        b.release(1)

    def second():
        a.acquire(3)
        other = in_thread(first)
        ready.wait(5)
        while not _waits(a):
            pass
        with pytest.raises(OffloadStateError, match="a call on B waits for another thread's call, which waits for this thread"):
            b.acquire(4)
        a.release(3)
        other.join(5)
        done.append("second")

    in_thread(second).join(30)
    assert done == ["first", "second"]


def _waits(lock):
    from omni_offload.backends import lock as module

    return lock in module._WAITING.values()


def test_the_call_stack_forgets_what_an_interrupt_left():
    """Leaving a call leaves what was entered inside it; leaving twice is harmless; threads have stacks of their own."""
    first, second = object(), object()
    enter_call(1, first)
    enter_call(2, second)
    assert current_rotation() is second
    seen = []
    in_thread(lambda: seen.append(current_rotation())).join(5)
    assert seen == [None]
    leave_call(1)
    assert current_rotation() is None
    leave_call(1)
    leave_call(2)
    assert current_rotation() is None


def test_first_error_keeps_the_others_as_notes():
    """Nones are skipped; later errors are notes of the first."""
    assert first_error(None, None) is None
    one = first_error(None, ValueError("one"), KeyError("two"))
    assert isinstance(one, ValueError)
    assert "two" in one.__notes__[0]


class Plain:
    _dit_modules = ["inner.model", "gone", "inner.nothing"]
    _encoder_modules = [3]
    _vae_modules = []

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, 2))
        self.inner = types.SimpleNamespace(model=nn.Linear(2, 2), nothing=None)


def mark_accelerate(pipe):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.model[0], ModelHook())
    return r"model\.0 has accelerate's ModelHook"


def mark_group(pipe):
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        pipe.inner.model, onload_device=torch.device(SIM), offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=False
    )
    return r"inner\.model has diffusers' group offloading"


def mark_map(pipe):
    pipe.inner.model.hf_device_map = {"": 0}
    return r"inner\.model has a device_map"


def mark_pipeline(pipe):
    pipe.hf_device_map = {"model": 0}
    return r"the pipeline has a device_map"


@pytest.mark.parametrize("mark", [mark_accelerate, mark_group, mark_map, mark_pipeline])
def test_other_offloading_is_refused_by_name(device, mark):
    """What another library manages is named, with how to end it."""
    pipe = Plain()
    refuse_foreign_offload(pipe)
    text = mark(pipe)
    with pytest.raises(OffloadStateError, match=f"Plain, but other offloading is on: {text}.*remove_all_hooks"):
        refuse_foreign_offload(pipe)


def test_other_offloading_of_a_module_pipeline(device):
    """A pipeline that is a module is looked through as one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(2, 2)

    net = Net()
    refuse_foreign_offload(net)
    net.part.hf_device_map = {"": 0}
    with pytest.raises(OffloadStateError, match=r"Net\.part has a device_map"):
        refuse_foreign_offload(net)
