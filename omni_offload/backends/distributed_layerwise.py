"""Distributed layerwise: each rank keeps a part of every streamed block and gathers the others, or streams whole blocks of its own."""

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from omni_offload.backends.distributed_rotation import DistributedRotation
from omni_offload.backends.gathering import Gathering
from omni_offload.backends.layerwise import LayerwiseOffloadBackend
from omni_offload.backends.rotation import Rotation
from omni_offload.backends.spread import refuse_spread_blocks
from omni_offload.config import DLOTransfer, OffloadConfig, OffloadPlan
from omni_offload.config.selector import COMPONENTS
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.plan import ResolvedOffloadPlan
from omni_offload.protocols import DIT_COMPONENT, TEXT_ENCODER_COMPONENT
from omni_offload.ranks import gather_ranks
from omni_offload.refusals import UNPINNED_REGISTRATION, UNUSED_REGISTRATION

__all__ = ["DistributedLayerwiseOffloadBackend"]


class DistributedLayerwiseOffloadBackend(LayerwiseOffloadBackend):
    """Streams blocks over a process group: all-gathered from the parts that its ranks keep on their hosts, or rank-locally.

    The ranks enable, call and disable in step. Where one fails to enable, all do; where they come out of step later, nothing more is
    gathered, and every later call says so.

    Attributes:
        chunk_bytes: Most bytes that are gathered in one go: a chunk is gathered while the next is copied.
        time_limit: How long ranks wait for one another; for a gather a third of it.

    Args:
        config: What is asked for.
        device: The device; None for the current accelerator.
        plan: A plan made earlier; None: resolved from the pipeline when it is enabled.
        mesh: The mesh of all ranks; None: ranks are laid out in their order.
    """

    chunk_bytes: int = 64 << 20
    time_limit: dt.timedelta = dt.timedelta(minutes=10)
    _gathering: Gathering | None = None
    _compared: object = None

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device | str | None = None,
        *,
        plan: ResolvedOffloadPlan | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(config, device, plan=plan)
        self._mesh = mesh

    @property
    @override
    def asked(self) -> tuple[object, ...]:
        return (*super().asked, self._mesh)

    # ---- enable and disable ------------------------------------------------------------------------------------------------

    @override
    def enable(self, pipeline: Any) -> None:
        if self._touched or self._shut_down:
            super().enable(pipeline)
            return
        self._refuse_unavailable()
        gathering = self._gathering = self._join(pipeline)
        try:
            super().enable(pipeline)
        except BaseException as error:
            if gathering is not None:
                gathering.agreement.tell("enable", error)
                gathering.end("it could not be enabled")
                if gathering.lost:
                    error.add_note(f"{', '.join(gathering.lost)} hold no weights any more: load their components again")
                if not self._touched:
                    self._part(gathering)
            raise

    def _refuse_unavailable(self) -> None:
        config, problems = self.config, list[str]()
        limit = config.dlo_host_registration_limit_gib
        if limit and not config.pin_cpu_memory:
            problems.append(UNPINNED_REGISTRATION.of(f"dlo_host_registration_limit_gib is {limit}, and pinning is off"))
        if limit and all(config.uses_allgather(kind) for kind in config.components or COMPONENTS):
            found = f"dlo_host_registration_limit_gib is {limit}, and nothing streams rank-locally, from a mapped file"
            problems.append(UNUSED_REGISTRATION.of(found))
        if problems:
            raise OffloadConfigError(f"distributed layerwise offload: {'; '.join(problems)}")

    def _join(self, pipeline: Any) -> Gathering | None:
        """Find the ranks to gather with; None where there is nobody, or nothing is gathered."""
        ranks = gather_ranks(self.config.parallel_config, mesh=self._mesh) if self._may_gather(pipeline) else ()
        if len(ranks) < 2:
            return None
        return Gathering.open(ranks, self.accelerator, chunk_bytes=self.chunk_bytes, limit=self.time_limit)

    def _may_gather(self, pipeline: Any) -> bool:
        """Whether the plan may say that something is gathered: asked before it is made, so that all ranks hear if it cannot be."""
        if self._given_plan is not None:
            return any(planned.transfer is DLOTransfer.ALLGATHER for planned in self._given_plan.components)
        declared = getattr(pipeline, "_offload_plan", None)
        replicated = declared.encoder_dlo_weight_replication if isinstance(declared, OffloadPlan) else ()
        kinds = [DIT_COMPONENT, *([TEXT_ENCODER_COMPONENT] if replicated else [])]
        selected = self.config.components
        return any(self.config.uses_allgather(kind) and (selected is None or kind in selected) for kind in kinds)

    @override
    def _make_plan(self, pipeline: Any) -> ResolvedOffloadPlan:
        if self._gathering is None:
            return self._check_plan(pipeline, super()._make_plan(pipeline))
        made: list[ResolvedOffloadPlan] = []
        whole = super()._make_plan
        self._gathering.agreement.run(
            "resolve the plan",
            lambda: made.append(self._check_plan(pipeline, whole(pipeline))),
            lambda: [*str(made[0]).splitlines(), *made[0].lines()],
        )
        return made[0]

    def _check_plan(self, pipeline: Any, plan: ResolvedOffloadPlan) -> ResolvedOffloadPlan:
        refuse_spread_blocks(pipeline, plan, self._mesh)
        return plan

    @override
    def _step(self, name: str, work: Callable[[], None]) -> None:
        gathering, rotation = self._gathering, self._rotation
        if gathering is None or not isinstance(rotation, DistributedRotation):
            super()._step(name, work)
        else:
            gathering.agreement.run(name, work, rotation.describe)

    @override
    def _make_rotation(self, pipeline: Any, plan: ResolvedOffloadPlan) -> Rotation:
        if self._gathering is None:
            return super()._make_rotation(pipeline, plan)
        return DistributedRotation(pipeline, plan, self.accelerator, self._gathering)

    @override
    def _uninstall(self, *, undo: bool) -> BaseException | None:
        gathering = self._gathering
        if gathering is not None and undo:
            gathering.end("it could not be enabled")  # first: others may have gone on, and nothing is gathered alone
        elif gathering is not None and not gathering.ended:
            gathering.compare("disable")
        error = super()._uninstall(undo=undo)
        if gathering is not None and error is not None:
            gathering.end(f"weights could not be given back ({type(error).__name__}: {error})", failed=True)
        return error

    @override
    def _disable(self) -> None:
        gathering, rotation = self._gathering, self._rotation
        names = [member.name for member, _ in rotation.gathered] if isinstance(rotation, DistributedRotation) else []
        changes = [] if rotation is None else [*rotation.context.host.changes()]
        super()._disable()
        if gathering is not None:
            self._part(gathering)
        if changes and not self._shut_down:
            raise OffloadStateError(f"{'; '.join(changes)}; the offload is disabled, and its values are uncertain: load it again")
        if gathering is not None and gathering.lost and not self._shut_down:
            raise OffloadStateError(
                f"{gathering.ended}; the offload is disabled, and the blocks of {', '.join(names)} hold no weights any more: load these "
                "components again"
            )

    def _part(self, gathering: Gathering) -> None:
        gathering.close()
        self._gathering = None

    @override
    def shutdown(self) -> None:
        if self._gathering is not None:
            self._gathering.end("it was shut down")
        if self._rotation is not None:
            self._rotation.context.host.keep_files()
        super().shutdown()

    # ---- use ---------------------------------------------------------------------------------------------------------------

    @override
    def begin_call(self, call: object) -> None:
        gathering, rotation = self._gathering, self._rotation
        if gathering is not None and gathering.ended:
            raise OffloadStateError(f"the offload of {type(self.pipeline).__name__} cannot be used: {gathering.ended}")
        if isinstance(rotation, DistributedRotation):
            rotation.refuse_replaced()
        super().begin_call(call)

    @override
    def end_call(self, call: object, *, error: BaseException | None) -> BaseException | None:
        gathering, rotation = self._gathering, self._rotation
        wrong: BaseException | None = None
        if gathering is not None and rotation is not None and rotation.calls[:1] == [call] and self._compared is not call:
            self._compared = call
            wrong = gathering.compare("the end of a call", error)
        instead = super().end_call(call, error=error)
        if wrong is None:
            return instead
        if error is None or isinstance(error, OffloadStateError):
            return wrong
        (instead or error).add_note(str(wrong))
        return instead

    @override
    @contextlib.contextmanager
    def writing(self, component: str, methods: Sequence[str] = ()) -> Iterator[None]:
        rotation = self._rotation
        for member, _ in rotation.gathered if isinstance(rotation, DistributedRotation) else ():
            if component in member.names:
                raise OffloadStateError(
                    f"weights of component {component!r} were to be written, of whose blocks this rank holds a part only; call "
                    "disable_omni_offload() on all ranks first"
                )
        with super().writing(component, methods):
            yield
