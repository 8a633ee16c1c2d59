"""What a check is given: the case, the device, a resident run to compare with, and ways to enable and to call."""

import contextlib
import gc
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import attrs
import torch

from omni_offload.backends import owns_its_offload
from omni_offload.config import OffloadMode
from omni_offload.errors import ContractViolation
from omni_offload.factory import get_offload_backend
from omni_offload.plan import Treatment
from omni_offload.testing.case import PipelineCase
from omni_offload.testing.facts import NotRun
from omni_offload.testing.layout import Layout, layout_of
from omni_offload.testing.observe import Target, bytes_on, device_size, same_values
from omni_offload.testing.reference import Reference, Use, make_reference
from omni_offload.testing.snapshot import Snapshot
from omni_offload.testing.subject import Subject

__all__ = ["Bench", "NotRun"]

_SLACK = 8192


class Unprepared(RuntimeError):  # noqa: N818  (the state before)
    """The resident run was not made yet."""


class Bench(Subject):
    """One case on one device.

    Attributes:
        case: The case.
        exhaustive: Whether checks try everything instead of a seeded sample.
        check: The check that runs.
        note: What the check left out, for the report.
        races: The races found in the checks so far.
        least_budget: The least `device_memory` that the pipeline takes, once a check has found it.
        frozen: Whether the caller froze objects for the collector, which are left so; looked up once, as all are counted for it.

    Args:
        case: What is checked.
        device: An accelerator.
        mode: How weights are moved where a check asks for nothing else.
        exhaustive: As the attribute.
        seed: Of the samples.
    """

    def __init__(
        self, case: PipelineCase, device: torch.device, *, mode: OffloadMode = OffloadMode.MODULE, exhaustive: bool = False, seed: int = 0
    ) -> None:
        super().__init__(case, device, mode=mode)
        self.exhaustive = exhaustive
        self.check = ""
        self.note = ""
        self.races: list[str] = []
        self.least_budget: int | None = None
        self.frozen = gc.get_freeze_count() > 0
        self._seed = seed
        self._blocks: tuple[str, ...] | None = None
        self._block_uses: tuple[Use, ...] | None = None
        self._reference: Reference | Exception = Unprepared("call prepare() first")
        self._disable: dict[int, Callable[[], None]] = {}
        self._staying: dict[int, set[str]] = {}

    def random(self) -> random.Random:
        """Return a generator that gives each check of a case the same sample every time; other cases try other points."""
        return random.Random(f"{self._seed} {self.check} {self.case.name}")  # noqa: S311  (no secret)

    def sample(self, population: list[Any], count: int) -> list[Any]:
        """Return all of a list where the run is exhaustive, else a seeded sample of `count` in order."""
        if self.exhaustive or len(population) <= count:
            return population
        return [population[index] for index in sorted(self.random().sample(range(len(population)), count))]

    # ---- offload -------------------------------------------------------------------------------------------------------------

    def enable(self, pipeline: Any, *, device: torch.device | None = None, **keys: Any) -> Any:
        """Enable offload as a user would, and return the backend.

        Args:
            pipeline: One that `fresh` made.
            device: The device; None: the bench's.
            keys: Of the selector, beside the bench's mode.
        """
        config, device = self.config(**keys), device or self.device
        if callable(getattr(pipeline, "enable_omni_offload", None)):
            self._disable[id(pipeline)] = pipeline.disable_omni_offload
            backend = pipeline.enable_omni_offload(config, device=device)
        else:
            backend = get_offload_backend(config, device)
            if backend is None:
                raise NotRun(f"there is no backend for {config} on {device}")
            self._disable[id(pipeline)] = backend.disable
            backend.enable(pipeline)
        self._staying[id(pipeline)] = self.staying(pipeline, **keys)
        return backend

    def disable(self, pipeline: Any) -> None:
        """Disable offload as a user would; a pipeline that was never enabled is left alone."""
        self._disable.get(id(pipeline), lambda: None)()
        self._staying.pop(id(pipeline), None)

    @contextlib.contextmanager
    def enabled(self, pipeline: Any, **keys: Any) -> Iterator[Any]:
        """Have offload enabled in the body, with keys as for `enable`; also after an exception it is disabled."""
        backend = self.enable(pipeline, **keys)
        try:
            yield backend
        finally:
            self.disable(pipeline)

    def by_hand(self, pipeline: Any) -> bool:
        """Whether the pipeline moves its weights itself: in mode `module`, by a pair of methods that it wrote."""
        return self.mode is OffloadMode.MODULE and owns_its_offload(pipeline)

    def staying(self, pipeline: Any, **keys: Any) -> set[str]:
        """Return the components that are on the device while offload is enabled."""
        return {component.path for component in self.plan(pipeline, **keys).treated(Treatment.STAY)}

    def now_staying(self, pipeline: Any) -> set[str]:
        """Return the components that are on the device because offload is enabled now; none while it is not."""
        return self._staying.get(id(pipeline), set())

    def group(self, pipeline: Any, path: str) -> set[str]:
        """Return a component and those that move together with it."""
        return {path, *(name for names in self.plan(pipeline).co_residents if path in names for name in names)}

    def largest_group(self, pipeline: Any, staying: set[str], *, alone: bool = False) -> int:
        """Return the device bytes that the largest group of components that move together takes while it is used."""
        rotating = set(self.components(pipeline)) - staying
        return max((self.turn(pipeline, self.group(pipeline, path) & rotating, alone=alone) for path in rotating), default=0)

    def turn(self, pipeline: Any, paths: Iterable[str], *, alone: bool = False) -> int:
        """Return the device bytes that some components take while they are used: all of each, or the rests, and the slots.

        Args:
            pipeline: The pipeline; its weights are on the host.
            paths: The components; what is none is left out.
            alone: Whether the slots are as large as these components need; else as any of the pipeline does: they are shared.
        """
        components, streaming = self.components(pipeline), self.layouts(pipeline)
        paths = components.keys() & paths
        whole = device_size([components[path] for path in paths - streaming.keys()])
        there = paths & streaming.keys()
        slots = max((streaming[path].slots_bytes for path in (there if alone else streaming if there else ())), default=0)
        return whole + sum(streaming[path].rest for path in there) + slots

    def layouts(self, pipeline: Any, **keys: Any) -> dict[str, Layout]:
        """Return, by path, what is the rest and what travels with which block of the components that stream; none in mode `module`."""
        plan = self.plan(pipeline, **keys)
        streaming = plan.treated(Treatment.STREAM)
        return {c.path: layout_of(pipeline, c, operator.attrgetter(c.path)(pipeline), slots=plan.config.slots) for c in streaming}

    def require_streaming(self) -> None:
        """Require, in mode `layer`, that a component streams: without one the run would be that of mode `module`.

        Raises:
            NotRun: Nothing streams; the reason says what is to be declared.
        """
        if self.mode is OffloadMode.LAYER and not self._blocks:
            pipeline = self.fresh()
            if self.not_streaming(pipeline) is None:
                raise NotRun("no component streams: no stack of two or more blocks is declared; see OffloadPlan.block_attrs")
            self._blocks = tuple(target.path for target in self.blocks(pipeline))

    @property
    def block_paths(self) -> tuple[str, ...]:
        """The paths of the blocks that stream; none in mode `module`."""
        return self._blocks or ()

    @property
    def block_uses(self) -> tuple[Use, ...]:
        """The uses of the blocks that stream in a resident run, made once, and the device bytes beyond the weights when each began."""
        if self._block_uses is None:
            pipeline = self.fresh()
            before = self.allocated()
            self.to_device(pipeline)
            start = self.allocated() - before
            uses = self.count_uses(pipeline, lambda: self.call(pipeline, keep=False), self.blocks(pipeline))
            self._block_uses = tuple(attrs.evolve(use, allocated=use.allocated - before - start) for use in uses)
            self._made = [made for made in self._made if made is not pipeline]
        return self._block_uses

    # ---- the resident run ----------------------------------------------------------------------------------------------------

    @property
    def reference(self) -> Reference:
        """The resident run, made by `prepare`.

        Raises:
            Exception: What the resident run raised.
        """
        if isinstance(self._reference, Reference):
            return self._reference
        raise self._reference

    @property
    def unrunnable(self) -> Exception | None:
        """What the resident run raised; None: it went well."""
        return None if isinstance(self._reference, Reference) else self._reference

    def prepare(self) -> None:
        """Make the resident run, once; what it raises is raised where a check needs it."""
        if isinstance(self._reference, Unprepared):
            try:
                self._reference = make_reference(self)
            except Exception as error:  # noqa: BLE001  (as said)
                self._reference = error.with_traceback(None)
            finally:
                self.clean_up()

    def used(self, pipeline: Any) -> list[Target]:
        """Return the targets that a call uses."""
        used = {use.name for use in self.reference.uses}
        return [target for target in self.targets(pipeline) if str(target) in used]

    # ---- verdicts ------------------------------------------------------------------------------------------------------------

    def fail(self, expected: str, found: object, *, component: str = "") -> NoReturn:
        """Raise what a check raises: what was to be, and what was found instead, in which component.

        Raises:
            ContractViolation: Always.
        """
        where = f", component {component!r}" if component else ""
        raise ContractViolation(f"{self.check} on case {self.case.name!r}{where}: expected {expected}; found {found}")

    def require_equal(self, outputs: list[torch.Tensor], *, when: str, expected: Any = None) -> None:
        """Require that outputs equal those of the resident run, or `expected` ones, bit for bit; `when` tells what was done."""
        wanted = self.reference.outputs if expected is None else expected
        if not same_values(outputs, wanted):
            gaps = [
                float((a.double() - b.double()).abs().max())
                for a, b in zip(outputs, wanted, strict=False)
                if a.shape == b.shape and a.numel()
            ]
            self.fail(f"outputs {when} that equal the resident run's bit for bit", f"differences up to {max(gaps, default=float('nan'))}")

    def require_unchanged(self, snapshot: Snapshot, *, when: str, **aspects: bool) -> None:
        """Require that all is as it was at a snapshot; `aspects` are those of `Snapshot.differences`."""
        changed = snapshot.differences(**aspects)
        if changed:
            self.fail(f"everything {when} as it was before", some(changed))

    def require_left(self, pipeline: Any, base: int, *, when: str, times: int = 1, count_bytes: bool = True) -> None:
        """Require that the device holds only what stays: nothing, or while enabled the components that do not take turns.

        Args:
            pipeline: The pipeline.
            base: Bytes allocated before it was enabled.
            when: For the message.
            times: How many times what a resident call leaves behind (a scheduler's tables) may be there.
            count_bytes: Whether bytes are compared too, and not only where the weights are bound.
        """
        staying = self.now_staying(pipeline)
        components = self.components(pipeline)
        for path, module in components.items():
            names = bytes_on(module, self.device)
            if names and path not in staying:
                self.fail(f"no weight on {self.device} {when}", some(names), component=path)
        if not count_bytes:
            return
        stays = sum(device_size([components[path]]) for path in staying if path in components)
        allowed = base + stays + times * self.reference.left + (_SLACK if staying or not self.simulated else 0)
        if self.allocated(collect=False) > allowed and (found := self.allocated()) > allowed:
            self.fail(f"no device memory held {when} beyond what stays ({stays} bytes)", f"{found - allowed} bytes more")

    def require_disabled(self, pipeline: Any, base: int, pinned: int, *, when: str = "after disable", times: int = 1) -> None:
        """Require that disabling left nothing on the device and nothing pinned."""
        self.require_left(pipeline, base, when=when, times=times)
        if self.pinned() > pinned:
            self.fail(f"no pinned host memory {when}", f"{self.pinned() - pinned} bytes")

    # ---- the end of a check --------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Disable what the check left enabled, and forget its pipelines."""
        for pipeline in self._made:
            with contextlib.suppress(BaseException):
                self.disable(pipeline)
        self._made.clear()
        self._disable.clear()
        self._staying.clear()
        self._plans.clear()
        gc.collect()
        torch.accelerator.synchronize(self.device)


def some(lines: list[str], most: int = 6) -> str:
    """Return the first of some lines as one text."""
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
