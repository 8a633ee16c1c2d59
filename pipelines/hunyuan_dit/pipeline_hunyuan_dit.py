"""HunyuanDiT pipelines that own their offloading: from text, with perturbed attention, and with ControlNets."""

from typing import ClassVar

from diffusers import HunyuanDiTControlNetPipeline, HunyuanDiTPAGPipeline, HunyuanDiTPipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import keeping_attention
from pipelines.parts import TransformerParts, with_controlnet

__all__ = ["OmniHunyuanDiTControlNetPipeline", "OmniHunyuanDiTPAGPipeline", "OmniHunyuanDiTPipeline"]

_BLOCKS = "blocks"
_PLAN = OffloadPlan(
    block_attrs={"transformer": (_BLOCKS,)},
    encoder_block_attrs={
        "text_encoder": ("encoder.layer",),
        "text_encoder_2": ("encoder.block",),
        "safety_checker": ("vision_model.encoder.layers",),
    },
)


class _HunyuanDiTParts(TransformerParts):
    """The components of a HunyuanDiT pipeline; `text_encoder_2` and `safety_checker` may be None."""

    _encoder_modules: ClassVar[list[str]] = ["text_encoder", "text_encoder_2", "safety_checker"]
    _offload_plan: ClassVar[OffloadPlan] = _PLAN


class OmniHunyuanDiTPipeline(_HunyuanDiTParts, HunyuanDiTPipeline):
    """`HunyuanDiTPipeline` that owns its offloading."""


class OmniHunyuanDiTPAGPipeline(_HunyuanDiTParts, HunyuanDiTPAGPipeline):
    """`HunyuanDiTPAGPipeline` that owns its offloading; for guidance the attention of some blocks runs in two ways."""

    __call__ = keeping_attention(HunyuanDiTPAGPipeline.__call__, "transformer")


class OmniHunyuanDiTControlNetPipeline(_HunyuanDiTParts, HunyuanDiTControlNetPipeline):
    """`HunyuanDiTControlNetPipeline` that owns its offloading.

    ControlNet and DiT alternate in every step, so that they are on the device together. Several ControlNets are one
    component, and run one after the other. The VAE encodes the control pictures.
    """

    _dit_modules: ClassVar[list[str]] = ["controlnet", "transformer"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "transformer")]

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        return with_controlnet(_PLAN, self.controlnet, _BLOCKS)
