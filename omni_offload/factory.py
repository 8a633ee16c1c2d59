"""From a configuration to exactly one backend."""

import logging
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from omni_offload.accelerator import unsupported_reason
from omni_offload.backends import (
    DistributedLayerwiseOffloadBackend,
    LayerwiseOffloadBackend,
    ModelLevelOffloadBackend,
    OffloadBackend,
)
from omni_offload.config import OffloadConfig, OffloadStrategy, overridden_requests
from omni_offload.errors import OffloadConfigError, quoted
from omni_offload.plan import ResolvedOffloadPlan

__all__ = ["get_offload_backend", "log_overridden", "make_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[OffloadStrategy, type[OffloadBackend]] = {
    OffloadStrategy.MODEL_LEVEL: ModelLevelOffloadBackend,
    OffloadStrategy.LAYERWISE: LayerwiseOffloadBackend,
}


def get_offload_backend(od_config: Any, device: torch.device | None = None, *, mesh: DeviceMesh | None = None) -> OffloadBackend | None:
    """Return the one backend that a configuration asks for; nothing is touched.

    Args:
        od_config: An `OffloadConfig`, an `OmniDiffusionConfig`, any object with its attributes (a missing one takes its default),
            or a resolved plan.
        device: Where components run; None for the current accelerator.
        mesh: The mesh of all ranks. It says where this rank stands, and asks for nothing: only a distributed strategy gathers
            along it, and with the others every rank is on its own, as with the sizes of `parallel_config`.

    Returns:
        The backend; None where the configuration asks for no offload, or no accelerator supports it.

    Raises:
        OffloadConfigError: The configuration contradicts itself; every problem is named.
    """
    plan = od_config if isinstance(od_config, ResolvedOffloadPlan) else None
    config = OffloadConfig.from_od_config(od_config) if plan is None else plan.config
    log_overridden(od_config, config.strategy)
    if config.strategy is OffloadStrategy.NONE:
        return None
    reason = unsupported_reason(device)
    if reason is not None:
        logger.warning("no offload: %s", reason)
        return None
    return make_backend(config, device, mesh=mesh, plan=plan)


def log_overridden(od_config: object, strategy: OffloadStrategy) -> None:
    """Log each legacy request that lost to a stronger one; none stands in an `OffloadConfig`, a selector or a plan."""
    for request in overridden_requests(od_config):
        logger.info("offload strategy %s overrides the request for %s", strategy.value, request)


def make_backend(
    config: OffloadConfig,
    device: torch.device | str | None,
    *,
    mesh: DeviceMesh | None = None,
    plan: ResolvedOffloadPlan | None = None,
) -> OffloadBackend:
    """Return the backend of a configuration's strategy.

    Raises:
        OffloadConfigError: The mesh is none.
        OffloadStateError: There is no such device.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise OffloadConfigError(f"mesh is {quoted(mesh)}; give a torch.distributed.device_mesh.DeviceMesh, or None")
    if config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE:
        return DistributedLayerwiseOffloadBackend(config, device, plan=plan, mesh=mesh)
    return _BACKENDS[config.strategy](config, device, plan=plan)
