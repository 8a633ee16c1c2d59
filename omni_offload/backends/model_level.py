"""Model level: whole components take turns on the device."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from omni_offload.backends.activation import Activation
from omni_offload.backends.base import OffloadBackend
from omni_offload.backends.block_writes import writing_blocks
from omni_offload.backends.calls import enter_call, leave_call
from omni_offload.backends.entry import EntryHooks
from omni_offload.backends.explain import explain
from omni_offload.backends.failures import first_error, raise_error, run_repeatable_steps
from omni_offload.backends.rotation import Member, Rotation
from omni_offload.backends.summary import summarise_members, summarise_residencies
from omni_offload.cleanup import run_cleanup_steps
from omni_offload.config import OffloadStrategy
from omni_offload.discovery import discover_components
from omni_offload.errors import ComponentPathError, OffloadConfigError, OffloadStateError
from omni_offload.plan import ResolvedOffloadPlan, Treatment
from omni_offload.protocols import supports_model_cpu_offload
from omni_offload.residency import ModuleResidency, recording
from omni_offload.trace import OffloadReport, Recording, recording_of

__all__ = ["ENGINE_MARK", "ModelLevelOffloadBackend", "is_asked", "owns_its_offload"]

#: The pipelines whose own pair of methods backends call now.
_ASKED: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("asked", default=())

#: Attribute of an `enable_omni_model_cpu_offload` that is the engine itself, so that the engine does not delegate to it.
ENGINE_MARK = "_omni_offload_engine"


def owns_its_offload(pipeline: Any) -> bool:
    """Whether a pipeline's class wrote the pair of model-level methods itself, rather than inherit the mixin's."""
    return supports_model_cpu_offload(pipeline) and not hasattr(type(pipeline).enable_omni_model_cpu_offload, ENGINE_MARK)


def is_asked(pipeline: object) -> bool:
    """Whether a backend calls one of the pipeline's own pair of methods now."""
    return any(one is pipeline for one in _ASKED.get())


