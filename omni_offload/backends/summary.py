"""Reports of what a rotation, or a pipeline that drives itself, has moved."""

from collections.abc import Sequence

import attrs
import torch

from omni_offload.backends.rotation import Rotation
from omni_offload.backends.streamed import StreamedResidency
from omni_offload.residency import ModuleResidency
from omni_offload.trace import ComponentReport, OffloadReport

__all__ = ["summarise_members", "summarise_residencies"]

#: How many weights are named with one reason.
_NAMED = 3


def summarise_members(rotation: Rotation, device: torch.device) -> OffloadReport:
    """Report on the components of a rotation."""
    members = rotation.members.values()
    return OffloadReport(
        strategy=rotation.plan.strategy.value,
        device=str(device),
        components=tuple(_component(m.name, m.planned.treatment.value, m.owner.residency) for m in members),
        peak_device_bytes=rotation.context.meter.peak,
        pinned_host_bytes=rotation.context.host.pinned_bytes,
    )


def summarise_residencies(residencies: Sequence[ModuleResidency], device: torch.device) -> OffloadReport:
    """Report on the residencies that a pipeline made which drives its own offload; the peak is that of all of them together."""
    meters = {id(residency.meter): residency.meter for residency in residencies}
    return OffloadReport(
        strategy="model_level",
        device=str(device),
        components=tuple(_component(residency.name, "own", residency) for residency in residencies),
        peak_device_bytes=max((meter.peak for meter in meters.values()), default=0),
        pinned_host_bytes=sum(residency.pinned_bytes for residency in residencies),
    )


def _component(name: str, treatment: str, residency: ModuleResidency) -> ComponentReport:
    overlap = "overlapped" if residency.overlaps else "staged" if residency.pins else "serial"
    return ComponentReport(
        name=name,
        treatment=treatment,
        weight_bytes=residency.host_bytes,
        use_bytes=residency.padded_bytes,
        resident_bytes=residency.device_bytes,
        pinned_bytes=residency.pinned_bytes,
        mapped_bytes=residency.mapped_bytes,
        unmapped=_reasons(residency) if residency.mapped_bytes or any(residency.unmapped()) else (),
        transfer=overlap,
        costs=residency.costs if isinstance(residency, StreamedResidency) else "",
        **attrs.asdict(residency.counters),
    )


def _reasons(residency: ModuleResidency) -> tuple[str, ...]:
    """Say why some of a component's weights are not mapped, and why pages are not locked: a line for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in residency.unmapped():
        names.setdefault(reason, []).append(name)
    lines = [f"{', '.join(some[:_NAMED])}{' and others' * (len(some) > _NAMED)}: {reason}" for reason, some in names.items()]
    return (*lines, *([residency.unlocked] if residency.unlocked else []))
