"""The closed sets of values that a configuration may name."""

from enum import Enum

__all__ = ["DLOTransfer", "OffloadMode", "OffloadStrategy", "ResidentPlacement"]


class OffloadStrategy(str, Enum):  # noqa: UP042  (the bases are part of the public name)
    """Which backend moves the weights."""

    NONE = "none"
    MODEL_LEVEL = "model_level"
    LAYERWISE = "layerwise"
    DISTRIBUTED_LAYERWISE = "distributed_layerwise"


class OffloadMode(str, Enum):  # noqa: UP042  (the bases are part of the public name)
    """The granularity that a selector asks for."""

    MODULE = "module"
    LAYER = "layer"
    AUTO = "auto"


class DLOTransfer(str, Enum):  # noqa: UP042  (the bases are part of the public name)
    """How a streamed block reaches the device in distributed layerwise offload."""

    ALLGATHER = "allgather"
    RANK_LOCAL = "rank-local"


class ResidentPlacement(str, Enum):  # noqa: UP042  (the bases are part of the public name)
    """Which blocks of a stack are the resident ones: spread evenly over it, or its first ones."""

    SPREAD = "spread"
    LEADING = "leading"
