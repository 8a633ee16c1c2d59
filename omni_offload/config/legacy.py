"""The selector beside the fields that came before it, and the old fields of `OffloadConfig` beside its new ones."""

from collections.abc import Mapping
from typing import Any

import attrs

from omni_offload.config.checks import check_choice, did_you_mean
from omni_offload.config.choices import DLOTransfer, OffloadStrategy
from omni_offload.config.options import LEGACY_STRATEGIES, LayerOptions, LegacyFields
from omni_offload.config.parallel import DiffusionParallelConfig, derive_dp_size, parallel_problems
from omni_offload.config.selector import COMPONENTS, Selector
from omni_offload.errors import quoted
from omni_offload.protocols import DIT_COMPONENT

__all__ = ["agree_layers", "agree_parallel", "merge_legacy"]

_STREAMING = (OffloadStrategy.LAYERWISE, OffloadStrategy.DISTRIBUTED_LAYERWISE)


def merge_legacy(selector: Selector | None, legacy: LegacyFields, problems: list[str]) -> dict[str, Any]:
    """The fields of an `OffloadConfig` from a selector and the legacy fields beside it.

    A legacy field counts as given only where it differs from its default; one that is given and disagrees with the
    selector is a problem.

    Args:
        selector: The selector, or None where there is none.
        legacy: The legacy fields.
        problems: Where disagreements are added.

    Returns:
        Keyword arguments for `OffloadConfig`.
    """
    fields = attrs.asdict(legacy, recurse=False, filter=lambda field, _: field.name not in LEGACY_STRATEGIES)
    if selector is None:
        fields["strategy"] = legacy.strategy
        if legacy.strategy in _STREAMING:  # the legacy number is always one, never "as many as fit"
            fields["layer_options"] = {DIT_COMPONENT: LayerOptions(resident_layers=legacy.dlo_resident_layers)}
        return fields
    problems.extend(
        f"{name} asks for {LEGACY_STRATEGIES[name].value}, and the selector for {selector.strategy.value}; drop {name}"
        for name in legacy.requested
        if LEGACY_STRATEGIES[name] is not selector.strategy
    )
    problems.extend(_disagreements(selector, legacy))
    fields |= attrs.asdict(selector, recurse=False, filter=lambda field, _: field.name not in {"mode", "pin_memory"})
    fields["strategy"] = selector.strategy
    fields["pin_cpu_memory"] = legacy.pin_cpu_memory if selector.pin_memory is None else selector.pin_memory
    return fields


def _disagreements(selector: Selector, legacy: LegacyFields) -> list[str]:
    problems = []
    if selector.pin_memory and not legacy.pin_cpu_memory:
        problems.append("pin_cpu_memory is False, and the selector's pin_memory is True; drop one")
    dit = selector.layer_options.get(DIT_COMPONENT, LayerOptions())
    if legacy.dlo_resident_layers and legacy.dlo_resident_layers != dit.resident_layers:
        problems.append(
            f"dlo_resident_layers is {legacy.dlo_resident_layers}, and the selector's layer_options.dit.resident_layers "
            f"is {dit.resident_layers}; say it in the selector alone"
        )
    given = {name: options.weight_transfer for name, options in selector.layer_options.items() if options.weight_transfer}
    takers = set(selector.components or COMPONENTS) - set(given)
    gathers = [name for name, transfer in given.items() if transfer is DLOTransfer.ALLGATHER]
    if not legacy.dlo_use_allgather and gathers and (DIT_COMPONENT in gathers or not takers):
        problems.append(
            f"dlo_use_allgather is False, and the selector's weight_transfer of {', '.join(gathers)} is 'allgather'; drop dlo_use_allgather"
        )
    return problems


def agree_parallel(fields: dict[str, Any], problems: list[str]) -> None:
    """Make `use_hsdp` and `dp_size` agree with `parallel_config`: where only they are given, it follows them."""
    parallel: DiffusionParallelConfig = fields["parallel_config"]
    use_hsdp, dp_size = fields["use_hsdp"], fields["dp_size"]
    if parallel == DiffusionParallelConfig():
        size = "hsdp_shard_size" if use_hsdp and dp_size > 1 else "data_parallel_size"
        parallel = attrs.evolve(parallel, **{"use_hsdp": use_hsdp, size: dp_size})
    derived = derive_dp_size(parallel)
    if use_hsdp and not parallel.use_hsdp:
        problems.append("use_hsdp is True, and parallel_config.use_hsdp is False; give parallel_config alone")
    if dp_size not in (1, derived):
        problems.append(f"dp_size is {dp_size}, and parallel_config makes it {derived}; give parallel_config alone")
    problems.extend(parallel_problems(parallel))
    fields |= {"use_hsdp": parallel.use_hsdp, "dp_size": derived, "parallel_config": parallel}


