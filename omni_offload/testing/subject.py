"""What is checked: the pipelines of a case, their components, their calls."""

import itertools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from omni_offload.config import OffloadConfig, OffloadMode, make_config
from omni_offload.discovery import Problems, discover_components, find_components
from omni_offload.errors import ContractViolation
from omni_offload.plan import ResolvedOffloadPlan, Treatment, resolve_offload_plan, streamed_blocks
from omni_offload.plan.declared import pipeline_plan
from omni_offload.plan.treatment import ComponentPlanner
from omni_offload.testing.case import PipelineCase
from omni_offload.testing.facts import DeviceFacts
from omni_offload.testing.observe import Target, watching
from omni_offload.testing.reference import Use

__all__ = ["Subject"]


def _has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


class Subject(DeviceFacts):
    """The pipelines of one case on one device.

    Attributes:
        case: The case.
        mode: How weights are moved where a check asks for nothing else.

    Args:
        case: What is checked.
        device: An accelerator.
        mode: As the attribute.
    """

    def __init__(self, case: PipelineCase, device: torch.device, *, mode: OffloadMode = OffloadMode.MODULE) -> None:
        super().__init__(device)
        self.case = case
        self.mode = mode
        self._made: list[Any] = []
        self._plans: dict[tuple[int, str], ResolvedOffloadPlan] = {}

    def fresh(self) -> Any:
        """Return a fresh pipeline on the CPU."""
        pipeline = self._of_case("make_pipeline", self.case.make_pipeline)
        if pipeline is None:
            raise ContractViolation(f"case {self.case.name!r}: expected make_pipeline() to return a pipeline; found None")
        self._made.append(pipeline)
        return pipeline

    def call(self, pipeline: Any, *, keep: bool = True, **more: Any) -> list[torch.Tensor]:
        """Run one call, with more arguments than the case's, and return its outputs on the CPU (or, without `keep`, nothing)."""
        inputs = {**self.inputs(pipeline), **more}
        with torch.no_grad():
            result = pipeline(**inputs)
            outputs = self._of_case("outputs", lambda: self.case.outputs(result))
        if not isinstance(outputs, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in outputs):
            found = [type(one).__name__ for one in outputs] if isinstance(outputs, list | tuple) else type(outputs).__name__
            raise ContractViolation(f"case {self.case.name!r}: expected outputs() to return a list of tensors; found {found}")
        return [tensor.detach().to("cpu", copy=True) for tensor in outputs] if keep else []

    def inputs(self, pipeline: Any) -> dict[str, Any]:
        """Return fresh keyword arguments of a call.

        Raises:
            ContractViolation: The case's factory failed, or returned something else.
        """
        inputs = self._of_case("make_inputs", lambda: self.case.make_inputs(pipeline))
        if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
            raise ContractViolation(
                f"case {self.case.name!r}: expected make_inputs() to return a dict of keyword arguments; found {type(inputs).__name__}"
            )
        return dict(inputs)

    def _of_case(self, name: str, factory: Callable[[], Any]) -> Any:
        """Run a function of the case; an error of its own is told from one of the pipeline's."""
        try:
            return factory()
        except Exception as error:
            error.add_note(f"raised by {name}() of case {self.case.name!r}, not by a check")
            raise

    def components(self, pipeline: Any) -> dict[str, torch.nn.Module]:
        """Return the components with weights, by path."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = discover_components(pipeline)
        weighty = (c for c in found if c.module is not None and _has_weights(c.module))
        return {c.path: c.module for c in weighty if c.module is not None}

    def targets(self, pipeline: Any) -> list[Target]:
        """Return `forward` and every declared entry point of every component that is there."""
        components = self.components(pipeline)
        declared = {path: methods for path, methods in self.plan(pipeline).entry_points if path}
        targets = [Target(path, module, "forward") for path, module in components.items()]
        for path, methods in declared.items():
            module = operator.attrgetter(path)(pipeline)
            targets += [Target(path, module, method) for method in methods if method != "forward" or path not in components]
        return targets

    def blocks(self, pipeline: Any) -> list[Target]:
        """Return `forward` of every block that streams; none in mode `module`."""
        streaming = self.plan(pipeline).treated(Treatment.STREAM)
        found = (block for component in streaming for block in streamed_blocks(pipeline, component))
        return [Target(path, block, "forward") for path, block in found]

    def component_of(self, pipeline: Any, path: str) -> str:
        """Return the component that a path lies in, or is."""
        return next(name for name in self.components(pipeline) if f"{path}.".startswith(f"{name}."))

    def to_device(self, pipeline: Any) -> None:
        """Bring a pipeline that is not offloaded to the device as a whole."""
        if callable(getattr(pipeline, "to", None)):
            pipeline.to(self.device)
        for module in self.components(pipeline).values():
            module.to(self.device)

    def config(self, **keys: Any) -> OffloadConfig:
        """Return the configuration of some selector keys; the bench's mode unless another is given.

        In mode `layer` there are two slots, the fewest, so that the blocks of small models take turns in them too.
        """
        mode = OffloadMode(keys.pop("mode", self.mode))
        return make_config({"mode": mode, **({"slots": 2} if mode is OffloadMode.LAYER else {}), **keys})

    def plan(self, pipeline: Any, **keys: Any) -> ResolvedOffloadPlan:
        """Return what enabling would do; it is resolved once in a check for each pipeline and configuration."""
        asked = id(pipeline), repr(sorted(keys.items()))
        if asked not in self._plans:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._plans[asked] = resolve_offload_plan(pipeline, self.config(**keys))
        return self._plans[asked]

    def not_streaming(self, pipeline: Any) -> dict[str, str] | None:
        """Return the DiTs with weights that do not stream in mode `layer`, each with the reason; None where nothing at all streams.

        What is wrong with the declarations is left to the checks: nothing is told of it here.
        """
        problems = Problems("")
        config = self.config(mode=OffloadMode.LAYER)
        planner = ComponentPlanner(pipeline=pipeline, config=config, plan=pipeline_plan(pipeline, problems), problems=problems)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            planned = [planner.plan_component(component) for component in find_components(pipeline, problems)]
        if not problems.found and all(component.treatment is not Treatment.STREAM for component in planned):
            return None
        rotating = (component for component in planned if component.kind == "dit" and component.treatment is Treatment.ROTATE)
        return {component.path: component.reason for component in rotating if component.weight_bytes}

    def count_uses(self, pipeline: Any, body: Callable[[], Any], targets: list[Target] | None = None) -> list[Use]:
        """Run a function and return the uses of components in it; a method within another of its component is none of its own.

        Args:
            pipeline: The pipeline.
            body: The function.
            targets: Methods within components whose uses are told instead.
        """
        uses: list[Use] = []
        inside: list[str] = []

        def around(target: Target, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            component = self.component_of(pipeline, target.path)
            if component not in inside:
                uses.append(Use(str(target), component, self.allocated(collect=False)))
            inside.append(component)
            try:
                return method(*args, **kwargs)
            finally:
                inside.pop()

        with watching(self.targets(pipeline) if targets is None else targets, around):
            body()
        return uses
