"""What a pipeline inherits."""

from omni_offload.mixins.discovery import ComponentDiscoveryMixin
from omni_offload.mixins.model_offload import ModelCpuOffloadMixin
from omni_offload.mixins.omni import OmniOffloadMixin

__all__ = ["ComponentDiscoveryMixin", "ModelCpuOffloadMixin", "OmniOffloadMixin"]
