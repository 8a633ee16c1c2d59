"""The digits case: trained weights, and a picture that can be judged."""

from pathlib import Path
from typing import Any

import torch

from omni_offload.testing import PipelineCase
from pipelines.digits.sizes import IMAGE_SIZE, MAX_SEQUENCE_LENGTH, STEPS, WORDS
from pipelines.flux.pipeline_flux import OmniFluxPipeline
from pipelines.tiny.inputs import as_tensors
from pipelines.tiny.seeding import generator

__all__ = ["CHECKPOINT", "DIGITS", "load", "make_inputs"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained pipeline in diffusers' format, weights in fp16."""


def load() -> OmniFluxPipeline:
    """Load the checkpoint in fp32, from this package; nothing is downloaded."""
    pipeline: OmniFluxPipeline = OmniFluxPipeline.from_pretrained(
        CHECKPOINT, torch_dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_inputs(_pipeline: Any, *, prompts: tuple[str, ...] = WORDS, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a call that draws one digit a prompt.

    Args:
        prompts: Words from "zero" to "nine".
        seed: Of the noise that the digits start as.
    """
    return {
        "prompt": list(prompts),
        "height": IMAGE_SIZE,
        "width": IMAGE_SIZE,
        "num_inference_steps": STEPS,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "output_type": "pt",
        "generator": generator(seed),
    }


DIGITS = PipelineCase(name="digits", make_pipeline=load, make_inputs=make_inputs, outputs=as_tensors)
"""Ten images of 8 x 8 pixels in 0..1, zero to nine."""
