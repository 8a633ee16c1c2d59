"""AnimateDiff pipelines with ControlNets that own their offloading.

ControlNet and UNet alternate in every step, so that they are on the device together.
"""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    AnimateDiffControlNetPipeline,
    AnimateDiffSparseControlNetPipeline,
    AnimateDiffVideoToVideoControlNetPipeline,
)

from omni_offload import OffloadPlan
from pipelines.animatediff.parts import CONTROL_BLOCKS, AnimateDiffParts
from pipelines.animatediff.pipeline_animatediff import ENTRY_POINTS, ENTRY_POINTS_WITH_VIDEO
from pipelines.parts import with_controlnet

__all__ = [
    "OmniAnimateDiffControlNetPipeline",
    "OmniAnimateDiffSparseControlNetPipeline",
    "OmniAnimateDiffVideoToVideoControlNetPipeline",
]


class _ControlledParts(AnimateDiffParts):
    """The components of an AnimateDiff pipeline with one ControlNet or several, which are one component and run in turn."""

    _dit_modules: ClassVar[list[str]] = ["controlnet", "unet", "motion_adapter"]
    _co_resident_modules: ClassVar[list[tuple[str, ...]]] = [("controlnet", "unet")]

    @property
    def _offload_plan(self) -> OffloadPlan:  # type: ignore[override]  # the number of ControlNets is the instance's
        plan: OffloadPlan = AnimateDiffParts._offload_plan  # noqa: SLF001  (of its own base)
        return with_controlnet(plan, self.controlnet, *CONTROL_BLOCKS)  # type: ignore[attr-defined]  # of the pipeline behind the parts


class OmniAnimateDiffControlNetPipeline(_ControlledParts, AnimateDiffControlNetPipeline):
    """`AnimateDiffControlNetPipeline` that owns its offloading."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS


class OmniAnimateDiffVideoToVideoControlNetPipeline(_ControlledParts, AnimateDiffVideoToVideoControlNetPipeline):
    """`AnimateDiffVideoToVideoControlNetPipeline` that owns its offloading; the VAE encodes the video to begin with."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS_WITH_VIDEO


class OmniAnimateDiffSparseControlNetPipeline(_ControlledParts, AnimateDiffSparseControlNetPipeline):
    """`AnimateDiffSparseControlNetPipeline` that owns its offloading; its ControlNet, with layers for time, controls some frames."""

    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = ENTRY_POINTS
