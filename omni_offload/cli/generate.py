"""One picture, offloaded, with everything measured; and the same picture by a resident run, to compare."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from rich.console import Console

from omni_offload.backends import OffloadBackend
from omni_offload.cli.places import Kind, Place, fewer_threads
from omni_offload.cli.problems import InputError
from omni_offload.cli.progress import shown_progress, shown_wait
from omni_offload.cli.targets import Job
from omni_offload.config import OffloadConfig, format_bytes
from omni_offload.errors import OffloadError
from omni_offload.mixins import OmniOffloadMixin
from omni_offload.plan import ResolvedOffloadPlan, Treatment, resolve_offload_plan
from omni_offload.testing import sim
from omni_offload.trace import ComponentReport, Recording

__all__ = ["Outcome", "Request", "generate"]

_SLACK = 1 << 16
"""Bytes of a chosen capacity that the allocator's granularity may take."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a run did. Sizes are bytes.

    Attributes:
        pipeline: The class that ran.
        outputs: What it made, on the CPU.
        strategy: How it was offloaded; None where it was not.
        components: A row each; without offload only names and weights are meant.
        weight_bytes: Of all components.
        capacity: Of the device; None where it is the CPU.
        peak: Most that was allocated on the device, activations included.
        resident_peak: The same of the resident run, where there was one.
        equal: Whether the resident run made the same bits; None where it was not made.
        unequal_reason: Why it was not made.
        races: Missing waits that the simulated accelerator found.
    """

    pipeline: str
    outputs: list[torch.Tensor]
    strategy: str | None = None
    components: tuple[ComponentReport, ...] = ()
    weight_bytes: int = 0
    capacity: int | None = None
    peak: int | None = None
    resident_peak: int | None = None
    equal: bool | None = None
    unequal_reason: str | None = None
    races: int | None = None


@attrs.frozen(kw_only=True)
class _Resident:
    """A run with all weights on the device: what it made, its peak, and the part of that which is no weights."""

    outputs: list[torch.Tensor]
    peak: int
    activations: int


@attrs.frozen(kw_only=True)
class Request:
    """How a job is run.

    Attributes:
        job: What is run.
        place: Where.
        config: How it is offloaded.
        capacity: Bytes of the simulated device; None: chosen, to hold the largest component and the activations.
        compare: Whether a resident run is made too, where the device is a real one.
        keep: What the recording of the offloaded run is given to, also of one that failed; None: it is not recorded.
    """

    job: Job
    place: Place
    config: OffloadConfig
    capacity: int | None = None
    compare: bool = True
    keep: Callable[[Recording], None] | None = None


def generate(request: Request, console: Console) -> Outcome:
    """Run a job where it is to be run.

    Args:
        request: What, where and how.
        console: Where progress is shown.

    Raises:
        InputError: The device cannot hold what has to be on it at once.
        OffloadError: The pipeline cannot be offloaded so.
    """
    place, capacity = request.place, request.capacity
    if capacity is not None and place.kind is not Kind.SIMULATED:
        raise InputError(f"--capacity is the simulated device's; {place.device} has its own, and --device-memory limits what is used of it")
    with shown_wait(f"loading {request.job.name}", console):
        pipeline = request.job.make_pipeline()
    if not isinstance(pipeline, OmniOffloadMixin):
        raise InputError(f"{type(pipeline).__name__} does not inherit OmniOffloadMixin, so it has no offload to run with")
    plan = resolve_offload_plan(pipeline, request.config)
    run = _Run(job=request.job, pipeline=pipeline, plan=plan, device=place.device, console=console, keep=request.keep)
    with fewer_threads(run.weight_bytes):
        if place.kind is Kind.CPU:
            return run.on_cpu()
        if place.kind is Kind.SIMULATED:
            with _quiet_device():
                return run.simulated(capacity)
        return run.accelerated(compare=request.compare)


@attrs.frozen(kw_only=True)
class _Run:
    """A pipeline that is run once or twice."""

    job: Job
    pipeline: Any
    plan: ResolvedOffloadPlan
    device: torch.device
    console: Console
    keep: Callable[[Recording], None] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all components."""
        return sum(component.weight_bytes for component in self.plan.components)

    def on_cpu(self) -> Outcome:
        """Run where the weights are."""
        outputs = self._call("on the CPU")
        rows = tuple(ComponentReport(name=c.path, treatment="cpu", weight_bytes=c.weight_bytes) for c in self.plan.components)
        return Outcome(pipeline=type(self.pipeline).__name__, outputs=outputs, components=rows, weight_bytes=self.weight_bytes)

    def simulated(self, capacity: int | None) -> Outcome:
        """Run resident without a limit first: that says what the activations take, and so what the device must hold."""
        sizes = self._use_bytes()
        at_once = self._bytes_at_once(sizes)
        if capacity is not None and capacity < at_once:
            largest = max(sizes, key=lambda path: sizes[path])
            raise InputError(
                f"--capacity {format_bytes(capacity)} is too small for the weights that are on the device at once: {largest} has "
                f"{sizes[largest]} bytes, and {at_once} are needed besides the activations"
            )
        resident = self._resident()
        needed = at_once + resident.activations + _SLACK
        chosen = capacity if capacity is not None else needed
        sim.configure(capacity=chosen + self._held())
        sim.reset_races()
        try:
            outcome = self._offloaded()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"a device of {format_bytes(chosen)} is too small for this run: its activations take about "
                f"{format_bytes(resident.activations)} besides {format_bytes(at_once)} of weights; give --capacity {needed} or more"
            ) from error
        return _compared(attrs.evolve(outcome, capacity=chosen, races=len(sim.races())), resident)

    def accelerated(self, *, compare: bool) -> Outcome:
        """Run offloaded, then resident where that fits and is wanted."""
        try:
            outcome = self._offloaded()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.device} ran out of memory, offloaded: {error}; free some, or give a smaller --device-memory"
            ) from error
        outcome = attrs.evolve(outcome, capacity=torch.accelerator.get_memory_info(self.device)[1])
        if not compare:
            return attrs.evolve(outcome, unequal_reason="a resident run was not asked for")
        try:
            resident = self._resident()
        except torch.OutOfMemoryError:
            return attrs.evolve(outcome, unequal_reason=f"a resident run does not fit on {self.device}")
        return _compared(outcome, resident)

    def _offloaded(self) -> Outcome:
        held = self._held()
        with self.pipeline.enable_omni_offload(self.plan.config, device=self.device) as backend:
            torch.accelerator.reset_peak_memory_stats(self.device)
            outputs = self._recorded(backend)
            torch.accelerator.synchronize(self.device)
            peak = torch.accelerator.max_memory_allocated(self.device)
            report = backend.report()
        return Outcome(
            pipeline=type(self.pipeline).__name__,
            outputs=outputs,
            strategy=report.strategy,
            components=report.components,
            weight_bytes=self.weight_bytes,
            peak=peak - held,
        )

    def _recorded(self, backend: OffloadBackend) -> list[torch.Tensor]:
        """Run, and give away what was recorded, also where the run fails."""
        label = f"offloaded on {self.device}"
        if self.keep is None:
            return self._call(label)
        recording = None
        try:
            with backend.record() as recording:
                return self._call(label)
        finally:
            if recording is not None and recording.complete:
                self.keep(recording)

    def _resident(self) -> _Resident:
        """Run with all weights on the device, which is free again afterwards."""
        held = self._held()
        try:
            self.pipeline.to(self.device)
            torch.accelerator.synchronize(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
            before = torch.accelerator.memory_allocated(self.device)
            outputs = self._call(f"resident on {self.device}")
            torch.accelerator.synchronize(self.device)
            peak = torch.accelerator.max_memory_allocated(self.device)
        finally:
            self.pipeline.to("cpu")
            torch.accelerator.empty_cache()
        return _Resident(outputs=outputs, peak=peak - held, activations=peak - before)

    def _held(self) -> int:
        """Return what others in this process hold on the device, in bytes: nothing, where this is the whole program."""
        gc.collect()
        torch.accelerator.synchronize(self.device)
        return int(torch.accelerator.memory_allocated(self.device))

    def _call(self, label: str) -> list[torch.Tensor]:
        inputs = self.job.make_inputs(self.pipeline)
        with torch.inference_mode(), shown_progress(self.pipeline, label, self.console):
            try:
                result = self.pipeline(**inputs)
            except ValueError as error:
                if isinstance(error, OffloadError):
                    raise
                raise InputError(f"{type(self.pipeline).__name__} refused its input: {error}") from error
        return [output.detach().cpu() for output in self.job.outputs(result)]

    def _use_bytes(self) -> dict[str, int]:
        """Return what the use of each component takes on the device, in bytes: of those that stream that is seen when it is enabled."""
        sizes = {component.path: component.weight_bytes for component in self.plan.components}
        if self.plan.treated(Treatment.STREAM):
            with self.pipeline.enable_omni_offload(self.plan.config, device=self.device) as backend:
                sizes |= {component.name: component.use_bytes for component in backend.report().components}
        return sizes

    def _bytes_at_once(self, sizes: Mapping[str, int]) -> int:
        """Return the weights (bytes) that are on the device together: what stays, and the largest that rotates or the budget."""
        stays = sum(sizes[component.path] for component in self.plan.treated(Treatment.STAY))
        rotating = {c.path: sizes[c.path] for c in self.plan.components if c.treatment is not Treatment.STAY}
        groups = [*((path,) for path in rotating), *self.plan.co_residents]
        largest = max((sum(rotating.get(path, 0) for path in group) for group in groups), default=0)
        budget = self.plan.config.device_memory
        return stays + largest if budget is None else max(stays + largest, min(budget, self.weight_bytes))


def _compared(outcome: Outcome, resident: _Resident) -> Outcome:
    pairs = zip(outcome.outputs, resident.outputs, strict=True)
    return attrs.evolve(outcome, equal=all(_same_bits(*pair) for pair in pairs), resident_peak=resident.peak)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@contextmanager
def _quiet_device() -> Iterator[None]:
    """Use the simulated accelerator with asynchronous copies and no limits, and put its settings back afterwards."""
    with sim.settings(mode="threads", races="record", poison=True, capacity=0, pinned_capacity=0, fail_alloc_in=-1, fail_pin_in=-1):
        yield
