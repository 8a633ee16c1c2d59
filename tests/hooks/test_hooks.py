"""Hooks around a module's methods: run once, in order, left exactly once, and nothing left behind."""

import copy
import functools
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from omni_offload import HookRegistry, ModelHook
from omni_offload.errors import OffloadStateError
from omni_offload.hooks import generator_kind


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Run."""
        return self.linear(x) * scale

    def encode(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x * 3

    def fail(self):
        raise ValueError("own")

    def stream(self):
        yield 1

    async def later(self):
        return 1

    async def agen(self):
        yield 1

    @property
    def prop(self):
        return self.encode

    called = functools.partial(max, 7)


class Log(ModelHook):
    def __init__(self, log, name="", **failing):
        self.log, self.name, self.failing = log, name, failing

    def _note(self, what, method=""):
        self.log.append(f"{self.name}{what}:{method}" if method else f"{self.name}{what}")
        if what in self.failing:
            raise self.failing[what]

    def initialize_hook(self, module):
        self._note("init")

    def pre_forward(self, module, method, args, kwargs):
        self._note("pre", method)
        return args, kwargs

    def post_forward(self, module, method, output):
        self._note("post", method)
        return output

    def on_error(self, module, method, error):
        self._note(f"error({type(error).__name__})", method)
        if "on_error" in self.failing:
            raise self.failing["on_error"]

    def remove_hook(self, module):
        self._note("remove")


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def log():
    return []


def state(module):
    return set(module.__dict__)


def test_a_hook_runs_around_the_call_once_and_leaves_nothing_behind(net, log):
    before = state(net)
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    net(torch.ones(1, 2))
    net.forward(torch.ones(1, 2))
    registry.remove_hook("a")
    net(torch.ones(1, 2))
    assert log == ["init", "pre:forward", "post:forward", "pre:forward", "post:forward", "remove"]
    assert state(net) == before


def test_the_default_hook_changes_nothing(net):
    x = torch.ones(1, 2)
    expected = net(x)
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", ModelHook())
    assert torch.equal(net(x), expected)
    with pytest.raises(TypeError):
        net(nonsense=1)
    registry.remove_hook("a")


def test_arguments_and_results_are_what_the_hooks_return(net):
    class Change(ModelHook):
        def pre_forward(self, module, method, args, kwargs):
            return (args[0] * 2,), {**kwargs}

        def post_forward(self, module, method, output):
            return output + 100

    HookRegistry.get_or_create(net).register_hook("a", Change(), methods=("encode",))
    assert net.encode(5) == 111


def test_signature_name_and_documentation_are_kept(net, log):
    expected = inspect.signature(net.forward)
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    assert inspect.signature(net.forward) == expected
    assert (net.forward.__name__, net.forward.__doc__, net.forward.__module__) == ("forward", "Run.", __name__)


def test_a_method_without_a_signature_can_be_hooked(net, log):
    HookRegistry.get_or_create(net).register_hook("a", Log(log), methods=("called",))
    assert net.called(3) == 7
    assert log == ["init", "pre:called", "post:called"]


def test_later_hooks_run_inside_earlier_ones_on_their_methods_only(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."), methods=("forward", "encode", "forward"))
    registry.register_hook("b", Log(log, "b."))
    log.clear()
    net(torch.ones(1, 2))
    net.encode(1)
    assert log == ["a.pre:forward", "b.pre:forward", "b.post:forward", "a.post:forward", "a.pre:encode", "a.post:encode"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_hooks_can_be_removed_in_any_order(order, net, log):
    before = state(net)
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."))
    registry.register_hook("b", Log(log, "b."), methods=("forward", "encode"))
    registry.remove_hook(order[0])
    log.clear()
    net(torch.ones(1, 2))
    assert log == [f"{order[1]}.pre:forward", f"{order[1]}.post:forward"]
    registry.remove_hook(order[1])
    assert state(net) == before


def test_users_hooks_run_exactly_once(net, log):
    net.register_forward_pre_hook(lambda *_: log.append("user pre"))
    net.register_forward_hook(lambda *_: log.append("user post"))
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    log.clear()
    net(torch.ones(1, 2))
    assert log == ["user pre", "pre:forward", "post:forward", "user post"]


def test_a_forward_that_stood_on_the_instance_is_called_and_restored(net, log):
    original = net.forward

    def replaced(x):
        log.append("theirs")
        return original(x)

    net.forward = replaced
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    net(torch.ones(1, 2))
    registry.remove_hook("a")
    assert log == ["init", "pre:forward", "theirs", "post:forward", "remove"]
    assert net.__dict__["forward"] is replaced


def test_a_wrapper_that_another_library_wrapped_stays_inert_when_it_is_removed(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    ours = net.forward
    theirs = net.forward = functools.update_wrapper(functools.partial(ours), ours)
    net(torch.ones(1, 2))
    registry.remove_hook("a")
    log.clear()
    net(torch.ones(1, 2))
    assert net.__dict__["forward"] is theirs
    assert log == []
    net.forward = ours  # they put back what they found
    net(torch.ones(1, 2))
    HookRegistry.get_or_create(net).register_hook("b", Log(log))
    net(torch.ones(1, 2))
    assert log == ["init", "pre:forward", "post:forward"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copied_module_runs_its_own_code_without_hooks(clone, log):
    net = Net()
    HookRegistry.get_or_create(net).register_hook("a", Log([]), methods=("forward", "encode"))
    twin = clone(net)
    net.linear.weight.data.zero_()
    net.linear.bias.data.zero_()
    hook = HookRegistry.get_or_create(net).get_hook("a")
    hook.log.clear()
    assert twin(torch.ones(1, 2)).any()
    assert twin.encode(1) == 2
    assert hook.log == []
    assert HookRegistry.find(twin) is None
    HookRegistry.get_or_create(twin).register_hook("b", Log(log))
    twin(torch.ones(1, 2))
    assert log == ["init", "pre:forward", "post:forward"]


def test_a_shallow_copy_has_no_hooks(net, log):
    """It shares the module's weights and runs its own code; nothing in it refers to the module that it was made of."""
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    twin = copy.copy(net)
    log.clear()
    assert torch.equal(twin(torch.ones(1, 2)), net(torch.ones(1, 2)))
    assert log == ["pre:forward", "post:forward"]
    assert twin.linear is net.linear
    assert vars(twin).keys() == vars(Net()).keys()


