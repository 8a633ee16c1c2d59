"""Pipelines of one UNet that own their offloading: DDPM, DDIM, PNDM, score-based, consistency; and those with a decoder."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import (
    ConsistencyModelPipeline,
    DDIMPipeline,
    DDPMPipeline,
    LDMPipeline,
    LDMSuperResolutionPipeline,
    PNDMPipeline,
    ScoreSdeVePipeline,
)

from omni_offload import OffloadPlan, OmniOffloadMixin
from pipelines.placement import OnItsDevice

__all__ = [
    "OmniConsistencyModelPipeline",
    "OmniDDIMPipeline",
    "OmniDDPMPipeline",
    "OmniLDMPipeline",
    "OmniLDMSuperResolutionPipeline",
    "OmniPNDMPipeline",
    "OmniScoreSdeVePipeline",
]


class _UNetParts(OmniOffloadMixin):
    """One component, a UNet. Whole, it is on the device for as long as a call takes; streaming, some of its blocks at a time."""

    _dit_modules: ClassVar[list[str]] = ["unet"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"unet": ("down_blocks", "mid_block", "up_blocks")})


class _LatentParts(OnItsDevice, _UNetParts):
    """A UNet on latents, and their decoder."""

    _vae_modules: ClassVar[list[str]] = ["vqvae"]
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"vqvae": ("encode", "decode")}


class OmniDDPMPipeline(_UNetParts, DDPMPipeline):
    """`DDPMPipeline` that owns its offloading."""


class OmniDDIMPipeline(_UNetParts, DDIMPipeline):
    """`DDIMPipeline` that owns its offloading."""


class OmniPNDMPipeline(OnItsDevice, _UNetParts, PNDMPipeline):
    """`PNDMPipeline` that owns its offloading."""


class OmniScoreSdeVePipeline(OnItsDevice, _UNetParts, ScoreSdeVePipeline):
    """`ScoreSdeVePipeline` that owns its offloading."""


class OmniConsistencyModelPipeline(_UNetParts, ConsistencyModelPipeline):
    """`ConsistencyModelPipeline` that owns its offloading."""


class OmniLDMPipeline(_LatentParts, LDMPipeline):
    """`LDMPipeline` that owns its offloading."""


class OmniLDMSuperResolutionPipeline(_LatentParts, LDMSuperResolutionPipeline):
    """`LDMSuperResolutionPipeline` that owns its offloading."""
