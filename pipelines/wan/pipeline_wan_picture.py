"""Pipelines with Wan's parts that begin with a picture and own their offloading: animating a figure, editing as a short video."""

import functools
from typing import Any, ClassVar

import attrs
from diffusers import ChronoEditPipeline, WanAnimatePipeline

from omni_offload import OffloadPlan
from pipelines.leftovers import leaving_nothing
from pipelines.wan.parts import WanPictureParts

__all__ = ["OmniChronoEditPipeline", "OmniWanAnimatePipeline"]


class OmniChronoEditPipeline(WanPictureParts, ChronoEditPipeline):
    """`ChronoEditPipeline` that owns its offloading."""

    __call__ = leaving_nothing(ChronoEditPipeline.__call__)


class OmniWanAnimatePipeline(WanPictureParts, WanAnimatePipeline):
    """`WanAnimatePipeline` that owns its offloading.

    The DiT has encoders of its own for the face in the video that drives it. After every few blocks an adapter runs, which
    stays with the rest: its turn is between the blocks. A long video is made in segments, each by a whole run.
    """

    _offload_plan: ClassVar[OffloadPlan] = attrs.evolve(
        WanPictureParts._offload_plan,  # noqa: SLF001  (of its own base)
        block_attrs={"transformer": ("motion_encoder.res_blocks", "blocks")},
    )

    @leaving_nothing
    @functools.wraps(WanAnimatePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline; after an error the scheduler is set anew, as upstream does after each segment: it keeps samples."""
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            if (steps := getattr(self.scheduler, "num_inference_steps", None)) is not None:
                self.scheduler.set_timesteps(steps)
            raise
