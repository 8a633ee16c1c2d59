"""The one file that knows diffusers' pipelines: what must be refused or corrected while offload is enabled.

Nothing of diffusers is imported: a method is wrapped where a class inherits one of that name.
"""

import functools
import inspect
import json
import weakref
from collections.abc import Callable
from typing import Any

import torch

from omni_offload.backends import backend_of
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.mixins.calls import bound_method

__all__ = ["upstream_class", "wrap_upstream_methods"]

_THEIR_OFFLOAD = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")
_MOVES = ("cuda", "xpu", "to_empty")
_FUSES = ("fuse_lora", "unfuse_lora")
#: What these call on every layer with an adapter, where peft writes the layer's weight.
_MERGES = ("merge", "unmerge")

_WRAPPERS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

_Bind = Callable[[Any], Callable[..., Any]]


def upstream_class(cls: type) -> type | None:
    """Return the diffusers pipeline class that a class extends; None where there is none, or only the base of all pipelines."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "diffusers" and "DiffusionPipeline" in {b.__name__ for b in base.__mro__[1:]}:
            return base
    return None


def refuse_hidden_mixin(cls: type, mixin: type) -> None:
    """Refuse a class in which the pipeline stands before the mixin: it would put its noise where its components are, on the host.

    Args:
        cls: A pipeline class that has just been defined.
        mixin: Whose `_execution_device` has to be in force.

    Raises:
        OffloadConfigError: The pipeline's own is; the message has the order that is right.
    """
    before = [base for base in cls.__mro__[: cls.__mro__.index(mixin)] if not issubclass(base, mixin)]
    hiding = next((base for base in before if "_execution_device" in vars(base)), None)
    called = [base for base in before if any("__call__" in vars(one) for one in base.__mro__)]
    pipeline = next((base for base in called if hiding is not None and issubclass(base, hiding)), None)
    if pipeline is not None:
        name = next(base.__name__ for base in cls.__bases__ if issubclass(base, mixin))
        raise OffloadConfigError(
            f"{cls.__qualname__} has {pipeline.__qualname__} before {name}, so that it would work on that one's device, the host, and not "
            f"on the offload device; write `class {cls.__name__}({name}, {pipeline.__name__})`"
        )


def wrap_upstream_methods(cls: type) -> None:
    """Wrap the inherited methods that would act against enabled offload, each once."""
    wrappers = {
        **dict.fromkeys((*_THEIR_OFFLOAD, *_MOVES), _refuse),
        **dict.fromkeys(_FUSES, _fuse_on_device),
        "to": _keep_device,
        "to_json_string": _write_upstream_name,
    }
    for name, wrapper in wrappers.items():
        function = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        if inspect.isfunction(function) and function not in _WRAPPERS:
            wrapped = wrapper(function, bound_method(cls, name, function))
            _WRAPPERS.add(wrapped)
            setattr(cls, name, wrapped)


def _enabled(pipeline: Any) -> bool:
    backend = backend_of(pipeline)
    return backend is not None and backend.enabled


def _refuse(function: Callable[..., Any], bind: _Bind) -> Callable[..., Any]:
    @functools.wraps(function)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled(self):
            raise OffloadStateError(
                f"{type(self).__name__}.{function.__name__} was called while omni offload is enabled; call disable_omni_offload() first"
            )
        return bind(self)(*args, **kwargs)

    return refused


def _keep_device(function: Callable[..., Any], bind: _Bind) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled(self) and _names_device(args, kwargs):
            raise OffloadStateError(
                f"{type(self).__name__}.to(device) was called while omni offload moves its components; call disable_omni_offload() first "
                "(.to(dtype) is possible)"
            )
        return bind(self)(*args, **kwargs)

    return to


def _fuse_on_device(function: Callable[..., Any], bind: _Bind) -> Callable[..., Any]:
    """Let adapters be fused on the device, one component after the other: on the host the sums round in another way."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def fuse(self: Any, *args: Any, **kwargs: Any) -> None:
        backend = backend_of(self)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        components = given.arguments.get("components")
        if backend is None or not backend.enabled or not components:
            bind(self)(*args, **kwargs)
            return
        for component in components:
            given.arguments["components"] = [component]
            with backend.writing(component, _MERGES):
                bind(self)(*given.args[1:], **given.kwargs)

    return fuse


def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, kwargs.get("device"), kwargs.get("torch_device"), kwargs.get("other"), kwargs.get("tensor"))
    return any(isinstance(value, str | int | torch.device | torch.Tensor) and not isinstance(value, bool) for value in values)


def _write_upstream_name(function: Callable[..., str], bind: _Bind) -> Callable[..., str]:
    @functools.wraps(function)
    def to_json_string(self: Any, *args: Any, **kwargs: Any) -> str:
        text: str = bind(self)(*args, **kwargs)
        upstream = upstream_class(type(self))
        if upstream is None:
            return text
        data = json.loads(text)
        data["_class_name"] = upstream.__name__
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    return to_json_string
