"""The digits case: trained weights, and a picture that can be judged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

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
    with _quietly():
        pipeline: OmniFluxPipeline = OmniFluxPipeline.from_pretrained(CHECKPOINT, local_files_only=True)
    pipeline.to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_inputs(_pipeline: Any, *, prompts: tuple[str, ...] = WORDS, seed: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """Return the arguments of a call that draws one digit a prompt.

    Args:
        prompts: Words from "zero" to "nine".
        seed: Of the noise that the digits start as.
        steps: Denoising steps; fewer than the checkpoint was trained for draw noise.
    """
    return {
        "prompt": list(prompts),
        "height": IMAGE_SIZE,
        "width": IMAGE_SIZE,
        "num_inference_steps": steps,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "output_type": "pt",
        "generator": generator(seed),
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Show no progress of loading while the body runs: it takes a tenth of a second."""
    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


DIGITS = PipelineCase(name="digits", make_pipeline=load, make_inputs=make_inputs, outputs=as_tensors)
"""Ten images of 8 x 8 pixels in 0..1, zero to nine."""
