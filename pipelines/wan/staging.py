"""Stages of the Wan image-to-video pipeline, one of which is on the device at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from omni_offload import HookRegistry, ModelHook, ModuleResidency, run_cleanup_steps
from omni_offload.backends.inputs import align_inputs
from omni_offload.errors import OffloadStateError
from pipelines.wan.works import WORKS, require_whole

__all__ = ["Staging"]

_HOOK = "omni_wan_image_to_video"

_Steps = Iterable[tuple[str, Callable[[], None]]]


@attrs.define(eq=False, kw_only=True)
class _Stage:
    """A stage of one pipeline.

    Attributes:
        component: The component whose method is the work.
        residency: The weights that come and go.
        rotates: Whether it takes turns; else it is on the device while enabled.
        active: How many bodies use it now.
    """

    component: nn.Module
    residency: ModuleResidency
    rotates: bool
    active: int = 0


class Staging:
    """Who is on the device, and what is to be undone.

    A stage is loaded when its work begins, after the others have left. When its work ends, its weights are those on the host
    again; its device copies stay until another stage begins or the call ends; outside a call they leave at once. The current
    stream waits for the copy to the device; the host does not, if it is pinned.

    Args:
        device: Where the stages run, with its index.
        pin_memory: Whether the weights on the host are pinned.
        kinds: Kinds of components that take turns; None: all components.
    """

    def __init__(self, *, device: torch.device, pin_memory: bool, kinds: frozenset[str] | None) -> None:
        self.device = device
        self._pin_memory = pin_memory
        self._kinds = kinds
        self._stages: dict[str, _Stage] = {}
        self._calls = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied pipeline is not enabled."""
        return type(None), ()

    def plan(self, pipeline: Any) -> None:
        """Find the stages of a pipeline; None components are left out. Nothing is touched.

        Raises:
            OffloadStateError: Another owner manages a component.
            OffloadConfigError: The VAE holds weights that are in neither half of it.
        """
        for name, work in WORKS.items():
            component = getattr(pipeline, work.component)
            if component is None:
                continue
            modules = work.modules(component)
            residency = ModuleResidency(modules, self.device, pin_memory=self._pin_memory, name=name)
            rotates = self._kinds is None or work.kind in self._kinds
            self._stages[name] = _Stage(component=component, residency=residency, rotates=rotates)
        require_whole(pipeline.vae)

    def enable(self) -> None:
        """Take the weights over and put hooks on the work; `undo` repairs what this has done where it raises."""
        for stage in self._stages.values():
            stage.residency.prepare(keep_origin=True)
        for stage in self._stages.values():
            if not stage.rotates:
                stage.residency.load()
        for component in self._components():
            methods = {WORKS[name].method: name for name, stage in self._stages.items() if stage.component is component}
            HookRegistry.get_or_create(component).register_hook(_HOOK, _StageHook(self, methods), methods)

    def commit(self) -> None:
        """Let go of the device memory that weights were found in, and that `undo` would need."""
        for stage in self._stages.values():
            stage.residency.commit()

    def undo(self) -> BaseException | None:
        """Put everything back as it was before `enable` raised an error. Every step runs; the first failure is returned."""
        steps = [(f"put back {name}", _undoing(stage)) for name, stage in self._stages.items()]
        return run_cleanup_steps([*self._unhook_steps(), *steps])

    def disable(self) -> None:
        """Remove the hooks and bring all weights to the host. Every step runs, then the first failure is raised."""
        steps = [(f"restore {name}", _restoring(stage)) for name, stage in self._stages.items()]
        if (failure := run_cleanup_steps([*self._unhook_steps(), *steps])) is not None:
            raise failure

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Have one stage on the device while the body runs.

        An exception of the body passes unchanged. A stage within another leaves the outer one where it is.

        Raises:
            OffloadStateError: The pipeline has no such stage.
        """
        stage = self._stages.get(name)
        if stage is None:
            raise OffloadStateError(f"there is no stage {name!r}; this pipeline has: {', '.join(self._stages)}")
        before = stage.active

        def leave() -> None:
            stage.active = before
            if stage.rotates and not before:
                stage.residency.unbind()

        def offload() -> None:
            if stage.rotates and not stage.active and not self._calls:
                stage.residency.offload()

        with _cleanup([(f"leave {name}", leave), (f"offload {name}", offload)]):
            if stage.rotates and not before:
                self._evict(but=stage)
            stage.residency.load()
            stage.active = before + 1
            yield

    @contextmanager
    def call(self, pipeline: Any) -> Iterator[None]:
        """Keep stages on the device between their works, and free it when the outermost body ends, however it ends.

        Raises:
            OffloadStateError: A component was replaced since offload was enabled.
        """
        before = max(pipeline.offload_backend.call_depth - 1, 0)  # a count of its own would outlive an interrupt
        if not before:
            self._require_present(pipeline)
            self._settle()

        def leave() -> None:
            self._calls = before

        def evict() -> None:
            if not before:
                self._settle()
                self._evict()

        with _cleanup([("leave the call", leave), ("free the device", evict)]):
            self._calls = before + 1
            yield

    def rotates(self, name: str) -> bool:
        """Whether a stage takes turns on the device."""
        return self._stages[name].rotates

    def weight_that_requires_grad(self, name: str) -> str | None:
        """Return the name of a weight of a component that autograd would record, if there is one."""
        parameters = self._stages[name].component.named_parameters()
        return next((path for path, parameter in parameters if parameter.requires_grad), None)

    def _settle(self) -> None:
        """Repair what an interrupt left: where no call runs, no stage is in use."""
        for stage in self._stages.values():
            if stage.active:
                stage.active = 0
                if stage.rotates:
                    stage.residency.unbind(force=True)

    def _evict(self, *, but: _Stage | None = None) -> None:
        """Free the device of every stage that takes turns and is not in use."""
        leaving = [
            (f"offload {name}", stage.residency.offload)
            for name, stage in self._stages.items()
            if stage.rotates and not stage.active and stage is not but
        ]
        if (failure := run_cleanup_steps(leaving)) is not None:
            raise failure

    def _require_present(self, pipeline: Any) -> None:
        for name, work in WORKS.items():
            stage = self._stages.get(name)
            if getattr(pipeline, work.component) is not (None if stage is None else stage.component):
                raise OffloadStateError(
                    f"component {work.component!r} of {type(pipeline).__name__} was replaced while offload is enabled; "
                    "disable it, replace the component, and enable it again"
                )

    def _components(self) -> list[nn.Module]:
        return list({id(stage.component): stage.component for stage in self._stages.values()}.values())

    def _unhook_steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [(f"unhook {type(component).__name__}", _unhooking(component)) for component in self._components()]


class _StageHook(ModelHook):
    """Runs the methods of a component in their stages, with their inputs on the device.

    Args:
        staging: Has the stages.
        stages: Method to stage.
    """

    def __init__(self, staging: Staging, stages: Mapping[str, str]) -> None:
        self._staging = staging
        self._stages = stages
        self._open: list[ExitStack] = []

    def pre_forward(
        self, module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the stage to the device, and the inputs."""
        self._open.append(ExitStack())
        name = self._stages[method]
        self._refuse_autograd(name)
        self._open[-1].enter_context(self._staging.stage(name))
        return align_inputs(args, self._staging.device), align_inputs(kwargs, self._staging.device)

    def post_forward(self, module: nn.Module, method: str, output: Any) -> Any:
        """Leave the stage."""
        self._open.pop().close()
        return output

    def on_error(self, module: nn.Module, method: str, error: BaseException) -> None:
        """Leave the stage, and let go of the features that an autoencoder keeps between frames."""
        stack = self._open.pop()
        forget = getattr(module, "clear_cache", None)
        if callable(forget):
            stack.callback(forget)
        stack.__exit__(type(error), error, error.__traceback__)

    def _refuse_autograd(self, name: str) -> None:
        if not torch.is_grad_enabled() or not self._staging.rotates(name):
            return
        weight = self._staging.weight_that_requires_grad(name)
        if weight is not None:
            raise OffloadStateError(
                f"{name} was called where autograd would record {weight!r}, which leaves the device afterwards; call it "
                "under torch.no_grad() or torch.inference_mode()"
            )


@contextmanager
def _cleanup(steps: _Steps) -> Iterator[None]:
    """Run steps after the body, however it ends; the body's own error passes unchanged, with failures of steps as notes."""
    try:
        yield
    except BaseException as error:
        _note(error, run_cleanup_steps(steps))
        raise
    if (failure := run_cleanup_steps(steps)) is not None:
        raise failure


def _note(error: BaseException, failure: BaseException | None) -> None:
    if failure is not None and failure is not error:
        error.add_note(f"cleanup failed too: {failure!r}")


def _undoing(stage: _Stage) -> Callable[[], None]:
    return lambda: stage.residency.restore(to_origin=True)


def _restoring(stage: _Stage) -> Callable[[], None]:
    return lambda: stage.residency.restore(copy_back=not stage.rotates)


def _unhooking(component: nn.Module) -> Callable[[], None]:
    return lambda: HookRegistry.get_or_create(component).remove_hook(_HOOK)
