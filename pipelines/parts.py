"""What many families have in common: one text encoder, one DiT and one VAE."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["ENTRY_POINTS", "T5_PLAN", "TransformerParts", "with_adapter", "with_controlnet"]

T5_PLAN = OffloadPlan(
    block_attrs={"transformer": ("transformer_blocks",)},
    encoder_block_attrs={"text_encoder": ("encoder.block",)},
    encoder_dlo_weight_replication={"text_encoder"},
)
"""For a DiT with one list of blocks, after a T5 encoder, which runs once a prompt: alike on all ranks."""

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {"vae": ("encode", "decode"), "": ("encode_prompt",)}


class TransformerParts(OmniOffloadMixin):
    """The components of a pipeline with one text encoder, one DiT and one VAE."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = ["vae"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


def with_controlnet(plan: OffloadPlan, controlnet: Any, *blocks: str) -> OffloadPlan:
    """Return a plan with the blocks of a ControlNet before those of the DiT, or of each of several, the same one once.

    Args:
        plan: Without a ControlNet.
        controlnet: The pipeline's component.
        blocks: The containers, or single blocks, of one ControlNet, in execution order.
    """
    return attrs.evolve(plan, block_attrs={"controlnet": _of_each(controlnet, "nets", blocks), **plan.block_attrs})


def with_adapter(plan: OffloadPlan, adapter: Any) -> OffloadPlan:
    """Return a plan with the blocks of a T2I-Adapter, or of each of several, the same one once."""
    blocks = _of_each(adapter, "adapters", ("adapter.body",))
    return attrs.evolve(plan, encoder_block_attrs={**plan.encoder_block_attrs, "adapter": blocks})


def _of_each(component: Any, parts: str, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the blocks of a component, or, where it is several of a kind, of each of these."""
    if not hasattr(component, parts):
        return blocks
    first = {id(one): index for index, one in reversed([*enumerate(getattr(component, parts))])}
    return tuple(f"{parts}.{index}.{name}" for index in sorted(first.values()) for name in blocks)
