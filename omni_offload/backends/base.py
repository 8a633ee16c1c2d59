"""The lifecycle that every backend has, and the table of which backend manages which pipeline."""

import abc
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch.utils.weak import WeakIdKeyDictionary

from omni_offload.accelerator import Accelerator, resolve_device
from omni_offload.backends.failures import raise_error
from omni_offload.backends.foreign import refuse_foreign_offload
from omni_offload.config import OffloadConfig
from omni_offload.discovery import module_at
from omni_offload.errors import OffloadConfigError, OffloadStateError
from omni_offload.plan import ResolvedOffloadPlan, resolve_offload_plan
from omni_offload.residency.lost import refuse_weightless
from omni_offload.trace import OffloadReport, Recording

__all__ = ["OffloadBackend", "backend_of", "manage"]

logger = logging.getLogger(__name__)

_BACKENDS: MutableMapping[Any, "OffloadBackend"] = WeakIdKeyDictionary()
_LOCK = threading.RLock()


def backend_of(pipeline: object) -> "OffloadBackend | None":
    """Return the backend that manages a pipeline, also one whose enable was interrupted; None where there is none."""
    return _BACKENDS.get(pipeline)


def manage(pipeline: Any, backend: "OffloadBackend") -> "OffloadBackend":
    """Enable a backend for a pipeline, unless one that was asked for the same manages it; what an interrupt left is repaired first.

    Returns:
        The backend that manages the pipeline now.

    Raises:
        OffloadStateError: A backend manages the pipeline that was asked for something else.
    """
    with _LOCK:
        present = backend_of(pipeline)
        if present is not None and present.enabled:
            if present.asked == backend.asked:
                return present
            raise OffloadStateError(
                f"{type(pipeline).__name__} is offloaded on {present.device} with {present.config}, and {backend.config} on "
                f"{backend.device} was asked for, or another plan; call disable_omni_offload() or disable_omni_model_cpu_offload() first"
            )
        if present is not None:
            present.disable()
        backend.enable(pipeline)
        return backend


