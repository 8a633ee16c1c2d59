"""The configuration that backends and the resolver work with."""

from collections.abc import Mapping
from typing import Any, Self

import attrs

from omni_offload.config.checks import check_bool, check_choice, check_int, check_size, raise_problems
from omni_offload.config.choices import DLOTransfer, OffloadStrategy
from omni_offload.config.declaration import OffloadPlan, encoder_kind
from omni_offload.config.legacy import agree_layers, agree_parallel, merge_legacy
from omni_offload.config.options import LayerOptions, read_legacy
from omni_offload.config.parallel import DiffusionParallelConfig, parallel_problems
from omni_offload.config.selector import read_components, read_options_by_component, read_selector
from omni_offload.errors import quoted
from omni_offload.protocols import DIT_COMPONENT, TEXT_ENCODER_COMPONENT

__all__ = ["OffloadConfig"]

_NO_CONFIG = (Mapping, str, bytes, int, float, list, tuple, set, frozenset, type, type(None))


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """What is offloaded and how, with every default resolved.

    The first nine fields are older and agree with the later ones by construction: what is given in one place is filled
    in in the other, and two that differ are an error.

    Args:
        strategy: The backend.
        pin_cpu_memory: Whether host memory is page-locked.
        use_hsdp: Whether parameters are sharded by HSDP.
        dp_size: Derived from `parallel_config` by `derive_dp_size`.
        dlo_use_allgather: How blocks travel, for components that `dlo_transfers` does not name.
        dlo_resident_layers: Resident blocks of each DiT; 0 where `layer_options` leave the number to the budget.
        dlo_host_registration_limit_gib: Most GiB of mapped files whose pages are locked; 0: none.
        components: Selected kinds of components; None: no selection.
        dlo_transfers: How blocks travel, by component; None where none is named.
        layer_options: Options of streaming, by component.
        slots: Device buffers of the rings of a device; three leave 1-2 % where two leave 5-9 % to jitter.
        device_memory: Upper bound in bytes on weights and buffers held on the device; None: no bound.
        host_memory: Upper bound in bytes on pinned host memory; None: no bound.
        keep_between_calls: Whether weights may stay on the device when a call ends.
        parallel_config: The parallel axes.

    Raises:
        OffloadConfigError: A field is of another type or range, or two disagree; the message names every problem.
    """

    strategy: OffloadStrategy
    pin_cpu_memory: bool = True
    use_hsdp: bool = False
    dp_size: int = 1
    dlo_use_allgather: bool = True
    dlo_resident_layers: int = 0
    dlo_host_registration_limit_gib: float = 0.0
    components: frozenset[str] | None = None
    dlo_transfers: Mapping[str, DLOTransfer] | None = attrs.field(default=None, hash=False)
    layer_options: Mapping[str, LayerOptions] = attrs.field(factory=dict, hash=False)
    slots: int = 3
    device_memory: int | None = None
    host_memory: int | None = None
    keep_between_calls: bool = False
    parallel_config: DiffusionParallelConfig = attrs.field(factory=DiffusionParallelConfig)

    def __attrs_post_init__(self) -> None:
        problems: list[str] = []
        fields = _read_plain(self, problems)
        agree_parallel(fields, problems)
        agree_layers(fields, self.dlo_transfers, problems)
        raise_problems("OffloadConfig", problems)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_od_config(cls, od_config: object) -> Self:
        """Resolve what an engine's configuration asks for.

        The selector `diffusion_offload_config` is canonical. Without one, the legacy booleans resolve
        DISTRIBUTED_LAYERWISE > LAYERWISE > MODEL_LEVEL > NONE. With one, a legacy field that differs from its default
        and disagrees with the selector is an error.

        Args:
            od_config: An `OmniDiffusionConfig`, or any object with its attributes; a missing one takes its default. An
                `OffloadConfig` is returned as it is.

        Returns:
            The configuration; its strategy is NONE where nothing is asked for.

        Raises:
            OffloadConfigError: Something is wrong; the message names every problem. Nothing was touched.
            NotImplementedError: The selector's mode is "auto".
        """
        if isinstance(od_config, cls):
            return od_config
        problems: list[str] = []
        if isinstance(od_config, _NO_CONFIG):  # an object of which every attribute is missing would ask for nothing
            problems.append(f"it is {quoted(od_config)}, no configuration; a selector goes into its field diffusion_offload_config")
        legacy = read_legacy(od_config, problems)
        problems.extend(parallel_problems(legacy.parallel_config))
        raw = getattr(od_config, "diffusion_offload_config", None)
        selector = None if raw is None else read_selector(raw, problems)
        fields = merge_legacy(selector, legacy, problems)
        raise_problems(f"Offload cannot be configured from {type(od_config).__name__}", problems)
        return cls(**fields)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Build it from plain values, as they stand in JSON: enums and paths as strings, the rest as mappings and lists.

        Args:
            fields: Field -> value.

        Returns:
            The configuration.

        Raises:
            OffloadConfigError: A value is of another type or range; the message names every problem.
        """
        parallel = DiffusionParallelConfig(**fields.get("parallel_config", {}))
        return cls(**{**fields, "parallel_config": parallel})

    def offloads(self, component: str) -> bool:
        """Whether the selection covers a kind of component; without a selection: "dit" only.

        Args:
            component: "dit", "text_encoder" or "vae".
        """
        if self.components is None:
            return component == DIT_COMPONENT
        return component in self.components

    def offloads_encoder(self, name: str, plan: OffloadPlan | None = None) -> bool:
        """Whether the selection covers an encoder.

        Args:
            name: The encoder's path.
            plan: What the pipeline declares about it; else the name of its last part decides.

        Returns:
            Whether its kind is selected; without a selection, as `offloads("text_encoder")`.
        """
        if self.components is None:
            return self.offloads(TEXT_ENCODER_COMPONENT)
        kind = encoder_kind(name, plan)
        return kind is not None and self.offloads(kind)

    def should_offload_encoder(self, name: str, plan: OffloadPlan | None = None) -> bool:
        """Whether an encoder takes part: as `offloads_encoder`, but that without a selection every encoder does.

        Args:
            name: The encoder's path.
            plan: What the pipeline declares about it.
        """
        return self.components is None or self.offloads_encoder(name, plan)

    def transfer_for(self, component: str) -> DLOTransfer:
        """How blocks reach the device in distributed layerwise offload.

        Args:
            component: The kind whose blocks they are.
        """
        default = DLOTransfer.ALLGATHER if self.dlo_use_allgather else DLOTransfer.RANK_LOCAL
        return (self.dlo_transfers or {}).get(component, default)

    def uses_allgather(self, component: str) -> bool:
        """Whether `transfer_for` is all-gather.

        Args:
            component: The kind whose blocks they are.
        """
        return self.transfer_for(component) is DLOTransfer.ALLGATHER

    def options_for(self, component: str) -> LayerOptions:
        """The options of a kind of component; the defaults where it has none.

        Args:
            component: "dit", "text_encoder" or "vae".
        """
        return self.layer_options.get(component, LayerOptions())


def _read_plain(config: OffloadConfig, problems: list[str]) -> dict[str, Any]:
    strategy = check_choice("strategy", config.strategy or "None", OffloadStrategy, problems)
    legacy = read_legacy(config, problems)  # the fields of one name have one range
    components = read_components("components", config.components, problems)
    return {
        "strategy": strategy,
        "pin_cpu_memory": legacy.pin_cpu_memory,
        "use_hsdp": check_bool("use_hsdp", config.use_hsdp, problems, default=False),
        "dp_size": check_int("dp_size", config.dp_size, problems, minimum=1) or 1,
        "dlo_use_allgather": legacy.dlo_use_allgather,
        "dlo_resident_layers": legacy.dlo_resident_layers,
        "dlo_host_registration_limit_gib": legacy.dlo_host_registration_limit_gib,
        "components": components,
        "layer_options": read_options_by_component("layer_options", config.layer_options, components, problems),
        "slots": check_int("slots", config.slots, problems, minimum=2) or 3,
        "device_memory": check_size("device_memory", config.device_memory, problems, minimum=1),
        "host_memory": check_size("host_memory", config.host_memory, problems, minimum=0),
        "keep_between_calls": check_bool("keep_between_calls", config.keep_between_calls, problems, default=False),
        "parallel_config": legacy.parallel_config,
    }