class ModelLevelOffloadBackend(OffloadBackend):
    """Rotates whole components; a pipeline that owns its model-level offload is asked to do it itself."""

    _rotation: Rotation | None = None
    _hooks: EntryHooks | None = None
    _delegate: bool = False
    _residencies: list[ModuleResidency] = []  # noqa: RUF012  (replaced, never changed)

    # ---- enable and disable ------------------------------------------------------------------------------------------------

    @override
    def _install(self, pipeline: Any, plan: ResolvedOffloadPlan) -> None:
        self._delegate = self._delegates(pipeline)
        rotation = self._rotation = self._make_rotation(pipeline, plan)
        if self._delegate:
            self._install_delegate(pipeline)
            return
        self._step("claim the components", rotation.claim)
        self._step("prepare the weights", rotation.prepare)
        hooks = self._hooks = self._make_hooks(rotation, pipeline)
        rotation.hooks = hooks
        self._step("install the hooks", hooks.install)
        rotation.commit()

    def _step(self, name: str, work: Callable[[], None]) -> None:  # noqa: ARG002  (where several processes enable together, it is theirs)
        """Do a step of enabling."""
        work()

    def _make_rotation(self, pipeline: Any, plan: ResolvedOffloadPlan) -> Rotation:
        return Rotation(pipeline, plan, self.accelerator)

    def _delegates(self, pipeline: Any) -> bool:
        """Whether the pipeline's own pair of methods does the work."""
        return owns_its_offload(pipeline)

    def _make_hooks(self, rotation: Rotation, pipeline: Any) -> EntryHooks:
        return EntryHooks(rotation, pipeline)

    @override
    def _make_plan(self, pipeline: Any) -> ResolvedOffloadPlan:
        memory = self.config.device_memory
        if memory is not None and self._delegates(pipeline):
            raise OffloadConfigError(
                f"device_memory={memory} was asked for, but {type(pipeline).__name__} drives its model-level offload itself and takes "
                "no budget; leave device_memory out"
            )
        plan = super()._make_plan(pipeline)
        if plan.strategy is OffloadStrategy.MODEL_LEVEL and (streaming := plan.treated(Treatment.STREAM)):
            raise OffloadConfigError(
                f"the plan given for {type(pipeline).__name__} streams {', '.join(c.path for c in streaming)}, which model-level "
                "offload cannot; use mode 'layer', or let them rotate"
            )
        return plan

    def _install_delegate(self, pipeline: Any) -> None:
        config = self.config
        self._residencies = []
        enable = functools.partial(
            pipeline.enable_omni_model_cpu_offload,
            device=self.device,
            pin_memory=config.pin_cpu_memory,
            use_hsdp=config.use_hsdp,
            offload_components=config.components,
        )
        self._ask(pipeline, enable)

    def _ask(self, pipeline: Any, method: Callable[[], None]) -> None:
        """Call a method of the pipeline's own pair, and note the residencies that it makes."""
        try:
            recording.set((*recording.get(), self._residencies))
            _ASKED.set((*_ASKED.get(), pipeline))
            method()
        finally:
            self._end_asking(pipeline)

    def _end_asking(self, pipeline: Any) -> None:
        """Forget that the pair is asked. Idempotent: it is looked for, since an interrupt may come before a token is at hand."""
        recording.set(tuple(one for one in recording.get() if one is not self._residencies))
        _ASKED.set(tuple(one for one in _ASKED.get() if one is not pipeline))

    @override
    def _uninstall(self, *, undo: bool) -> BaseException | None:
        pipeline, hooks, rotation = self.pipeline, self._hooks, self._rotation
        errors = []
        if self._delegate and pipeline is not None:
            steps = [("the pipeline's own disable", lambda: self._ask(pipeline, pipeline.disable_omni_model_cpu_offload))]
            errors.append(run_cleanup_steps(steps))
            # Again: an interrupt may have come before that was done where it was asked.
            errors.append(run_repeatable_steps([("end the asking", lambda: self._end_asking(pipeline))]))
        errors.append(run_cleanup_steps((f"restore {one.name}", one.restore) for one in self._residencies))
        errors.append(hooks.remove() if hooks is not None else None)
        errors.append(rotation.give_up(undo=undo) if rotation is not None else None)
        error = first_error(*errors)
        if error is None:
            self._rotation, self._hooks, self._residencies = None, None, []
        return error

    @override
    def _between_calls(self, work: Callable[[], None]) -> None:
        rotation = self._rotation
        if rotation is None:
            work()
            return
        if rotation.lock.in_call():
            raise OffloadStateError("disable was asked for while a call on the pipeline runs in this thread; disable after it")
        rotation.lock.run(work)

    # ---- use ---------------------------------------------------------------------------------------------------------------

    @override
    def begin_call(self, call: object) -> None:
        rotation = self._rotation
        if rotation is not None and rotation.begin_call(call):
            enter_call(call, rotation)

    @override
    def end_call(self, call: object, *, error: BaseException | None) -> BaseException | None:
        leave_call(call)
        rotation = self._rotation
        if rotation is None:
            return None
        explained = explain(error, rotation.inactive_at(error)) if error is not None else None
        second = rotation.end_call(call, failed=error is not None)
        if error is None:
            return second
        if second is not None:
            (explained or error).add_note(f"ending the call failed too: {second!r}")
        return explained

    @property
    @override
    def plan(self) -> ResolvedOffloadPlan | None:
        return self._rotation.plan if self._rotation is not None else super().plan

    @property
    @override
    def call_depth(self) -> int:
        return len(self._rotation.calls) if self._rotation is not None else 0

    @override
    def on_device(self, *components: str) -> contextlib.AbstractContextManager[None]:
        rotation = self._active_rotation()
        if self._delegate:
            raise OffloadStateError(
                f"on_device was asked of {type(self.pipeline).__name__}, which drives its model-level offload itself; use its own stages"
            )
        members = [_member(rotation, self.pipeline, name) for name in components]
        return _on_device(rotation, [member for member in members if member is not None])

    @override
    @contextlib.contextmanager
    def writing(self, component: str, methods: Sequence[str] = ()) -> Iterator[None]:
        rotation = self._active_rotation()
        module = rotation.component(component)
        residencies = [one for one in self._residencies if any(module is managed for managed in one.modules)]
        members = [member for member in rotation.members.values() if component in member.names]
        loaded = [residency for residency in residencies if residency.loaded]
        rotating = [member.owner.residency for member in members]
        with contextlib.ExitStack() as taking_in:
            for residency in rotating:
                taking_in.callback(residency.validate)  # what was put in the place of a weight is on the device
            with _on_device(rotation, members), writing_blocks(rotating, methods):
                try:
                    for residency in residencies:
                        residency.load()
                    yield
                finally:
                    for residency in (*residencies, *rotating):
                        residency.mark_written()
                    for residency in residencies:
                        if residency not in loaded:
                            residency.offload()

    @override
    def release(self) -> None:
        for residency in self._residencies:
            residency.drop()  # what the pipeline uses now, or keeps on the device, is bound and stays
        if self._rotation is not None:
            self._rotation.release()

    @override
    def refresh(self) -> None:
        for residency in self._residencies:
            residency.forget_copies()
        if self._rotation is not None:
            self._rotation.refresh()

    @override
    def report(self) -> OffloadReport:
        rotation = self._active_rotation()
        if self._delegate:
            return summarise_residencies(self._residencies, self.device)
        return summarise_members(rotation, self.device)

    @override
    def record(self) -> contextlib.AbstractContextManager[Recording]:
        rotation = self._active_rotation()
        meters = {id(one.meter): one.meter for one in self._residencies} if self._delegate else {0: rotation.context.meter}
        title = f"{type(self.pipeline).__name__}, {rotation.plan.strategy.value}"
        return recording_of(self.accelerator, meters.values(), title=title)

    def _active_rotation(self) -> Rotation:
        if self._rotation is None:
            raise OffloadStateError(f"this {type(self).__name__} manages no pipeline; enable it first")
        return self._rotation


def _member(rotation: Rotation, pipeline: Any, name: str) -> Member | None:
    """Return the component of a declared name; None where it has no bytes, or is None.

    Raises:
        ComponentPathError: No component has the name.
    """
    for member in rotation.members.values():
        if name in member.names:
            return member
    if any(name in (component.path, *component.aliases) for component in discover_components(pipeline)):
        return None
    known = ", ".join(rotation.members)
    raise ComponentPathError(f"on_device names component {name!r}, which is not managed; managed are: {known}")


@contextlib.contextmanager
def _on_device(rotation: Rotation, members: list[Member]) -> Iterator[None]:
    """Activate components, and end the activations on exit, also when the body raises."""
    activations = [Activation(rotation, member) for member in members]
    failure: BaseException | None = None
    try:
        for activation in activations:
            activation.enter()
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        try:
            second = first_error(*(activation.leave(failure) for activation in reversed(activations)))
        finally:  # where that was interrupted
            for activation in reversed(activations):
                activation.leave()
        try:
            if failure is None:
                raise_error(second)
            elif second is not None:
                failure.add_note(f"ending on_device failed too: {second!r}")
        finally:
            del failure, second  # no cycles with their tracebacks
