"""The one mixin most pipelines need: every strategy, through one call to enable and one to disable."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from omni_offload.backends import OffloadBackend, backend_of, manage
from omni_offload.config import OffloadConfig, OmniDiffusionConfig, make_config
from omni_offload.errors import OffloadConfigError
from omni_offload.factory import log_overridden, make_backend
from omni_offload.mixins.discovery import ComponentDiscoveryMixin
from omni_offload.mixins.model_offload import ModelCpuOffloadMixin
from omni_offload.plan import ResolvedOffloadPlan
from omni_offload.trace import OffloadReport

__all__ = ["OmniOffloadMixin"]


class OmniOffloadMixin(ComponentDiscoveryMixin, ModelCpuOffloadMixin):
    """Stands before a pipeline class: `class OmniFluxPipeline(OmniOffloadMixin, FluxPipeline)`."""

    def enable_omni_offload(
        self,
        config: OffloadConfig | OmniDiffusionConfig | ResolvedOffloadPlan | Mapping[str, Any] | str | None = None,
        *,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        **selector_keys: Any,
    ) -> OffloadBackend:
        """Enable offload: check everything, then commit, or leave everything as it was.

        Args:
            config: What is asked for; a plain string is a mode, None is "module".
            device: Where components run; None for the current accelerator.
            mesh: The mesh of all ranks, along which a distributed strategy gathers; with the others every rank is on its own.
            selector_keys: Keys of the selector, such as `device_memory="12GiB"`.

        Returns:
            The backend; `with pipe.enable_omni_offload():` disables it at the end. Enabling again with equal arguments returns the
            same one.

        Raises:
            OffloadConfigError: The request contradicts itself or the pipeline; every problem is named.
            ComponentPathError: The pipeline's declarations and its components disagree.
            OffloadStateError: Other offload is on, or there is no accelerator.
        """
        plan = config if isinstance(config, ResolvedOffloadPlan) else None
        if plan is not None and selector_keys:
            raise OffloadConfigError(
                f"a resolved plan was given together with {', '.join(sorted(selector_keys))}; resolve a new plan instead"
            )
        resolved = plan.config if plan is not None else make_config(config, **selector_keys)  # type: ignore[arg-type]  # plan is none
        log_overridden(config, resolved.strategy)
        self._wrap_late_calls()
        return manage(self, make_backend(resolved, device, mesh=mesh, plan=plan))

    def disable_omni_offload(self) -> None:
        """End the offload: whole weights on the host, nothing on the device, nothing pinned. Idempotent, and repairs."""
        backend = backend_of(self)
        if backend is not None:
            backend.disable()

    @property
    def offload_backend(self) -> OffloadBackend | None:
        """The backend while offload is enabled, else None."""
        backend = backend_of(self)
        return backend if backend is not None and backend.enabled else None

    @property
    def offload_report(self) -> OffloadReport | None:
        """What was moved since offload was enabled; None while it is not."""
        backend = self.offload_backend
        return None if backend is None else backend.report()
