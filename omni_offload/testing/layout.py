"""What of a component is on the device at a time, told from its declarations: all of it, or the rest and the slots of its blocks."""

from collections.abc import Iterator

import attrs
import torch

from omni_offload.plan import PlannedComponent, Treatment, streamed_blocks
from omni_offload.residency.derived import derived_names
from omni_offload.testing.observe import span_of

__all__ = ["Layout", "layout_of"]

_ALIGNMENT = 64
#: Buffers up to this size (bytes) stay with the rest.
_SMALL_BUFFER = 1 << 20
_REST = ""


@attrs.frozen(kw_only=True)
class Layout:
    """The device bytes of one component, padding included.

    Attributes:
        rest: Of what is on the device whenever the component is used: all of it where nothing streams.
        blocks: By path, of the weights that travel with each block that streams, in declared order. What blocks share with
            others, and small buffers, are the rest's.
        slots: Device buffers that the blocks take turns in.
    """

    rest: int
    blocks: dict[str, int]
    slots: int

    @property
    def slot(self) -> int:
        """Bytes of one slot: the largest block's."""
        return max(self.blocks.values(), default=0)

    @property
    def turn(self) -> int:
        """Bytes that the component takes while it is used: the rest, and all slots."""
        return self.rest + min(self.slots, sum(size > 0 for size in self.blocks.values())) * self.slot

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
    homes = {id(inner): path for path, block in blocks.items() for inner in block.modules()}
    staying = {inner for path, inner in component.named_modules() if f"{planned.path}.{path}" in planned.rest_paths}
    homes.update((id(inner), _REST) for part in staying for inner in part.modules())
    sizes = dict.fromkeys((_REST, *blocks), 0)
    for nbytes, having, small in _groups(component, homes):
        sizes[having.pop() if len(having) == 1 and not small else _REST] += nbytes
    rest = sizes.pop(_REST)
    return Layout(rest=-(-rest // 512) * 512, blocks=sizes, slots=slots)


def _groups(component: torch.nn.Module, homes: dict[int, str]) -> Iterator[tuple[int, set[str], bool]]:
    """Yield the padded bytes of tensors that share bytes, the homes that have them, and whether they are no more than a small buffer."""
    found = sorted(
        ((*span_of(tensor), homes.get(id(inner), _REST), buffer) for inner in component.modules() for tensor, buffer in _own(inner)),
        key=lambda one: one[:2],
    )
    group: list[tuple[int, int, str, bool]] = []
    for one in [*found, None]:
        if group and (one is None or one[0] >= max(stop for _, stop, _, _ in group)):
            nbytes = max(stop for _, stop, _, _ in group) - group[0][0]
            small = nbytes <= _SMALL_BUFFER and all(buffer for *_, buffer in group)
            yield -(-nbytes // _ALIGNMENT) * _ALIGNMENT, {home for _, _, home, _ in group}, small
            group = []
        if one is not None:
            group.append(one)


def _own(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors of a module without its children, and whether each is a buffer, or a plain attribute."""
    state = vars(module)
    computed = derived_names(state)
    yield from ((tensor, False) for tensor in state["_parameters"].values() if tensor is not None and tensor.numel())
    plain = [value for name, value in state.items() if isinstance(value, torch.Tensor) and name not in computed]
    yield from ((tensor, True) for tensor in (*state["_buffers"].values(), *plain) if tensor is not None and tensor.numel())