class OffloadBackend(abc.ABC):
    """Moves a pipeline's weights while it is enabled. At most one backend manages a pipeline.

    Attributes:
        config: What was asked for.
        device: The device, with its index.
        enabled: Whether it manages a pipeline now.

    Args:
        config: What is asked for.
        device: The device; None for the current accelerator.
        plan: A plan made earlier (by a planner); None: resolved from the pipeline when it is enabled.

    Raises:
        OffloadStateError: There is no such device.
    """

    def __init__(self, config: OffloadConfig, device: torch.device | str | None = None, *, plan: ResolvedOffloadPlan | None = None) -> None:
        self.config = config
        self.device = resolve_device(device)
        self.enabled = False
        self._given_plan = plan
        self._plan: ResolvedOffloadPlan | None = None
        self._pipeline: weakref.ref[Any] | None = None
        self._shut_down = False
        self._touched = False
        self._lock = threading.RLock()

    # ---- the seed's methods --------------------------------------------------------------------------------------------------

    def enable(self, pipeline: Any) -> None:
        """Manage a pipeline: check everything, then commit or roll back. Enabling the same pipeline again does nothing.

        Args:
            pipeline: A diffusers pipeline, a module or a plain object; only a weak reference to it is kept.

        Raises:
            OffloadStateError: Another backend manages the pipeline or a component; another library's offload is on; or this backend
                manages another pipeline or was shut down.
            OffloadConfigError: What the pipeline is cannot be served with this configuration.
            ComponentPathError: The pipeline's declarations and its components disagree.
        """
        with _LOCK, self._lock:
            if self._shut_down:
                raise OffloadStateError(f"enable was asked of a {type(self).__name__} that was shut down; make a new backend")
            if self.enabled and self.pipeline is pipeline:
                return
            self._refuse_second_owner(pipeline)
            refuse_foreign_offload(pipeline)
            self._plan = plan = self._make_plan(pipeline)
            refuse_weightless({c.path: module_at(pipeline, c.path) for c in plan.components}, pipeline=pipeline)
            try:
                self._touched = True
                self._pipeline = weakref.ref(pipeline)
                _BACKENDS[pipeline] = self
                self._install(pipeline, plan)
                self.enabled = True
            except BaseException as error:
                self._roll_back(pipeline, error)
                raise
            logger.info("offload enabled: %s on %s, %s", plan.pipeline_class, self.device, plan.strategy.value)

    def disable(self) -> None:
        """Stop managing the pipeline: whole weights on the host, nothing on the device, nothing pinned, no hooks. Idempotent.

        Repairs what an interrupted enable, call or disable left. It does not promise the original device.

        Raises:
            OffloadStateError: A call on the pipeline is running in this thread. One in another thread is waited for.
        """
        self._between_calls(self._disable)

    def _disable(self) -> None:
        with self._lock:
            if not self._touched:
                return
            self.enabled = False  # first: what is half undone is not to be taken for enabled
            raise_error(self._uninstall(undo=False))
            self._forget()
            logger.info("offload disabled: %s", self._plan.pipeline_class if self._plan else "")

    def __enter__(self) -> Self:
        """Use the backend as a context; it is enabled already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Disable it, also after an exception, which goes on."""
        self.disable()

    def is_enabled(self) -> bool:
        """Whether a pipeline is managed now."""
        return self.enabled

    def shutdown(self) -> None:
        """Do what process exit needs and no more; enabling afterwards is an error. Idempotent."""
        self._shut_down = True
        self.disable()

    # ---- the rest of the interface ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def release(self) -> None:
        """Free the device now of everything that does not run and need not stay; waits for other threads' calls."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Count every device copy as stale, so that the next use reads its master: for edits that no counter or sample shows."""

    @abc.abstractmethod
    def report(self) -> OffloadReport:
        """Return what was moved since it was enabled.

        Raises:
            OffloadStateError: It manages no pipeline.
        """

    @abc.abstractmethod
    def record(self) -> contextlib.AbstractContextManager[Recording]:
        """Return a context in which it is noted what is copied, computed and waited for when, and what the device holds.

        The recording is filled when the context ends, also by an exception, which goes on; the host then waits for the device. One
        recording a device runs at a time. While none runs nothing is noted.

        Raises:
            OffloadStateError: It manages no pipeline; or (when it is entered) a recording of the device runs already.
        """

    @abc.abstractmethod
    def begin_call(self, call: object) -> None:
        """Note that a call on the pipeline begins; `call` is its token."""

    @abc.abstractmethod
    def end_call(self, call: object, *, error: BaseException | None) -> BaseException | None:
        """Note that a call ends.

        Args:
            call: Its token.
            error: What ended it; None where it went well.

        Returns:
            The error to raise instead, or None.
        """

    @abc.abstractmethod
    def on_device(self, *components: str) -> Any:
        """Return a context in which components are on the device; on an exception they are let go, and it goes on.

        Args:
            components: Declared paths.

        Raises:
            ComponentPathError: A name is not managed.
            OffloadStateError: It manages no pipeline, or the pipeline drives its offload itself.
        """

    @abc.abstractmethod
    def writing(self, component: str, methods: Sequence[str] = ()) -> Any:
        """Return a context in which a component is on the device and all of it counts as written, also through `.data`.

        One that is not managed is left where it is. The blocks of one that streams come one after the other.

        Args:
            component: Its path.
            methods: The methods, of modules within streamed blocks, that write their weights.
        """

    @property
    @abc.abstractmethod
    def call_depth(self) -> int:
        """How many calls on the pipeline run within one another now; 1 in an outermost call, 0 outside."""

    @property
    def pipeline(self) -> Any:
        """The pipeline that is managed; None where there is none, or it is gone."""
        return self._pipeline() if self._pipeline is not None else None

    @property
    def asked(self) -> tuple[object, ...]:
        """What was asked for: two backends that are asked for the same do the same."""
        return self.config, self.device, self._given_plan

    @property
    def plan(self) -> ResolvedOffloadPlan | None:
        """The plan that is carried out."""
        return self._plan

    # ---- for subclasses --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _install(self, pipeline: Any, plan: ResolvedOffloadPlan) -> None:
        """Make the plan true. May fail at any point: what it holds it has noted first, for `_uninstall`."""

    @abc.abstractmethod
    def _uninstall(self, *, undo: bool) -> BaseException | None:
        """Give up what `_install` took, in whatever state it is. Idempotent; returns the first failure after every step ran."""

    @abc.abstractmethod
    def _between_calls(self, work: Callable[[], None]) -> None:
        """Do something while no call runs: wait for those of other threads.

        Raises:
            OffloadStateError: A call of this thread runs, from under which it would pull the weights.
        """

    def _make_plan(self, pipeline: Any) -> ResolvedOffloadPlan:
        plan = resolve_offload_plan(pipeline, self.config)
        if self._given_plan is None:
            return plan
        asked, found = ({c.path for c in p.components} for p in (self._given_plan, plan))
        if asked != found or self._given_plan.pipeline_class != plan.pipeline_class:
            raise OffloadConfigError(
                f"the plan given is not one for this {type(pipeline).__name__}; it differs from the resolved one:\n"
                f"{plan.diff(self._given_plan)}"
            )
        return self._given_plan

    @property
    def accelerator(self) -> Accelerator:
        """The device's streams and memory."""
        return Accelerator.of(self.device)

    def _refuse_second_owner(self, pipeline: Any) -> None:
        other = backend_of(pipeline)
        if self._touched:
            raise OffloadStateError(
                f"this {type(self).__name__} manages a {type(self.pipeline).__name__} already, or was interrupted; call disable() "
                "first, or make a backend for each pipeline"
            )
        if other is not None:
            raise OffloadStateError(
                f"{type(pipeline).__name__} is managed by a {type(other).__name__} on {other.device} already; disable that one first"
            )

    def _roll_back(self, pipeline: Any, error: BaseException) -> None:
        second = self._uninstall(undo=True)
        if second is not None:
            error.add_note(f"rolling back failed too ({second!r}); call disable() on {type(pipeline).__name__} to repair it")
        else:
            self._forget()

    def _forget(self) -> None:
        self.enabled = False
        pipeline = self.pipeline
        if pipeline is not None and _BACKENDS.get(pipeline) is self:
            del _BACKENDS[pipeline]
        self._pipeline = None
        self._touched = False