def test_a_copy_keeps_what_another_library_put_on_the_instance(net, log):
    net.forward = functools.partial(torch.mul, other=5)
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    twin = copy.deepcopy(net)
    log.clear()
    assert twin(torch.ones(1)).item() == 5
    assert log == []


def test_a_method_that_the_class_hands_on_is_hooked_and_copied(log):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    outer = Outer()
    registry = HookRegistry.get_or_create(outer)
    registry.register_hook("a", Log(log), methods=("encode", "inner"))
    assert outer.encode(1) == 2
    outer.inner(torch.ones(1, 2))
    assert log == ["init", "pre:encode", "post:encode", "pre:inner", "post:inner"]
    twin = copy.deepcopy(outer)
    log.clear()
    assert twin.encode(1) == 2
    assert log == []
    registry.remove_hook("a")
    assert isinstance(outer.inner, Net)


def test_static_methods_can_be_hooked(net, log):
    HookRegistry.get_or_create(net).register_hook("a", Log(log), methods=("static",))
    assert net.static(2) == 6
    assert log == ["init", "pre:static", "post:static"]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("missing", "is not there"),
        ("training", "no method"),
        ("__call__", "looked up on the class"),
        ("prop", "a property"),
        ("stream", "a generator"),
        ("later", "a coroutine"),
        ("agen", "an async generator"),
    ],
)
def test_what_cannot_be_hooked_is_refused_and_nothing_is_installed(method, reason, net, log):
    before = state(net)
    registry = HookRegistry.get_or_create(net)
    with pytest.raises(OffloadStateError, match=rf"hook 'a' cannot .* Net: '{method}'.*{reason}"):
        registry.register_hook("a", Log(log), methods=("forward", method))
    registry.remove_hook("a")
    assert log == []
    assert state(net) == before


def test_all_methods_that_cannot_be_hooked_are_in_one_error(net, log):
    with pytest.raises(OffloadStateError, match=r"'missing'.*'stream'"):
        HookRegistry.get_or_create(net).register_hook("a", Log(log), methods=("missing", "stream"))


def test_a_decorated_generator_is_seen_through(net):
    assert generator_kind(functools.wraps(net.stream)(lambda: None)) == "a generator"
    assert generator_kind(net.forward) is None
    assert generator_kind(3) is None


