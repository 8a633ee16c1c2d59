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
from omni_offload.plan import ResolvedOffloadPlan

__all__ = ["get_offload_backend", "make_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[OffloadStrategy, type[OffloadBackend]] = {
    OffloadStrategy.MODEL_LEVEL: ModelLevelOffloadBackend,
    OffloadStrategy.LAYERWISE: LayerwiseOffloadBackend,
    OffloadStrategy.DISTRIBUTED_LAYERWISE: DistributedLayerwiseOffloadBackend,
}


def get_offload_backend(od_config: Any, device: torch.device | None = None, *, mesh: DeviceMesh | None = None) -> OffloadBackend | None:
    """Return the one backend that a configuration asks for; nothing is touched.

    Args:
        od_config: An `OffloadConfig`, an `OmniDiffusionConfig`, or any object with its attributes (a missing one takes its default).
        device: Where components run; None for the current accelerator.
        mesh: The device mesh of a distributed strategy.

    Returns:
        The backend; None where the configuration asks for no offload, or no accelerator supports it.

    Raises:
        OffloadConfigError: The configuration contradicts itself; every problem is named.
    """
    if isinstance(od_config, OffloadConfig):
        config = od_config
    else:
        config = OffloadConfig.from_od_config(od_config)
        for request in overridden_requests(od_config):
            logger.info("offload strategy %s overrides the request for %s", config.strategy.value, request)
    if config.strategy is OffloadStrategy.NONE:
        return None
    reason = unsupported_reason(device)
    if reason is not None:
        logger.warning("no offload: %s", reason)
        return None
    return make_backend(config, device, mesh=mesh)


def make_backend(
    config: OffloadConfig,
    device: torch.device | str | None,
    *,
    mesh: DeviceMesh | None = None,
    plan: ResolvedOffloadPlan | None = None,
) -> OffloadBackend:
    """Return the backend of a configuration's strategy.

    Raises:
        OffloadStateError: There is no such device.
    """
    del mesh  # for the distributed strategy
    return _BACKENDS[config.strategy](config, device, plan=plan)
