"""Sana pipelines that own their offloading: from text, in few steps, from a picture, and with a ControlNet."""

from typing import ClassVar

import attrs
from diffusers import (
    SanaControlNetPipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintImg2ImgPipeline,
    SanaSprintPipeline,
)

from omni_offload import OffloadPlan
from pipelines.leftovers import keeping_attention
from pipelines.parts import TransformerParts
from pipelines.sana.decoding import raising_out_of_memory

__all__ = [
    "OmniSanaControlNetPipeline",
    "OmniSanaPAGPipeline",
    "OmniSanaPipeline",
    "OmniSanaSprintImg2ImgPipeline",
    "OmniSanaSprintPipeline",
]

_BLOCKS = ("transformer_blocks",)
_PLAN = OffloadPlan(block_attrs={"transformer": _BLOCKS}, encoder_block_attrs={"text_encoder": ("layers",)})


class _SanaParts(TransformerParts):
    """The components of a Sana pipeline."""

    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniSanaPipeline(_SanaParts, SanaPipeline):
    """`SanaPipeline` that owns its offloading."""

    __call__ = raising_out_of_memory(SanaPipeline.__call__)


class OmniSanaPAGPipeline(_SanaParts, SanaPAGPipeline):
    """`SanaPAGPipeline` that owns its offloading; for guidance the attention of some blocks runs in two ways."""

    __call__ = keeping_attention(raising_out_of_memory(SanaPAGPipeline.__call__), "transformer")


class OmniSanaSprintPipeline(_SanaParts, SanaSprintPipeline):
    """`SanaSprintPipeline` that owns its offloading."""

    __call__ = raising_out_of_memory(SanaSprintPipeline.__call__)


class OmniSanaSprintImg2ImgPipeline(_SanaParts, SanaSprintImg2ImgPipeline):
    """`SanaSprintImg2ImgPipeline` that owns its offloading; the VAE runs before the DiT too."""

    __call__ = raising_out_of_memory(SanaSprintImg2ImgPipeline.__call__)


class OmniSanaControlNetPipeline(_SanaParts, SanaControlNetPipeline):
    """`SanaControlNetPipeline` that owns its offloading.

    ControlNet and DiT alternate in every step, so that they are on the device together. The VAE encodes the control picture.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "transformer")]
    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(_PLAN, block_attrs={"controlnet": _BLOCKS, "transformer": _BLOCKS})
    __call__ = raising_out_of_memory(SanaControlNetPipeline.__call__)
