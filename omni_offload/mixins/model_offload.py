"""The pair of methods by which a pipeline offers model-level offload, over the core's rotation."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from omni_offload.backends import ENGINE_MARK, ModelLevelOffloadBackend, backend_of, is_asked, manage
from omni_offload.config import OffloadConfig, OffloadStrategy
from omni_offload.errors import OffloadStateError
from omni_offload.mixins.calls import wrap_calls
from omni_offload.mixins.interop import refuse_hidden_mixin, wrap_upstream_methods

__all__ = ["ModelCpuOffloadMixin"]

_CALLS = ("__call__", "forward")
_PAIR = ("enable_omni_model_cpu_offload", "disable_omni_model_cpu_offload")


class ModelCpuOffloadMixin:
    """Model-level offload for a pipeline that lists its components.

    Attributes:
        _offload_entry_points: Path of a component or submodule, and its methods that count as work besides `forward`, such as
            `{"vae": ("encode", "decode")}`; under "" methods of the pipeline itself that count as a call, such as `encode_prompt`.
    """

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the methods that count as a call, and a pair that the class wrote itself.

        Raises:
            OffloadConfigError: A method that counts as a call is a generator, a coroutine or no plain method; or the mixin stands behind
                the pipeline class.
        """
        super().__init_subclass__(**kwargs)
        refuse_hidden_mixin(cls, ModelCpuOffloadMixin)
        wrap_calls(cls, _calls_of(cls))
        wrap_upstream_methods(cls)
        for name, wrapper in zip(_PAIR, (_enable_through_backend, _disable_through_backend), strict=True):
            if name in cls.__dict__:
                setattr(cls, name, wrapper(cls.__dict__[name]))

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device,
        pin_memory: bool,
        use_hsdp: bool,
        offload_components: frozenset[str] | None = None,
    ) -> None:
        """Let the components take turns on the device.

        Args:
            device: Where they run.
            pin_memory: Whether host memory is pinned, so that copies do not block the host.
            use_hsdp: Whether parameters are sharded by HSDP (refused: there is no distributed strategy yet).
            offload_components: Kinds of components that take turns; None: all.

        Raises:
            OffloadStateError: Another offload is on, for the pipeline or a component.
            OffloadConfigError: The pipeline cannot be served so; nothing was touched.
        """
        if is_asked(self):
            raise OffloadStateError(
                f"{type(self).__name__} overrides enable_omni_model_cpu_offload and calls the inherited one, which would be a second "
                "owner; use ModuleResidency there, or do not override it"
            )
        self._wrap_late_calls()
        manage(self, _make_backend(device, pin_memory, use_hsdp, offload_components))

    def disable_omni_model_cpu_offload(self) -> None:
        """End the offload: whole weights on the host, nothing on the device, nothing pinned. Idempotent, and repairs."""
        backend = backend_of(self)
        if backend is not None and not is_asked(self):
            backend.disable()

    setattr(enable_omni_model_cpu_offload, ENGINE_MARK, True)

    def _wrap_late_calls(self) -> None:
        """Wrap the methods that came to count as a call since the class was defined: replaced in it, or declared late."""
        wrap_calls(type(self), _calls_of(self))

    def on_device(self, *components: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which components are on the device, for pipelines that use weights outside the entry points.

        Without enabled offload it does nothing. On an exception the components are let go and the exception goes on.

        Args:
            components: Declared paths.

        Raises:
            ComponentPathError: A name is not managed.
            OffloadStateError: The pipeline drives its offload itself.
        """
        backend = backend_of(self)
        if backend is None or not backend.enabled:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = backend.on_device(*components)
        return context

    @property
    def _execution_device(self) -> torch.device:
        """Where the pipeline works: the offload device while offload is enabled, else what the class says."""
        backend = backend_of(self)
        if backend is not None and backend.enabled:
            return backend.device
        device: torch.device = super()._execution_device  # type: ignore[misc]  # the pipeline's own, behind the mixin
        return device


def _calls_of(declaring: Any) -> dict[str, None]:
    """Return the names of the methods that count as a call; a declaration of another form is left to the checks."""
    points = declaring._offload_entry_points  # noqa: SLF001  (the mixin's own)
    declared = points.get("", ()) if isinstance(points, Mapping) else ()
    names = declared if isinstance(declared, list | tuple) else ()
    return dict.fromkeys((*_CALLS, *(name for name in names if isinstance(name, str))))


def _make_backend(device: Any, pin_memory: Any, use_hsdp: Any, components: frozenset[str] | None) -> ModelLevelOffloadBackend:
    config = OffloadConfig(strategy=OffloadStrategy.MODEL_LEVEL, pin_cpu_memory=pin_memory, use_hsdp=use_hsdp, components=components)
    return ModelLevelOffloadBackend(config, device)


def _enable_through_backend(own: Callable[..., None]) -> Callable[..., None]:
    """Let a hand-written enable be known to the framework also where it is called directly."""

    @functools.wraps(own)
    def enable(
        self: Any, *, device: torch.device, pin_memory: bool, use_hsdp: bool, offload_components: frozenset[str] | None = None
    ) -> None:
        if is_asked(self):
            own(self, device=device, pin_memory=pin_memory, use_hsdp=use_hsdp, offload_components=offload_components)
        else:
            manage(self, _make_backend(device, pin_memory, use_hsdp, offload_components))

    return enable


def _disable_through_backend(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def disable(self: Any) -> None:
        backend = backend_of(self)
        if is_asked(self) or backend is None:
            own(self)
        else:
            backend.disable()

    return disable
