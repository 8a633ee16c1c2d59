"""What all Flux pipelines are made of."""

from collections.abc import Mapping
from typing import ClassVar

from omni_offload import OffloadPlan
from pipelines.parts import ENTRY_POINTS as TEXT_ENTRY_POINTS
from pipelines.parts import TransformerParts

__all__ = ["BLOCKS", "ENCODERS", "ENTRY_POINTS", "PLAN", "FluxParts", "FluxTextParts"]

BLOCKS: tuple[str, ...] = ("transformer_blocks", "single_transformer_blocks")
"""Double blocks, then single ones: of the DiT, and of a ControlNet."""

ENCODERS: tuple[str, ...] = ("text_encoder", "text_encoder_2")

PLAN = OffloadPlan(
    block_attrs={"transformer": BLOCKS},
    encoder_block_attrs={"text_encoder": ("encoder.layers",), "text_encoder_2": ("encoder.block",)},
    encoder_dlo_weight_replication=ENCODERS,
)

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {**TEXT_ENTRY_POINTS, "": (*TEXT_ENTRY_POINTS[""], "encode_image")}
"""For the pipelines that take image prompts."""


class FluxTextParts(TransformerParts):
    """The components of a Flux pipeline that takes no image prompts.

    The two text encoders are on the device together: with `true_cfg_scale` they run for the prompts and then again for the
    negative prompts, and taking turns they would both be loaded twice. That raises no peak, as CLIP-L and T5-XXL together
    (9.8 GB in bf16) are less than half of the DiT (23.8 GB).
    """

    _encoder_modules: ClassVar[list[str]] = [*ENCODERS]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [ENCODERS]
    _offload_plan: ClassVar[OffloadPlan] = PLAN


class FluxParts(FluxTextParts):
    """The components of a Flux pipeline; `image_encoder` is there for image prompts only, and is None otherwise."""

    _encoder_modules: ClassVar[list[str]] = [*ENCODERS, "image_encoder"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
