"""`OmniHiDreamImagePipeline`: declares what a HiDream pipeline is made of, and inherits the rest."""

from typing import ClassVar

from diffusers import HiDreamImagePipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniHiDreamImagePipeline"]


class OmniHiDreamImagePipeline(TransformerParts, HiDreamImagePipeline):
    """`HiDreamImagePipeline` that owns its offloading.

    Each encoder runs for the prompts and then for the negative prompts, before the next one does. An expert of the DiT may have
    nothing to do in a step: the blocks, and not the experts, come and go.
    """

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("double_stream_blocks", "single_stream_blocks")},
        encoder_block_attrs={
            "text_encoder": ("text_model.encoder.layers",),
            "text_encoder_2": ("text_model.encoder.layers",),
            "text_encoder_3": ("encoder.block",),
            "text_encoder_4": ("model.layers",),
        },
    )
