"""Flux 2 pipelines that own their offloading: the large one, and the Klein ones."""

from collections.abc import Mapping
from typing import ClassVar

from diffusers import Flux2KleinInpaintPipeline, Flux2KleinKVPipeline, Flux2KleinPipeline, Flux2Pipeline

from omni_offload import OffloadPlan
from pipelines.parts import TransformerParts

__all__ = ["OmniFlux2KleinInpaintPipeline", "OmniFlux2KleinKVPipeline", "OmniFlux2KleinPipeline", "OmniFlux2Pipeline"]

_BLOCKS = {"transformer": ("transformer_blocks", "single_transformer_blocks")}


class _KleinParts(TransformerParts):
    """The components of a Flux 2 Klein pipeline.

    The VAE encodes the pictures to edit, if there are any. The pipeline reads the mean and variance of the VAE's `bn` by itself,
    after the VAE encoded and before it decodes, and copies them to where the latents are.
    """

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs=_BLOCKS, encoder_block_attrs={"text_encoder": ("model.layers",)})


class OmniFlux2KleinPipeline(_KleinParts, Flux2KleinPipeline):
    """`Flux2KleinPipeline` that owns its offloading."""


class OmniFlux2KleinInpaintPipeline(_KleinParts, Flux2KleinInpaintPipeline):
    """`Flux2KleinInpaintPipeline` that owns its offloading; the VAE runs before the DiT in every call."""


class OmniFlux2KleinKVPipeline(_KleinParts, Flux2KleinKVPipeline):
    """`Flux2KleinKVPipeline` that owns its offloading.

    The keys and values of the pictures to edit are made in the first step, and stay on the device until the last.
    """


class OmniFlux2Pipeline(TransformerParts, Flux2Pipeline):
    """`Flux2Pipeline` that owns its offloading.

    The text encoder is a whole vision-language model, which can write a longer prompt too; its vision tower runs for that alone,
    where the prompt comes with pictures. The VAE is Klein's.
    """

    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(
        block_attrs=_BLOCKS,
        encoder_block_attrs={"text_encoder": ("model.vision_tower.transformer.layers", "model.language_model.layers")},
    )
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("encode", "decode"),
        "text_encoder": ("generate",),
        "": ("encode_prompt", "upsample_prompt"),
    }
