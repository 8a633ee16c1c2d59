"""Components that were put in the place of others, or of none, while offload is enabled, and those that are gone."""

import logging
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from omni_offload.errors import OffloadStateError
from omni_offload.plan import PlannedComponent, ResolvedOffloadPlan, weight_bytes

if TYPE_CHECKING:
    from omni_offload.backends.rotation import Rotation

__all__ = ["Hooks", "take_in_components"]

logger = logging.getLogger(__name__)


class Hooks(Protocol):
    """What brings a rotation into a component's methods."""

    def renew(self) -> None:
        """Hook the components as they are now."""

    def remove(self) -> BaseException | None:
        """Remove every hook; returns the first failure."""


def take_in_components(rotation: "Rotation", hooks: Hooks) -> None:
    """Manage components that were put in the place of others, or of none, since the last call, and give up those that are gone.

    Raises:
        OffloadStateError: A component stood under several names, and one of them was given another.
        OffloadConfigError: A component that was None when offload was enabled cannot be served.
    """
    if any(_holds_weights(rotation.component(path)) for path in rotation.unplanned):
        rotation.replan(_extended(rotation.plan, rotation.resolve()))
    components = rotation.plan.components
    changed = [planned for planned in components if _changed(rotation, planned)]
    if not changed:
        return
    logger.info("%s replaced; managing what stands there now", ", ".join(planned.path for planned in changed))
    for planned in changed:
        _give_up(rotation, planned.path)
    hooks.renew()  # first without the new ones: where one of them cannot be managed, the others are hooked all the same
    for planned in changed:
        module = rotation.component(planned.path)
        if module is not None:
            _take_in(rotation, planned, module)
    for planned in components:  # reports are in the plan's order
        if planned.path in rotation.members:
            rotation.members[planned.path] = rotation.members.pop(planned.path)
    hooks.renew()


def _holds_weights(module: torch.nn.Module | None) -> bool:
    return module is not None and weight_bytes(module) > 0


def _extended(plan: ResolvedOffloadPlan, anew: ResolvedOffloadPlan) -> ResolvedOffloadPlan:
    """Return a plan with the components that only a plan made anew has, with their groups and entry points."""
    known = {component.path for component in plan.components}
    late = [component for component in anew.components if component.path not in known]
    groups = dict.fromkeys((*plan.co_residents, *anew.co_residents))
    return attrs.evolve(
        plan,
        components=(*plan.components, *late),
        co_residents=tuple(sorted(groups, key=len, reverse=True)),  # a member's first group counts
        entry_points=tuple(dict.fromkeys((*plan.entry_points, *anew.entry_points))),
    )


def _take_in(rotation: "Rotation", planned: PlannedComponent, module: torch.nn.Module) -> None:
    """Manage one more component; after a failure it is not managed, and the next call tries again."""
    try:
        member = rotation.take(planned, module)
        rotation.arrange(member)
        member.owner.residency.prepare()
        rotation.room.check()
        if member.stays:
            rotation.renew(member)
    except BaseException:
        _give_up(rotation, planned.path)
        raise


def _give_up(rotation: "Rotation", path: str) -> None:
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