def test_a_taken_name_is_refused(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    with pytest.raises(OffloadStateError, match="remove it first"):
        registry.register_hook("a", Log(log))


def test_the_registry_is_one_a_module_and_knows_its_hooks(net, log):
    registry = HookRegistry.get_or_create(net)
    assert HookRegistry.get_or_create(net) is registry is HookRegistry.find(net)
    hook = Log(log)
    registry.register_hook("a", hook)
    assert (registry.get_hook("a"), registry.get_hook("b")) == (hook, None)


def test_a_registry_without_hooks_leaves_with_the_next_removal(net):
    before = state(net)
    HookRegistry.get_or_create(net).remove_hook("unknown")
    assert state(net) == before


# ---- errors ----


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit()])
def test_an_error_of_the_method_leaves_every_hook_once_and_goes_on(error, net, log):
    registry = HookRegistry.get_or_create(net)
    net.encode = lambda: (_ for _ in ()).throw(error)
    registry.register_hook("a", Log(log, "a."), methods=("encode",))
    registry.register_hook("b", Log(log, "b."), methods=("encode",))
    with pytest.raises(type(error)) as caught:
        net.encode()
    assert caught.value is error
    name = type(error).__name__
    assert log[2:] == ["a.pre:encode", "b.pre:encode", f"b.error({name}):encode", f"a.error({name}):encode"]


def test_a_hook_whose_pre_forward_raises_is_left_too_and_those_inside_it_never_ran(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."))
    registry.register_hook("b", Log(log, "b.", pre=RuntimeError("p")))
    registry.register_hook("c", Log(log, "c."))
    with pytest.raises(RuntimeError, match="p"):
        net(torch.ones(1, 2))
    assert log[3:] == ["a.pre:forward", "b.pre:forward", "b.error(RuntimeError):forward", "a.error(RuntimeError):forward"]


def test_a_hook_whose_post_forward_raises_is_left_and_those_around_it_see_the_error(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."))
    registry.register_hook("b", Log(log, "b.", post=RuntimeError("p")))
    registry.register_hook("c", Log(log, "c."))
    with pytest.raises(RuntimeError, match="p"):
        net(torch.ones(1, 2))
    assert log[-4:] == ["c.post:forward", "b.post:forward", "b.error(RuntimeError):forward", "a.error(RuntimeError):forward"]


def test_a_second_error_in_on_error_is_a_note_of_the_first_and_the_hook_is_asked_twice(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."), methods=("fail",))
    registry.register_hook("b", Log(log, "b.", on_error=KeyError("second")), methods=("fail",))
    with pytest.raises(ValueError, match="own") as caught:
        net.fail()
    assert caught.value.__notes__ == ["Log.on_error failed too: KeyError('second')"] * 2
    assert log[-3:] == ["b.error(ValueError):fail", "b.error(ValueError):fail", "a.error(ValueError):fail"]


def test_an_interrupt_while_an_error_is_handled_wins_and_the_hook_is_left(net, log):
    class Interrupted(Log):
        def on_error(self, module, method, error):
            super().on_error(module, method, error)
            if isinstance(error, ValueError):
                raise KeyboardInterrupt

    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, "a."), methods=("fail",))
    registry.register_hook("b", Interrupted(log, "b."), methods=("fail",))
    with pytest.raises(KeyboardInterrupt) as caught:
        net.fail()
    assert isinstance(caught.value.__cause__, ValueError)
    assert log[-3:] == ["b.error(ValueError):fail", "b.error(KeyboardInterrupt):fail", "a.error(KeyboardInterrupt):fail"]


def test_a_hook_that_fails_to_initialise_installs_nothing(net, log):
    before = state(net)
    with pytest.raises(RuntimeError, match="i"):
        HookRegistry.get_or_create(net).register_hook("a", Log(log, init=RuntimeError("i")))
    assert state(net) == before


def test_a_second_error_while_an_installation_is_undone_is_a_note(net, log):
    before = state(net)
    with pytest.raises(RuntimeError, match="i") as caught:
        HookRegistry.get_or_create(net).register_hook("a", Log(log, init=RuntimeError("i"), remove=KeyError("r")))
    assert caught.value.__notes__ == ["removing hook 'a' failed too: KeyError('r')"]
    assert state(net) == before


def test_a_hook_that_fails_to_leave_is_removed_all_the_same(net, log):
    before = state(net)
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log, remove=RuntimeError("r")))
    with pytest.raises(RuntimeError, match="r"):
        registry.remove_hook("a")
    assert state(net) == before


