"""What tensors keep: their values, their ties, their writes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from omni_offload.errors import OffloadError
from omni_offload.testing.bench import Bench, some
from omni_offload.testing.checks.residency import replay
from omni_offload.testing.observe import same_values
from omni_offload.testing.snapshot import Snapshot

__all__ = [
    "check_buffers",
    "check_shared_weight",
    "check_state_dict",
    "check_ties",
    "check_written_weights",
]


def probes(bench: Bench, pipeline: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield for every component that a call uses an inner module that holds parameters and is used.

    Where blocks stream it is drawn, for each check and case anew: in one of the blocks, or beside them.
    """
    blocks, random = tuple(f"{path}." for path in bench.block_paths), bench.random()
    for path, module in bench.components(pipeline).items():
        names = bench.reference.probes.get(path)
        if names:
            inside = [name for name in names if f"{path}.{name}.".startswith(blocks)] if blocks else []
            outside = [name for name in names if name not in inside]
            yield path, module.get_submodule(random.choice([*inside, *outside[:1]]) if inside else names[0])


@contextlib.contextmanager
def within_uses(pairs: list[tuple[str, torch.nn.Module]], look: Callable[[str, torch.nn.Module], None]) -> Iterator[None]:
    """Run a function at the beginning of every use of some inner modules, in the activation of their component."""

    def hook_of(path: str) -> Callable[..., None]:
        return lambda module, *_: look(path, module)

    handles = [module.register_forward_pre_hook(hook_of(path)) for path, module in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_weight(module: torch.nn.Module) -> torch.nn.Parameter:
    """Return a parameter of a module's own."""
    return next(module.parameters(recurse=False))


def check_buffers(bench: Bench) -> None:
    """Non-persistent buffers come along, and a buffer written or replaced in forward is kept, from call to call and after disable."""
    pipeline = bench.fresh()
    base, pinned = bench.allocated(), bench.pinned()
    pairs = list(probes(bench, pipeline))
    uses = dict.fromkeys((path for path, _ in pairs), 0)
    for _, module in pairs:
        for name in ("_contract_written", "_contract_replaced"):
            module.register_buffer(name, torch.zeros(3), persistent=False)

    def write(path: str, module: torch.nn.Module) -> None:
        uses[path] += 1
        module.get_buffer("_contract_written").add_(1)
        module._contract_replaced = module.get_buffer("_contract_replaced") + 1  # noqa: SLF001  (the check's own)

    def require_kept(when: str) -> None:
        for path, module in pairs:
            for name in ("_contract_written", "_contract_replaced"):
                buffer = getattr(module, name)
                if not buffer.cpu().eq(uses[path]).all():
                    bench.fail(f"{uses[path]} in a buffer that each use adds one to, {when}", buffer.tolist(), component=path)
                if buffer.device.type != "cpu" and path not in bench.now_staying(pipeline):
                    bench.fail(f"a buffer on the host {when}", f"{name} on {buffer.device}", component=path)

    with within_uses(pairs, write):
        with bench.enabled(pipeline):
            for number in (1, 2):
                bench.require_equal(bench.call(pipeline), when="with buffers that are written")
                require_kept(f"after call {number}")
        require_kept("after disable")
    bench.require_disabled(pipeline, base, pinned)


def check_written_weights(bench: Bench) -> None:
    """A weight written on the device in a use is written back: it is kept from call to call, and after disable."""
    pipeline = bench.fresh()
    pairs = list(probes(bench, pipeline))
    wanted = {path: first_weight(module).detach().clone() for path, module in pairs}
    armed = dict.fromkeys(wanted, False)

    def write(path: str, module: torch.nn.Module) -> None:
        if armed[path]:
            armed[path] = False
            wanted[path].mul_(1.5)
            with torch.no_grad():
                first_weight(module).mul_(1.5)

    with within_uses(pairs, write), bench.enabled(pipeline):
        for _ in range(2):
            armed.update(dict.fromkeys(armed, True))
            bench.call(pipeline)
    for path, module in pairs:
        weight = first_weight(module)
        if weight.device.type != "cpu" or not same_values([weight], [wanted[path]]):
            bench.fail("a weight that was written in two uses to be as written, on the host", "another value", component=path)


def check_ties(bench: Bench) -> None:
    """Tensors that share memory share it within uses, between calls and after disable: aliases, and views of a part."""
    pipeline = bench.fresh()
    pairs = [(path, module) for path, module in probes(bench, pipeline) if path not in bench.reference.recast]
    if bench.reference.recast:
        bench.note = f"a cast tears ties, those of a resident pipeline too: not of {', '.join(bench.reference.recast)}"
    for _, module in pairs:
        weight = first_weight(module).detach()
        module.register_buffer("_contract_tie", weight, persistent=False)
        module.register_buffer(
            "_contract_part", weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel() - 1), persistent=False
        )

    def require_tied(path: str, module: torch.nn.Module, when: str = "within a use") -> None:
        weight, tie, part = first_weight(module), module.get_buffer("_contract_tie"), module.get_buffer("_contract_part")
        gaps = (tie.data_ptr() - weight.data_ptr(), part.data_ptr() - weight.data_ptr())
        if gaps != (0, (weight.numel() - 1) * weight.itemsize):
            bench.fail(f"an alias and a view of a weight to share its memory {when}", f"addresses {gaps} bytes away", component=path)

    with within_uses(pairs, require_tied):
        for pin in (True, False):
            with bench.enabled(pipeline, pin_memory=pin):
                for path, module in pairs:
                    require_tied(path, module, "after enable")
                bench.require_equal(bench.call(pipeline), when="with tied weights")
                for path, module in pairs:
                    require_tied(path, module, "after a call")
            for path, module in pairs:
                require_tied(path, module, "after disable")


