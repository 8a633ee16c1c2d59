"""What a pipeline may promise: the protocols, their predicates and the names of the kinds of components."""

from typing import ClassVar, Protocol, runtime_checkable

import torch
from typing_extensions import TypeIs

__all__ = [
    "DIT_COMPONENT",
    "TEXT_ENCODER_COMPONENT",
    "VAE_COMPONENT",
    "SupportsComponentDiscovery",
    "SupportsModelCpuOffload",
    "supports_component_discovery",
    "supports_model_cpu_offload",
]

DIT_COMPONENT = "dit"
TEXT_ENCODER_COMPONENT = "text_encoder"
VAE_COMPONENT = "vae"


@runtime_checkable
class SupportsModelCpuOffload(Protocol):
    """A pipeline that owns its model-level offload: the pair of methods that switch it on and off."""

    def enable_omni_model_cpu_offload(
        self,
        *,
        device: torch.device,
        pin_memory: bool,
        use_hsdp: bool,
        offload_components: frozenset[str] | None = None,
    ) -> None:
        """Enable model-level offload.

        Args:
            device: Where components run.
            pin_memory: Whether host memory is page-locked, for copies that do not block the host.
            use_hsdp: Whether parameters are sharded by HSDP.
            offload_components: Kinds of components that take turns; None: all of them.
        """

    def disable_omni_model_cpu_offload(self) -> None:
        """Disable it; weights end on the host."""


@runtime_checkable
class SupportsComponentDiscovery(Protocol):
    """A pipeline that lists its components as dotted paths.

    An implementer may leave `_resident_modules` out, which `isinstance` on a runtime protocol does not forgive: use
    `supports_component_discovery`.
    """

    _dit_modules: ClassVar[list[str]]
    _encoder_modules: ClassVar[list[str]]
    _vae_modules: ClassVar[list[str]]
    _resident_modules: ClassVar[list[str]] = []


def supports_component_discovery(obj: object) -> TypeIs[SupportsComponentDiscovery]:
    """Whether a pipeline (or its class) declares the three required lists of components.

    Args:
        obj: A pipeline or a pipeline class.

    Returns:
        True where `_dit_modules`, `_encoder_modules` and `_vae_modules` exist, whatever they hold: their content is
        checked by discovery, which raises, and not by a predicate, which would hide a mistake.
    """
    return all(hasattr(obj, name) for name in ("_dit_modules", "_encoder_modules", "_vae_modules"))


def supports_model_cpu_offload(obj: object) -> TypeIs[SupportsModelCpuOffload]:
    """Whether a pipeline has its own pair of methods for model-level offload.

    Args:
        obj: A pipeline.

    Returns:
        True where both methods of `SupportsModelCpuOffload` exist and are callable.
    """
    names = ("enable_omni_model_cpu_offload", "disable_omni_model_cpu_offload")
    return all(callable(getattr(obj, name, None)) for name in names)
