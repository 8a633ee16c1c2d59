"""What of a component is on the device at a time, told from its declarations: all of it, or the rest and the slots of its blocks."""

from collections.abc import Iterator

import attrs
import torch

from omni_offload.discovery import modules_outside
from omni_offload.plan import PlannedComponent, Treatment, streamed_blocks
from omni_offload.residency.derived import derived_names
from omni_offload.testing.observe import span_of

__all__ = ["Layout", "layout_of"]

_ALIGNMENT = 64
#: Buffers up to this size (bytes) stay with the rest.
_SMALL_BUFFER = 1 << 20
_REST = ""
_UNIT = 512


@attrs.frozen(kw_only=True)
class Layout:
    """The device bytes of one component, padding included.

    Attributes:
        rest: Of what is on the device whenever the component is used: all of it where nothing streams.
        blocks: By path, of the weights that travel with each block that streams, in declared order. What blocks share with
            others, and small buffers, are the rest's.
        slots: Device buffers that the blocks take turns in.
        travelling: Full names of the tensors that travel with blocks.
    """

    rest: int
    blocks: dict[str, int]
    slots: int
    travelling: frozenset[str]

    @property
    def slots_bytes(self) -> int:
        """Bytes of the slots that its blocks need, each as large as the largest block."""
        return min(self.slots, sum(size > 0 for size in self.blocks.values())) * max(self.blocks.values(), default=0)

    @property
    def whole(self) -> int:
        """Bytes of everything."""
        return self.rest + sum(self.blocks.values())


def layout_of(pipeline: object, planned: PlannedComponent, component: torch.nn.Module, *, slots: int) -> Layout:
    """Return the layout of a component without resident blocks.

    Args:
        pipeline: The pipeline.
        planned: What is done with the component.
        component: The component; its weights are on the host.
        slots: Device buffers for the blocks.
    """
    streams = planned.treatment is Treatment.STREAM
    blocks = dict(streamed_blocks(pipeline, planned)) if streams else {}
    homes: dict[int, str] = {}
    for path, block in blocks.items():
        homes.update((id(inner), _REST if id(inner) in homes else path) for inner in block.modules())
    staying = {inner for path, inner in component.named_modules() if f"{planned.path}.{path}" in planned.rest_paths}
    homes.update((id(inner), _REST) for part in staying for inner in part.modules())
    homes.update((id(inner), _REST) for inner in modules_outside(component, blocks.values()))
    sizes = dict.fromkeys((_REST, *blocks), 0)
    travelling: set[str] = set()
    for group in _groups(component, homes):
        nbytes = max(one.stop for one in group) - group[0].start
        having = {one.home for one in group}
        small = nbytes <= _SMALL_BUFFER and all(one.buffer for one in group)
        home = having.pop() if len(having) == 1 and not small else _REST
        sizes[home] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        travelling.update(f"{planned.path}.{one.name}" for one in group if home != _REST)
    rest = sizes.pop(_REST)
    return Layout(rest=-(-rest // _UNIT) * _UNIT, blocks=sizes, slots=slots, travelling=frozenset(travelling))


@attrs.frozen
class _Found:
    """One tensor: where it begins and ends, what it travels with, its name, and whether it is a buffer or a plain attribute."""

    start: int
    stop: int
    home: str
    name: str
    buffer: bool


def _groups(component: torch.nn.Module, homes: dict[int, str]) -> Iterator[list[_Found]]:
    """Yield the tensors of a component that share bytes with one another."""
    found = [
        _Found(*span_of(tensor), homes.get(id(inner), _REST), f"{path}.{name}" if path else name, buffer)
        for path, inner in component.named_modules()
        for name, tensor, buffer in _own(inner)
        if tensor.numel()
    ]
    group: list[_Found] = []
    for one in sorted(found, key=lambda one: (one.start, one.stop)):
        if group and one.start >= max(other.stop for other in group):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name and value of a module's tensors, without its children's, and whether each is a buffer, or a plain attribute."""
    state = vars(module)
    computed = derived_names(state)
    plain = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name not in computed}
    for table, buffer in ((state["_parameters"], False), (state["_buffers"], True), (plain, True)):
        yield from ((name, tensor, buffer) for name, tensor in table.items() if tensor is not None)