def check_shared_weight(bench: Bench) -> None:
    """A parameter object that two components hold stays one, within uses of either; or it is refused with nothing touched."""
    pipeline = bench.fresh()
    pairs = list(probes(bench, pipeline))
    if len(pairs) < 2:
        bench.note = "a call uses one component only"
        return
    (_, first), (other_path, second) = pairs[0], pairs[-1]
    base, pinned = bench.allocated(), bench.pinned()
    second.register_parameter("_contract_shared", first_weight(first))
    before = Snapshot(bench.components(pipeline), pipeline)

    def require_one(path: str, module: torch.nn.Module) -> None:
        weight = module._parameters.get("_contract_shared")  # noqa: SLF001  (the check's own)
        if weight is not None and weight.device != bench.device:
            bench.fail(f"a weight shared with {pairs[0][0]} on the device within a use of {path}", weight.device, component=path)

    try:
        bench.enable(pipeline)
    except OffloadError as error:
        bench.note = f"refused: {error}"
        bench.require_unchanged(before, when="after a refusal")
        bench.require_disabled(pipeline, base, pinned, when="after a refusal")
        return
    with within_uses([(other_path, second)], require_one):
        for number in (1, 2):
            bench.require_equal(bench.call(pipeline), when=f"of call {number} with a weight that two components share")
    bench.disable(pipeline)
    bench.require_unchanged(before, when="after disable", attributes=False)
    bench.require_disabled(pipeline, base, pinned)


def check_state_dict(bench: Bench) -> None:
    """state_dict is the same as before while enabled, between calls, and with a component still cached on the device."""
    pipeline = bench.fresh()
    components = bench.components(pipeline)
    before = {path: {name: t.detach().clone() for name, t in module.state_dict().items()} for path, module in components.items()}

    def require_same(when: str) -> None:
        for path, module in components.items():
            state = module.state_dict()
            if list(state) != list(before[path]):
                bench.fail(f"the same keys in state_dict {when}", "others", component=path)
            away = [name for name, tensor in state.items() if tensor.device.type != "cpu" and tensor.numel()]
            if away and path not in bench.now_staying(pipeline):
                bench.fail(f"a state_dict on the host {when}", some(away), component=path)
            if not same_values(state.values(), before[path].values()):
                bench.fail(f"the same values in state_dict {when}", "others", component=path)

    for pin in (True, False):
        with bench.enabled(pipeline, pin_memory=pin):
            require_same("after enable")
            bench.call(pipeline)
            require_same("after a call")
            for target in bench.used(pipeline):
                replay(bench, target, when="outside of a call")
                require_same(f"after {target}")
        require_same("after disable")