def agree_layers(fields: dict[str, Any], transfers: object, problems: list[str]) -> None:
    """Make `dlo_transfers`, `dlo_use_allgather` and `dlo_resident_layers` agree with `layer_options`."""
    options: dict[str, LayerOptions] = fields["layer_options"]
    if transfers and fields["strategy"] is not OffloadStrategy.DISTRIBUTED_LAYERWISE:
        problems.append("dlo_transfers stand beside a strategy that is not distributed; drop them")
    if options and fields["strategy"] not in _STREAMING:
        problems.append("layer_options stand beside a strategy that streams nothing; drop them, or use a layer strategy")
    _agree_residents(fields, options, problems)
    merged = _merge_transfers(options, transfers, fields["components"], problems)
    gathers = fields["dlo_use_allgather"]
    default = DLOTransfer.ALLGATHER if gathers else DLOTransfer.RANK_LOCAL
    dit = merged.get(DIT_COMPONENT, default)
    if not gathers and dit is DLOTransfer.ALLGATHER:
        problems.append("dlo_use_allgather is False, and the transfer of dit is 'allgather'; drop dlo_use_allgather")
    if fields["strategy"] is OffloadStrategy.DISTRIBUTED_LAYERWISE:  # who took the default keeps it
        taken = {name: merged.get(name, default) for name in fields["components"] or COMPONENTS}
        merged |= {name: transfer for name, transfer in taken.items() if transfer is not dit}
    fields["dlo_use_allgather"] = dit is DLOTransfer.ALLGATHER
    fields["dlo_transfers"] = merged or None
    _check_streaming(fields, options, problems)


def _agree_residents(fields: dict[str, Any], options: dict[str, LayerOptions], problems: list[str]) -> None:
    number = fields["dlo_resident_layers"]
    dit = options.get(DIT_COMPONENT, LayerOptions())
    if number and fields["strategy"] in _STREAMING:
        if fields["components"] is not None and DIT_COMPONENT not in fields["components"]:
            problems.append(f"dlo_resident_layers is {number}, and components leaves dit out; select it, or drop the number")
        elif dit.resident_layers is None:
            options[DIT_COMPONENT] = attrs.evolve(dit, resident_layers=number)
        elif dit.resident_layers != number:
            problems.append(f"dlo_resident_layers is {number}, and layer_options.dit.resident_layers is {dit.resident_layers}; drop one")
    fields["dlo_resident_layers"] = number or dit.resident_layers or 0


def _merge_transfers(
    options: Mapping[str, LayerOptions], transfers: object, components: frozenset[str] | None, problems: list[str]
) -> dict[str, DLOTransfer]:
    if not isinstance(transfers, Mapping | None):
        problems.append(f"dlo_transfers is {quoted(transfers)}; give a mapping of component -> transfer")
        transfers = None
    merged: dict[str, DLOTransfer] = {}
    for name, value in (transfers or {}).items():
        if name not in COMPONENTS:
            problems.append(f"dlo_transfers names {quoted(name)}; {did_you_mean(name, COMPONENTS)}")
        elif components is not None and name not in components:
            problems.append(f"dlo_transfers names {name!r}, which components leaves out; select it, or drop its transfer")
        transfer = check_choice(f"dlo_transfers.{name}", value, DLOTransfer, problems)
        if transfer is not None:
            merged[name] = transfer
    for name, option in options.items():
        if option.weight_transfer is None:
            continue
        if merged.setdefault(name, option.weight_transfer) is not option.weight_transfer:
            problems.append(
                f"dlo_transfers.{name} is {merged[name].value!r}, and layer_options.{name}.weight_transfer is "
                f"{option.weight_transfer.value!r}; drop one"
            )
    return merged


def _check_streaming(fields: dict[str, Any], options: Mapping[str, LayerOptions], problems: list[str]) -> None:
    distributed = fields["strategy"] is OffloadStrategy.DISTRIBUTED_LAYERWISE
    for name, option in options.items():
        if option.weight_transfer is not None and not distributed:
            problems.append(
                f"layer_options.{name}.weight_transfer stands beside a strategy that is not distributed; drop it, or "
                f"use {OffloadStrategy.DISTRIBUTED_LAYERWISE.value}"
            )
        default = DLOTransfer.ALLGATHER if fields["dlo_use_allgather"] else DLOTransfer.RANK_LOCAL
        transfer = (fields["dlo_transfers"] or {}).get(name, default)
        if option.checkpoint is not None and not (distributed and transfer is DLOTransfer.RANK_LOCAL):
            problems.append(f"layer_options.{name}.checkpoint backs rank-local blocks only; give weight_transfer 'rank-local' too")
