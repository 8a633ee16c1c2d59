"""Which parameters FSDP2 owns: it shards, moves and gathers them itself, and whoever else moves weights leaves them to it.

While a module runs, and after it where it is not told to reshard, whole parameters stand in the place of the sharded ones. So it is
the place that is known, not the object in it.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from omni_offload.discovery.walk import modules_of, named_modules_of

__all__ = ["flat_fsdp_modules", "fsdp_parameters", "left_to_fsdp", "look_for_fsdp", "managed_weights_of"]

_NONE: frozenset[str] = frozenset()
_OWNED: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def look_for_fsdp(root: nn.Module) -> None:
    """Note which parameters of a module, and of those within it, `fully_shard` has taken."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules_of(root):
        if isinstance(module, fsdp.FSDPModule):
            for holder, name in _taken(module):
                _OWNED[holder] = _OWNED.get(holder, _NONE) | {name}


def _taken(module: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the places of the parameters that one `fully_shard` has taken: module and name. Their names are private in torch."""
    state = module._get_fsdp_state()  # noqa: SLF001  (it has no public name)
    groups = getattr(state, "_fsdp_param_groups", None)  # older ones have one, or none
    for group in [state._fsdp_param_group] if groups is None else groups:  # noqa: SLF001  (as above)
        for parameter in () if group is None else group.fsdp_params:
            place = parameter._module_info  # noqa: SLF001  (as above)
            yield place.module, place.param_name
            yield from zip(place.shared_modules, place.shared_param_names, strict=True)


def left_to_fsdp(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own parameters that FSDP2 owns, as far as was looked for."""
    return _OWNED.get(module, _NONE) if _OWNED else _NONE


def fsdp_parameters(root: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what stands in the places that FSDP2 owns, in a module and those within it, with the full name of the place."""
    for where, module in named_modules_of(root, path):
        if owned := left_to_fsdp(module):
            yield from [(f"{where}.{name}", tensor) for name, tensor in module.named_parameters(recurse=False) if name in owned]


def flat_fsdp_modules(root: nn.Module, path: str) -> Iterator[str]:
    """Yield the full names of modules, a module itself or within it, whose weights FSDP1 keeps as views of one flat parameter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from [where for where, module in named_modules_of(root, path) if isinstance(module, fsdp.FullyShardedDataParallel)]


def managed_weights_of(root: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and of all within it that FSDP2 does not own; a tied one as often as it stands there."""
    for module in modules_of(root):
        owned = left_to_fsdp(module)
        for name, tensor in module._parameters.items():  # noqa: SLF001  (as in the walk)
            if tensor is not None and name not in owned:
                yield tensor
        yield from [tensor for tensor in module._buffers.values() if tensor is not None]  # noqa: SLF001  (as above)
