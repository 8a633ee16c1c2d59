"""PRX pipelines that own their offloading: in a latent space, and in pixels."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import PRXPipeline, PRXPixelPipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniPRXPipeline", "OmniPRXPixelPipeline"]


class _PRXParts(TransformerParts):
    """The components of a PRX pipeline: the layers of its text encoder, which is an encoder or a language model, are its own children."""

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs={"transformer": ("blocks",)}, encoder_block_attrs={"text_encoder": ("layers",)}
    )


class OmniPRXPipeline(_PRXParts, PRXPipeline):
    """`PRXPipeline` that owns its offloading."""


class OmniPRXPixelPipeline(_PRXParts, PRXPixelPipeline):
    """`PRXPixelPipeline` that owns its offloading; it has no VAE, as the DiT makes pixels."""

    _vae_modules: ClassVar[list[str]] = []
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"": ("encode_prompt",)}
