"""Components that were put in the place of others, or of none, while offload is enabled, and those that are gone."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from omni_offload.errors import OffloadStateError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, Treatment, weight_bytes

if TYPE_CHECKING:
    from omni_offload.backends.rotation import Rotation

__all__ = ["Hooks", "take_in_components"]

logger = logging.getLogger(__name__)


class Hooks(Protocol):
    """What brings a rotation into a component's methods."""

    def renew(self) -> None:
        """Hook the components as they are now."""

    def mend(self) -> None:
        """Hook what was put in the place of hooked methods."""

    def remove(self) -> BaseException | None:
        """Remove every hook; returns the first failure."""


def take_in_components(rotation: "Rotation", hooks: Hooks) -> None:
    """Manage components that were put in the place of others, or of none, since the last call, and give up those that are gone.

    What is done with them is planned anew, as they may be of another structure; the plan of the others is kept.

    Raises:
        OffloadStateError: Two names stood for one component, and do not any more, or the other way round.
        OffloadConfigError: What stands there now cannot be served as was asked, in this call and each after it until that is put right.
        ComponentPathError: It has not what the pipeline declares of it.
    """
    changed = _changed_paths(rotation)
    late = any(_holds_weights(rotation.component(path)) for path in rotation.unplanned)
    if late or any(rotation.component(path) is not None for path in changed):
        rotation.replan(_renewed(rotation.plan, rotation.resolve(), changed))
        changed = _changed_paths(rotation)
    if not changed:
        return
    logger.info("%s replaced; managing what stands there now", ", ".join(changed))
    _give_up(rotation, changed)
    hooks.renew()  # first without the new ones: where one of them cannot be managed, the others are hooked all the same
    try:
        _take_in(rotation, changed)
        hooks.renew()
    except BaseException:
        _give_up(rotation, changed)
        hooks.renew()
        raise


def _changed_paths(rotation: "Rotation") -> list[str]:
    return [planned.path for planned in rotation.plan.components if _changed(rotation, planned)]


def _take_in(rotation: "Rotation", paths: Collection[str]) -> None:
    for planned in rotation.plan.components:
        module = rotation.component(planned.path)
        if planned.path in paths and module is not None:
            member = rotation.take(planned, module)
            rotation.arrange(member)
            member.owner.residency.prepare()
            rotation.room.check()
            if member.stays:
                rotation.renew(member)
    for planned in rotation.plan.components:  # reports are in the plan's order
        if planned.path in rotation.members:
            rotation.members[planned.path] = rotation.members.pop(planned.path)


def _holds_weights(module: torch.nn.Module | None) -> bool:
    return module is not None and weight_bytes(module) > 0


def _renewed(plan: ResolvedOffloadPlan, anew: ResolvedOffloadPlan, changed: Collection[str]) -> ResolvedOffloadPlan:
    """Return a plan with what a plan made anew does with components that changed or came late, and with their groups and entry points."""
    known = {component.path: component for component in plan.components}
    found = {component.path: component for component in anew.components}
    for component in anew.components:
        joined = [alias for alias in component.aliases if alias in known]
        if joined:
            raise OffloadStateError(
                f"{component.path!r} and {joined[0]!r} are one module, and were two when offload was enabled; call "
                "disable_omni_offload() and enable it again"
            )
    kept = [found.get(path, _without_blocks(one)) if path in changed else one for path, one in known.items()]
    late = [component for path, component in found.items() if path not in known]
    groups = dict.fromkeys((*plan.co_residents, *anew.co_residents))
    return attrs.evolve(
        plan,
        components=(*kept, *late),
        co_residents=tuple(sorted(groups, key=len, reverse=True)),  # a member's first group counts
        entry_points=tuple(dict.fromkeys((*_entry_points_but(plan, changed), *anew.entry_points))),
    )


def _entry_points_but(plan: ResolvedOffloadPlan, changed: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the entry points of the components that did not change; those of the others may be others."""
    return [(path, methods) for path, methods in plan.entry_points if not any(f"{path}.".startswith(f"{one}.") for one in changed)]


def _without_blocks(planned: PlannedComponent) -> PlannedComponent:
    """Return the plan of a component that is None now, or has no weights: nothing of it streams."""
    if planned.treatment is not Treatment.STREAM:
        return planned
    return attrs.evolve(planned, treatment=Treatment.ROTATE, block_paths=(), rest_paths=(), resident_layers=None, transfer=None)


def _give_up(rotation: "Rotation", paths: Collection[str]) -> None:
    for path in paths:
        member = rotation.members.get(path)
        if member is not None:
            member.owner.unsubscribe(rotation)
            del rotation.members[path]


def _changed(rotation: "Rotation", planned: PlannedComponent) -> bool:
    module, member = rotation.component(planned.path), rotation.members.get(planned.path)
    for alias in planned.aliases:
        if rotation.component(alias) is not module:
            raise OffloadStateError(
                f"{planned.path!r} and {alias!r} were one module when offload was enabled, and are not any more; call "
                "disable_omni_offload() and enable it again"
            )
    return module is not (None if member is None else member.owner.module)
