"""What a caller hands in: the engine's fields, and the options of one component in layer mode."""

from collections.abc import Mapping
from pathlib import Path

import attrs

from omni_offload.config.checks import check_bool, check_choice, check_int, check_keys, check_path, raise_problems
from omni_offload.config.choices import DLOTransfer, OffloadStrategy, ResidentPlacement
from omni_offload.config.parallel import DiffusionParallelConfig, read_parallel
from omni_offload.errors import quoted

__all__ = [
    "LEGACY_STRATEGIES",
    "LayerOptions",
    "LegacyFields",
    "OmniDiffusionConfig",
    "read_layer_options",
    "read_legacy",
]

LEGACY_STRATEGIES = {
    "enable_distributed_layerwise_offload": OffloadStrategy.DISTRIBUTED_LAYERWISE,
    "enable_layerwise_offload": OffloadStrategy.LAYERWISE,
    "enable_cpu_offload": OffloadStrategy.MODEL_LEVEL,
}
"""The legacy booleans, the one that wins first."""


@attrs.frozen(kw_only=True)
class LayerOptions:
    """How the blocks of one component stream.

    Args:
        weight_transfer: How a block reaches the device; given, it makes the strategy a distributed one.
        resident_layers: Blocks of each model that stay on the device while the model is in use; None: as many as
            `device_memory` allows, and none without a budget.
        resident_placement: Which blocks these are; spread ones never cost more time than leading ones.
        checkpoint: What backs rank-local blocks, mapped and shared by the processes of a node: a safetensors file, an index, a folder with
            such files, or that of a saved pipeline; None: the files that `pipelines.from_pretrained` loaded the component from.

    Raises:
        OffloadConfigError: A value is of another type or range; the message names each.
    """

    weight_transfer: DLOTransfer | None = None
    resident_layers: int | None = None
    resident_placement: ResidentPlacement = ResidentPlacement.SPREAD
    checkpoint: Path | None = None

    def __attrs_post_init__(self) -> None:
        problems: list[str] = []
        fields = _read_options("LayerOptions", attrs.asdict(self, recurse=False), problems)
        raise_problems("LayerOptions", problems)
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the members of the enums, where their values were given


def _read_options(where: str, value: Mapping[str, object], problems: list[str]) -> dict[str, object]:
    placement = check_choice(f"{where}.resident_placement", value.get("resident_placement"), ResidentPlacement, problems)
    return {
        "weight_transfer": check_choice(f"{where}.weight_transfer", value.get("weight_transfer"), DLOTransfer, problems),
        "resident_layers": check_int(f"{where}.resident_layers", value.get("resident_layers"), problems, minimum=0),
        "resident_placement": placement or ResidentPlacement.SPREAD,
        "checkpoint": check_path(f"{where}.checkpoint", value.get("checkpoint"), problems),
    }


def read_layer_options(where: str, value: object, problems: list[str]) -> LayerOptions:
    """Read the options of one component: a `LayerOptions`, or a mapping with its fields."""
    if isinstance(value, LayerOptions):
        return value
    known = [field.name for field in attrs.fields(LayerOptions)]
    if not isinstance(value, Mapping):
        problems.append(f"{where} is {quoted(value)}; give a mapping with keys of {', '.join(known)}")
        return LayerOptions()
    check_keys(where, value, known, problems)
    return LayerOptions(**_read_options(where, value, problems))  # type: ignore[arg-type]  # checked one by one


@attrs.frozen(kw_only=True)
class LegacyFields:
    """The fields that came before the selector, checked."""

    enable_cpu_offload: bool
    enable_layerwise_offload: bool
    enable_distributed_layerwise_offload: bool
    pin_cpu_memory: bool
    dlo_use_allgather: bool
    dlo_resident_layers: int
    dlo_host_registration_limit_gib: float
    parallel_config: DiffusionParallelConfig

    @property
    def requested(self) -> tuple[str, ...]:
        """The booleans that ask for a strategy, the winner first."""
        return tuple(name for name in LEGACY_STRATEGIES if getattr(self, name))

    @property
    def strategy(self) -> OffloadStrategy:
        """The strategy that they resolve to."""
        return LEGACY_STRATEGIES[self.requested[0]] if self.requested else OffloadStrategy.NONE


def read_legacy(source: object, problems: list[str]) -> LegacyFields:
    """Read the legacy fields of any object; a missing one (or None) takes its default."""
    defaults = {**dict.fromkeys(LEGACY_STRATEGIES, False), "pin_cpu_memory": True, "dlo_use_allgather": True}
    flags = {name: check_bool(name, getattr(source, name, None), problems, default=default) for name, default in defaults.items()}
    resident = check_int("dlo_resident_layers", getattr(source, "dlo_resident_layers", None), problems, minimum=0)
    limit = getattr(source, "dlo_host_registration_limit_gib", None)
    if limit is None:
        limit = 0.0
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < 2**33:
        problems.append(f"dlo_host_registration_limit_gib is {quoted(limit)}; give a number of GiB >= 0, and not infinite")
        limit = 0.0
    return LegacyFields(
        **flags,
        dlo_resident_layers=resident or 0,
        dlo_host_registration_limit_gib=float(limit),
        parallel_config=read_parallel(getattr(source, "parallel_config", None), problems),
    )


@attrs.frozen(kw_only=True)
class OmniDiffusionConfig:
    """The part of an engine's configuration that offload reads.

    Args:
        diffusion_offload_config: The selector; canonical. `parse_selector` documents its keys.
        enable_cpu_offload: Legacy request for model-level offload.
        enable_layerwise_offload: Legacy request for layerwise offload; wins over model level.
        enable_distributed_layerwise_offload: Legacy request for distributed layerwise offload; wins over both.
        pin_cpu_memory: Whether host memory is page-locked, where the selector does not say.
        dlo_use_allgather: How blocks travel, for components without a `weight_transfer`.
        dlo_resident_layers: Blocks of a DiT that stay on the device while it is in use.
        dlo_host_registration_limit_gib: Most GiB of mapped files whose pages are locked; 0: none.
        parallel_config: The parallel axes.

    Raises:
        OffloadConfigError: A field is of another type or range; the message names each. The selector's content is
            checked by `OffloadConfig.from_od_config`.
    """

    diffusion_offload_config: Mapping[str, object] | None = attrs.field(default=None, hash=False)
    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    enable_distributed_layerwise_offload: bool = False
    pin_cpu_memory: bool = True
    dlo_use_allgather: bool = True
    dlo_resident_layers: int = 0
    dlo_host_registration_limit_gib: float = 0.0
    parallel_config: DiffusionParallelConfig = attrs.field(factory=DiffusionParallelConfig)

    def __attrs_post_init__(self) -> None:
        problems: list[str] = []
        selector: object = self.diffusion_offload_config
        if not isinstance(selector, Mapping | None):
            problems.append(f"diffusion_offload_config is {quoted(selector)}; give a mapping or None")
        read_legacy(self, problems)
        raise_problems("OmniDiffusionConfig", problems)
