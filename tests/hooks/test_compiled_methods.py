"""Hooks around what torch.compile compiles: they run outside of it, once, and step aside while it looks."""

import pytest
import torch
from torch import _dynamo as dynamo
from torch import nn

from omni_offload import HookRegistry, ModelHook


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x):
        return x + 1


class Seen(ModelHook):
    def __init__(self):
        self.methods = []

    def pre_forward(self, module, method, args, kwargs):
        assert not torch.compiler.is_compiling()
        self.methods.append(method)
        return args, kwargs


@pytest.fixture
def hooked():
    """A module with a hook around every way to call it."""
    dynamo.reset()
    net, hook = Net(), Seen()
    net.compile(backend="eager", fullgraph=True)
    registry = HookRegistry.get_or_create(net)
    registry.register_hook("seen", hook, ("forward", "_call_impl", "_compiled_call_impl", "encode"))
    yield net, hook, registry
    registry.remove_hook("seen")
    assert {"forward", "_call_impl", "encode"}.isdisjoint(net.__dict__)
    dynamo.reset()


def test_a_compiled_call_runs_its_hooks_once(hooked):
    """The call is one graph, in which there is no hook; around it the hooks of `forward` run once."""
    net, hook, _ = hooked
    x = torch.randn(1, 2)
    for _ in range(2):
        assert torch.equal(net(x), net.linear(x))
    assert hook.methods == ["forward", "forward"]
    assert net.forward is net.__dict__["forward"]


def test_a_compiled_method_runs_its_hooks(hooked):
    """A method that is compiled by itself is compiled within its hooks."""
    net, hook, _ = hooked
    encode = torch.compile(net.encode, backend="eager")
    assert torch.equal(encode(torch.zeros(1)), torch.ones(1))
    assert hook.methods == ["encode"]


def test_a_forward_that_another_library_put_there_stays(hooked):
    """Another library's wrapper stands outside of ours: it is what the compiled call calls, and the hooks run."""
    net, hook, _ = hooked
    ours = net.forward
    net.forward = dynamo.disable(lambda x: ours(x) * 2)
    net.compile(backend="eager")
    x = torch.randn(1, 2)
    assert torch.equal(net(x), net.linear(x) * 2)
    assert set(hook.methods) == {"forward"}
    del net.forward


def test_uses_end_in_any_order(hooked):
    """While one of several uses runs, the wrapper is aside; after the last it stands where it stood."""
    net, _, _ = hooked
    wrapper = net.forward
    wrapper.step_aside(1)
    wrapper.step_aside(2)
    wrapper.come_back(1)
    assert "forward" not in net.__dict__
    wrapper.come_back(2)
    wrapper.come_back(2)
    assert net.__dict__["forward"] is wrapper


def test_what_came_meanwhile_stays(hooked):
    """A method that was put in the place of one aside is left alone, and a wrapper retired aside does not come back."""
    net, _, registry = hooked
    wrapper = net.forward
    wrapper.step_aside(1)
    net.forward = own = lambda x: x
    wrapper.come_back(1)
    assert net.forward is own
    del net.forward
    wrapper.step_aside(1)
    registry.remove_hook("seen")
    wrapper.come_back(1)
    assert "forward" not in net.__dict__