def test_a_hook_removed_in_the_middle_of_a_call_is_still_left_once(net, log):
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    net.linear.register_forward_hook(lambda *_: registry.remove_hook("a"))
    net(torch.ones(1, 2))
    net(torch.ones(1, 2))
    assert log == ["init", "pre:forward", "remove", "post:forward"]


# ---- lifetimes ----


def test_a_hooked_module_that_nobody_holds_is_collected(log):
    net = Net()
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("a", Log(log))
    forward, gone = net.forward, weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    with pytest.raises(OffloadStateError, match="no longer exists"):
        forward(1)
    with pytest.raises(OffloadStateError, match="no longer exists"):
        copy.deepcopy(forward)
    with pytest.raises(OffloadStateError, match="no longer exists"):
        registry.register_hook("b", Log(log))
    registry.remove_hook("a")


# ---- copies ----

PLAIN = set(vars(nn.Module()))


class Stateful(Net):
    def __getstate__(self):
        return {**self.__dict__, "made": True}


class Opaque(Net):
    """A class whose state is no mapping."""

    def __getstate__(self):
        return [self.linear]

    def __setstate__(self, state):
        nn.Module.__init__(self)
        (self.linear,) = state


class CopiesItself(Net):
    """As torch.fx's graph modules do."""

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", [Net, Stateful, Opaque])
def test_a_pickled_module_is_the_one_without_hooks(cls, protocol, log):
    """Its bytes are the same with hooks and without, so that a process without this package loads them."""
    net = cls()
    before = pickle.dumps(net, protocol)
    HookRegistry.get_or_create(net).register_hook("a", Log(log), methods=("forward", "encode"))
    assert pickle.dumps(net, protocol) == before
    assert b"omni_offload" not in before
    for twin in (pickle.loads(pickle.dumps(net, protocol)), copy.deepcopy(net), copy.copy(net)):
        assert not {"forward", "encode", "__getstate__"} & vars(twin).keys()
        assert HookRegistry.find(twin) is None
        assert hasattr(twin, "made") is (cls is Stateful)
    HookRegistry.get_or_create(net).remove_hook("a")
    assert vars(net).keys() == PLAIN


def test_a_class_that_copies_itself_runs_its_own_code(log):
    """The copy's methods are the class's, and it can be copied and hooked in turn."""
    net = CopiesItself()
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    twin = copy.deepcopy(copy.deepcopy(net))
    log.clear()
    twin(torch.ones(1, 2))
    assert log == []
    assert pickle.loads(pickle.dumps(twin))(torch.ones(1, 2)).shape == (1, 2)
    HookRegistry.get_or_create(twin).register_hook("b", Log(log))
    twin(torch.ones(1, 2))
    assert log == ["init", "pre:forward", "post:forward"]


def test_what_another_library_put_there_is_copied_as_it_was(net, log):
    """A state of its own stays in charge, and a hooked method under another name is a value like any other."""
    net.__getstate__ = lambda: {"theirs": 1}
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    assert copy.copy(net).theirs == 1
    HookRegistry.get_or_create(net).remove_hook("a")
    assert net.__getstate__() == {"theirs": 1}
    del net.__getstate__
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    net.__dict__["alias"] = net.forward
    assert copy.copy(net).alias is net.alias


def test_a_captured_state_of_a_module_that_is_gone_is_refused(log):
    net = Net()
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    state = net.__getstate__
    del net
    gc.collect()
    with pytest.raises(OffloadStateError, match="no longer exists"):
        state()


def test_a_wrapper_copied_by_itself_is_what_it_stood_for(log):
    """A method of the class, another library's callable, or what the module hands on: called as the copied module's own."""
    net = Net()
    net.forward = abs
    HookRegistry.get_or_create(net).register_hook("a", Log(log))
    assert copy.deepcopy(net.forward) is abs
    handing_on = HandsOn()
    HookRegistry.get_or_create(handing_on).register_hook("a", Log(log), methods=("twice",))
    assert copy.deepcopy(handing_on.twice)(21) == 42
    assert [entry for entry in log if entry.startswith("pre")] == []


class HandsOn(torch.nn.Module):
    """Has a method that its class has not."""

    def __getattr__(self, name):
        return (lambda x: 2 * x) if name == "twice" else super().__getattr__(name)
