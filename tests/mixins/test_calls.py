"""What counts as a call."""

import dataclasses
import functools
import inspect

import attrs
import pytest
import torch
from torch import nn

from omni_offload import ComponentPathError, OffloadConfigError, OmniOffloadMixin
from omni_offload.backends.base import OffloadBackend
from omni_offload.mixins import ModelCpuOffloadMixin
from omni_offload.testing import sim


class Base:
    """As a library's pipeline: no mixin."""

    def __init__(self):
        self.net = nn.Linear(8, 8).requires_grad_(False)

    @torch.no_grad()
    def __call__(self, x, *, scale: float = 1.0):
        """Doc."""
        return self.net(x) * scale

    def encode_prompt(self, x):
        return self.net(x)


class Pipe(OmniOffloadMixin, Base):
    _dit_modules = ["net"]
    _encoder_modules = []
    _vae_modules = []
    _offload_entry_points = {"": ("encode_prompt",)}


@pytest.fixture
def calls(monkeypatch, device):
    """Count the calls that the backend sees: how deep each was when it began."""
    from omni_offload import ModelLevelOffloadBackend

    seen = []
    begin = ModelLevelOffloadBackend.begin_call

    def counted(self, token):
        begin(self, token)
        seen.append(len(self._rotation.calls))

    monkeypatch.setattr(ModelLevelOffloadBackend, "begin_call", counted)
    return seen


def run(pipe, call, calls):
    with pipe.enable_omni_offload(device="sim"):
        out = call(pipe).cpu()
        assert sim.allocated() == 0
    assert torch.equal(call(pipe), out)
    return calls


X = torch.ones(2, 8)


def test_signature_and_doc_are_kept():
    """A wrapped method looks as it did."""
    assert inspect.signature(Pipe.__call__) == inspect.signature(Base.__call__)
    assert Pipe.__call__.__doc__ == "Doc."
    assert Pipe.encode_prompt.__name__ == "encode_prompt"


def test_call_and_declared_methods_are_calls(calls):
    """`__call__` and the methods under "" begin a call each."""
    assert run(Pipe(), lambda p: p(X, scale=2.0), calls) == [1]
    assert run(Pipe(), lambda p: p.encode_prompt(X), calls) == [1, 1]


def test_a_subclass_override_is_a_call_once_nested(calls):
    """An override that calls super() is the outermost call; the inherited one is nested in it."""

    class Sub(Pipe):
        def __call__(self, x):
            return super().__call__(self.encode_prompt(x))

    assert run(Sub(), lambda p: p(X), calls) == [1, 2, 2]


def test_an_override_that_copies_the_wrapper_is_wrapped(calls):
    """functools.wraps copies attributes; an override decorated so is a call all the same."""

    class Sub(Pipe):
        @functools.wraps(Pipe.__call__)
        def __call__(self, *args, **kwargs):
            return self.net(super().__call__(*args, **kwargs))

    assert run(Sub(), lambda p: p(X), calls) == [1, 2]


def test_wrapping_keeps_the_method_resolution_order(calls):
    """A mixin that a subclass puts between stays in line."""

    class Between(Base):
        def __call__(self, x):
            return super().__call__(x) + 1

    class Sub(Pipe, Between):
        pass

    pipe = Sub()
    assert torch.equal(pipe(X), pipe.net(X) + 1)
    assert run(pipe, lambda p: p(X), calls) == [1]


def test_what_came_to_count_as_a_call_later(calls):
    """A method that is replaced on the class, or declared, after the class was defined is a call once offload is enabled."""

    class Late(Pipe):
        def upscale(self, x):
            return self.net(x)

    Late.__call__ = lambda self, x: self.upscale(x)
    pipe = Late()
    assert run(pipe, lambda p: p(X), calls) == [1]
    pipe._offload_entry_points = {"": ("upscale",)}
    assert run(pipe, lambda p: p.upscale(X), calls) == [1, 1]
    assert run(pipe, lambda p: p(X), calls) == [1, 1, 1, 2]


@pytest.mark.parametrize("remake", [attrs.define, dataclasses.dataclass(slots=True)], ids=["attrs", "dataclass"])
def test_a_class_that_is_made_anew(calls, remake):
    """What gives a class slots makes another one of it: the calls that it inherits are calls of that."""

    @remake
    class Slotted(OmniOffloadMixin, Base):
        _dit_modules = ["net"]
        _encoder_modules = []
        _vae_modules = []
        _offload_entry_points = {"": ("encode_prompt",)}
        net: nn.Module

    class Sub(Slotted):
        pass

    for cls in (Slotted, Sub):
        calls.clear()
        assert run(cls(Base().net), lambda p: p(X), calls) == [1]
    assert run(Slotted(Base().net), lambda p: p.encode_prompt(X), calls) == [1, 1]


