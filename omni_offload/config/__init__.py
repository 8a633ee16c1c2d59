"""What is asked for: the selector, the legacy fields, and the configuration that both resolve to."""

from omni_offload.config.choices import DLOTransfer, OffloadMode, OffloadStrategy, ResidentPlacement
from omni_offload.config.declaration import OffloadPlan, encoder_kind
from omni_offload.config.offload import OffloadConfig
from omni_offload.config.options import LayerOptions, OmniDiffusionConfig
from omni_offload.config.parallel import DiffusionParallelConfig, derive_dp_size, gather_axis, rank_layout
from omni_offload.config.request import make_config, overridden_requests
from omni_offload.config.selector import Selector, parse_selector
from omni_offload.config.sizes import format_bytes, parse_bytes

__all__ = [
    "DLOTransfer",
    "DiffusionParallelConfig",
    "LayerOptions",
    "OffloadConfig",
    "OffloadMode",
    "OffloadPlan",
    "OffloadStrategy",
    "OmniDiffusionConfig",
    "ResidentPlacement",
    "Selector",
    "derive_dp_size",
    "encoder_kind",
    "format_bytes",
    "gather_axis",
    "make_config",
    "overridden_requests",
    "parse_bytes",
    "parse_selector",
    "rank_layout",
]
