"""What is done with one component: the table of who goes where."""

import attrs

from omni_offload.config import DLOTransfer, OffloadConfig, OffloadPlan, OffloadStrategy, encoder_kind
from omni_offload.discovery import Component, Problems, find_module, fsdp_parameters
from omni_offload.plan.model import PlannedComponent, Treatment
from omni_offload.plan.topology import Block, blocks_at, declared_stacks
from omni_offload.plan.weights import weight_bytes
from omni_offload.protocols import DIT_COMPONENT, VAE_COMPONENT, supports_component_discovery
from omni_offload.refusals import UNEQUAL_ENCODER

__all__ = ["ComponentPlanner"]


@attrs.define(kw_only=True)
class ComponentPlanner:
    """Plans the components of a pipeline, one by one.

    Args:
        pipeline: The pipeline.
        config: The configuration.
        plan: What the pipeline declares.
        problems: Where requests that cannot be served are added.
        blocks: The blocks of all components so far that stream.
    """

    pipeline: object
    config: OffloadConfig
    plan: OffloadPlan
    problems: Problems
    blocks: list[Block] = attrs.field(factory=list)

    def plan_component(self, component: Component) -> PlannedComponent:
        """The component's treatment.

        | | components None | its kind selected | its kind not selected |
        |---|---|---|---|
        | model level | rotates | rotates | stays |
        | layer strategies | DiTs and encoders with stacks stream, the rest rotates | streams if it has stacks, else rotates
        | stays |

        A resident component always stays.
        """
        kind = self._kind(component)
        base = PlannedComponent(
            path=component.path,
            kind=kind,
            treatment=Treatment.STAY,
            aliases=component.aliases,
            reason="resident",
            on_demand=not self.plan.on_demand_component_paths.isdisjoint((component.path, *component.aliases)),
            weight_bytes=0 if component.module is None else weight_bytes(component.module),
        )
        if component.kind == "resident":
            return base
        if self.config.components is not None and kind not in self.config.components:
            return attrs.evolve(base, reason="not selected")
        base = attrs.evolve(base, treatment=Treatment.ROTATE, reason="selected")
        layers = self.config.strategy in {OffloadStrategy.LAYERWISE, OffloadStrategy.DISTRIBUTED_LAYERWISE}
        if not layers or not _holds_weights(component, base) or (self.config.components is None and component.kind == VAE_COMPONENT):
            return base
        return self._stream(component, base)

    def _kind(self, component: Component) -> str:
        if component.kind != "encoder":
            return component.kind
        kinds = (encoder_kind(path, self.plan) for path in (component.path, *component.aliases))
        return next((kind for kind in kinds if kind is not None), "encoder")

    def _stream(self, component: Component, base: PlannedComponent) -> PlannedComponent:
        distributed = self.config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE
        scan = distributed or not supports_component_discovery(self.pipeline)
        paths = declared_stacks(component, self.plan, scan=scan, problems=self.problems)
        stacks = {path: blocks_at(self.pipeline, path, self.problems) for path in paths}
        blocks = [block for stack in stacks.values() for block in stack]
        options = self.config.options_for(base.kind)
        if len(blocks) < 2:
            selected = self.config.components is not None
            if blocks and (selected or options.resident_layers or options.weight_transfer or options.checkpoint):
                self.problems.about_config(
                    f"{base.kind!r} is to stream, and component {base.path!r} has a stack of one block ({blocks[0][0]}); "
                    "declare the blocks in it, or use mode 'module'"
                )
            return attrs.evolve(base, reason="selected, one block" if blocks else "selected, no blocks declared")
        self.blocks.extend(blocks)
        return attrs.evolve(
            base,
            treatment=Treatment.STREAM,
            block_paths=tuple(path for path, stack in stacks.items() if stack),
            rest_paths=self._rest(component, blocks),
            resident_layers=self._resident_layers(base, len(blocks)),
            transfer=self._transfer(base) if distributed else None,
        )

    def _rest(self, component: Component, blocks: list[Block]) -> tuple[str, ...]:
        inside = {id(module) for _, block in blocks for module in block.modules() if module is not block}
        places = (component.path, *component.aliases)
        rest = [path for path in sorted(self.plan.rest_submodules) if any(path.startswith(f"{p}.") for p in places)]
        for path in rest:
            module = find_module(self.pipeline, path, Problems(path))  # where it leads nowhere is said already
            if module is not None and id(module) not in inside:
                self.problems.about_path(
                    f"_offload_plan.rest_submodules names {path!r}, which is in no block of {component.path!r}; drop it"
                )
        return tuple(rest)

    def _resident_layers(self, base: PlannedComponent, blocks: int) -> int | None:
        paths = self.plan.resident_dit_paths
        if base.kind == DIT_COMPONENT and paths and paths.isdisjoint((base.path, *base.aliases)):
            return 0
        number = self.config.options_for(base.kind).resident_layers
        if number is not None and number > blocks:
            self.problems.about_config(
                f"layer_options.{base.kind}.resident_layers is {number}, and component {base.path!r} has {blocks} blocks; give fewer"
            )
        return number

    def _transfer(self, base: PlannedComponent) -> DLOTransfer:
        transfer = self.config.transfer_for(base.kind)
        equal = not self.plan.encoder_dlo_weight_replication.isdisjoint((base.path, *base.aliases))
        if base.kind == DIT_COMPONENT or equal or transfer is DLOTransfer.RANK_LOCAL:
            return transfer
        if self.config.options_for(base.kind).weight_transfer is not None:
            found = f"layer_options.{base.kind}.weight_transfer is 'allgather', and _offload_plan does not say that component "
            self.problems.about_config(UNEQUAL_ENCODER.of(f"{found}{base.path!r} has equal weights on all ranks"))
        return DLOTransfer.RANK_LOCAL


def _holds_weights(component: Component, planned: PlannedComponent) -> bool:
    """Whether a component has weights, also if others own them all."""
    taken = () if component.module is None else fsdp_parameters(component.module, component.path)
    return planned.weight_bytes > 0 or any(True for _ in taken)