@pytest.mark.parametrize("declared", [None, {"": "upscale"}, {"": (3,)}, {"": 3}], ids=str)
def test_a_late_declaration_of_another_form_is_refused_by_name(device, declared):
    """By the check of all declarations, with the others."""
    pipe = Pipe()
    pipe._offload_entry_points = declared
    with pytest.raises(OffloadConfigError, match="_offload_entry_points"):
        pipe.enable_omni_offload(device="sim")


def test_the_mixin_stands_before_the_pipeline():
    """Behind one that says where it works it would be passed over; one of its kind before it, or one that is never called, is right."""

    class Elsewhere(Base):
        _execution_device = torch.device("cpu")

    class Part:
        _execution_device = torch.device("cpu")

    with pytest.raises(OffloadConfigError, match=r"has .*Elsewhere before OmniOffloadMixin.*`class Wrong\(OmniOffloadMixin, Elsewhere\)`"):
        type("Wrong", (Elsewhere, OmniOffloadMixin), {})
    with pytest.raises(OffloadConfigError, match=r"`class Wrong\(Pipe, Elsewhere\)`"):
        type("Wrong", (Elsewhere, Pipe), {})
    for bases in ((OmniOffloadMixin, Elsewhere), (Base, OmniOffloadMixin), (Part, OmniOffloadMixin, Base)):
        type("Right", bases, {})
    type("Right", (OmniOffloadMixin, Elsewhere), {"_execution_device": None})


def test_a_module_pipeline(calls):
    """Of a pipeline that is a module, `__call__` and the forward inside it are one call."""

    class Net(OmniOffloadMixin, nn.Module):
        _dit_modules = ["net"]
        _encoder_modules = []
        _vae_modules = []

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            return self.net(x)

    pipe = Net()
    assert run(pipe, lambda p: p(X), calls) == [1, 2]
    assert run(pipe, lambda p: p.forward(X), calls)[2:] == [1]
    with pipe.enable_omni_offload(device="sim"):
        assert pipe._execution_device == torch.device("sim:0")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (staticmethod(lambda x: x), "staticmethod"),
        (property(lambda _: 1), "property"),
        (classmethod(lambda _: 1), "classmethod"),
    ],
)
def test_what_is_no_plain_method_is_refused(method, text):
    """A static method, class method or property cannot be a call."""
    with pytest.raises(OffloadConfigError, match=f"Bad.encode counts as a call but is a {text}, not a plain method"):
        type("Bad", (ModelCpuOffloadMixin,), {"_offload_entry_points": {"": ("encode",)}, "encode": method})


def test_generators_and_coroutines_are_refused():
    """A call whose work is not done when it returns is refused when the class is defined."""
    with pytest.raises(OffloadConfigError, match="__call__ counts as a call but is a generator"):

        class Steps(OmniOffloadMixin, Base):
            def __call__(self, x):
                yield x

    with pytest.raises(OffloadConfigError, match="counts as a call but is a coroutine"):

        class Later(OmniOffloadMixin, Base):
            async def __call__(self, x):
                return x


def test_missing_methods_are_refused_by_name():
    """A declared method that does not exist is named when the class is defined; the smaller mixin leaves it out."""
    with pytest.raises(ComponentPathError, match="no_such"):
        type("Missing", (Pipe,), {"_offload_entry_points": {"": ("no_such",)}})
    type("Missing", (ModelCpuOffloadMixin,), {"_offload_entry_points": {"": ("no_such",)}})


@pytest.mark.parametrize("points", [3, {"": "encode_prompt"}, {"net": "forward"}])
def test_wrong_declarations_are_refused_by_name(points):
    """Entry points of the wrong form are a configuration error when the class is defined."""
    with pytest.raises(OffloadConfigError, match="_offload_entry_points"):
        type("Bad", (OmniOffloadMixin, Base), {"_offload_entry_points": points})


def test_the_smaller_mixin_checks_what_it_reads():
    """The model-level mixin alone does not stumble over a declaration of the wrong form."""
    type("Odd", (ModelCpuOffloadMixin,), {"_offload_entry_points": None})


def test_a_refused_call_is_not_begun(device, monkeypatch):
    """An error of begin_call reaches the caller, and the next call works."""
    pipe = Pipe()
    with pipe.enable_omni_offload(device="sim") as backend:
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "begin_call", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pipe(X)
        assert pipe(X).device.type == "sim"
    assert isinstance(backend, OffloadBackend)


def test_a_call_of_a_pipeline_that_is_not_offloaded(calls):
    """Without a backend a wrapped method is the method."""
    assert torch.equal(Pipe()(X, scale=0.0), torch.zeros(2, 8))
    assert calls == []
