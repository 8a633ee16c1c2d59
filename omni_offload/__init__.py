"""Pipelines own their offloading: run diffusion pipelines on accelerators smaller than their weights."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_offload.backends import (
        DistributedLayerwiseOffloadBackend,
        LayerwiseOffloadBackend,
        ModelLevelOffloadBackend,
        OffloadBackend,
    )
    from omni_offload.cleanup import run_cleanup_steps
    from omni_offload.config import (
        DiffusionParallelConfig,
        DLOTransfer,
        LayerOptions,
        OffloadConfig,
        OffloadMode,
        OffloadPlan,
        OffloadStrategy,
        OmniDiffusionConfig,
        ResidentPlacement,
    )
    from omni_offload.errors import ComponentPathError, ContractViolation, OffloadConfigError, OffloadError, OffloadStateError
    from omni_offload.factory import get_offload_backend
    from omni_offload.hooks import HookRegistry, ModelHook
    from omni_offload.mixins import ComponentDiscoveryMixin, ModelCpuOffloadMixin, OmniOffloadMixin
    from omni_offload.plan import ResolvedOffloadPlan, resolve_offload_plan, streamed_parameters
    from omni_offload.protocols import (
        DIT_COMPONENT,
        TEXT_ENCODER_COMPONENT,
        VAE_COMPONENT,
        SupportsComponentDiscovery,
        SupportsModelCpuOffload,
        supports_component_discovery,
        supports_model_cpu_offload,
    )
    from omni_offload.ranks import gather_group
    from omni_offload.residency import ModuleResidency
    from omni_offload.trace import ComponentReport, HeldBytes, Lane, OffloadReport, Recording, Span

__all__ = [
    "DIT_COMPONENT",
    "TEXT_ENCODER_COMPONENT",
    "VAE_COMPONENT",
    "ComponentDiscoveryMixin",
    "ComponentPathError",
    "ComponentReport",
    "ContractViolation",
    "DLOTransfer",
    "DiffusionParallelConfig",
    "DistributedLayerwiseOffloadBackend",
    "HeldBytes",
    "HookRegistry",
    "Lane",
    "LayerOptions",
    "LayerwiseOffloadBackend",
    "ModelCpuOffloadMixin",
    "ModelHook",
    "ModelLevelOffloadBackend",
    "ModuleResidency",
    "OffloadBackend",
    "OffloadConfig",
    "OffloadConfigError",
    "OffloadError",
    "OffloadMode",
    "OffloadPlan",
    "OffloadReport",
    "OffloadStateError",
    "OffloadStrategy",
    "OmniDiffusionConfig",
    "OmniOffloadMixin",
    "Recording",
    "ResidentPlacement",
    "ResolvedOffloadPlan",
    "Span",
    "SupportsComponentDiscovery",
    "SupportsModelCpuOffload",
    "gather_group",
    "get_offload_backend",
    "resolve_offload_plan",
    "run_cleanup_steps",
    "streamed_parameters",
    "supports_component_discovery",
    "supports_model_cpu_offload",
]

_MODULES = {
    "omni_offload.backends": (
        "DistributedLayerwiseOffloadBackend",
        "LayerwiseOffloadBackend",
        "ModelLevelOffloadBackend",
        "OffloadBackend",
    ),
    "omni_offload.cleanup": ("run_cleanup_steps",),
    "omni_offload.config": (
        "DiffusionParallelConfig",
        "DLOTransfer",
        "LayerOptions",
        "OffloadConfig",
        "OffloadMode",
        "OffloadPlan",
        "OffloadStrategy",
        "OmniDiffusionConfig",
        "ResidentPlacement",
    ),
    "omni_offload.errors": (
        "ComponentPathError",
        "ContractViolation",
        "OffloadConfigError",
        "OffloadError",
        "OffloadStateError",
    ),
    "omni_offload.factory": ("get_offload_backend",),
    "omni_offload.hooks": (
        "HookRegistry",
        "ModelHook",
    ),
    "omni_offload.mixins": (
        "ComponentDiscoveryMixin",
        "ModelCpuOffloadMixin",
        "OmniOffloadMixin",
    ),
    "omni_offload.plan": (
        "ResolvedOffloadPlan",
        "resolve_offload_plan",
        "streamed_parameters",
    ),
    "omni_offload.protocols": (
        "DIT_COMPONENT",
        "TEXT_ENCODER_COMPONENT",
        "VAE_COMPONENT",
        "SupportsComponentDiscovery",
        "SupportsModelCpuOffload",
        "supports_component_discovery",
        "supports_model_cpu_offload",
    ),
    "omni_offload.ranks": ("gather_group",),
    "omni_offload.residency": ("ModuleResidency",),
    "omni_offload.trace": (
        "ComponentReport",
        "HeldBytes",
        "Lane",
        "OffloadReport",
        "Recording",
        "Span",
    ),
}
"""Where the names are defined."""

_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: the command line's help needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
