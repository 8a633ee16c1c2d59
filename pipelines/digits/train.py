"""Train the digits pipeline on the CPU and save it: `python -m pipelines.digits.train FOLDER`.

It takes about three minutes, is seeded and runs on one thread: the same packages on the same kind of processor give the
same weights.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from pipelines.digits.judge import TRAINING_DIGITS, handwritten_digits
from pipelines.digits.sizes import IMAGE_SIZE, MAX_SEQUENCE_LENGTH, WORDS
from pipelines.tiny.seeding import seeded
from pipelines.tiny.tokenizers import (
    CLIP_BOS,
    CLIP_EOS,
    CLIP_VOCABULARY_SIZE,
    T5_VOCABULARY_SIZE,
    clip_tokenizer,
    t5_tokenizer,
)

__all__ = ["build", "main", "train"]

logger = logging.getLogger(__name__)

VAE_STEPS = 250
DIT_STEPS = 1800
_SEED = 0
_WIDTH = 32
_LATENT_CHANNELS = 4
_LATENT_SIZE = IMAGE_SIZE // 2
_AVERAGE_FROM = 0.5  # the mean of the weights starts after this share of the steps
_AVERAGE_RATE = 0.02


def build() -> Any:
    """Return the pipeline, untrained."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 24),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=IMAGE_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=CLIP_VOCABULARY_SIZE,
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_SEQUENCE_LENGTH,
            projection_dim=_WIDTH,
            bos_token_id=CLIP_BOS,
            eos_token_id=CLIP_EOS,
            pad_token_id=CLIP_EOS,
        )
    )
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=T5_VOCABULARY_SIZE,
            d_model=_WIDTH,
            d_kv=8,
            d_ff=2 * _WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * _LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer(max_length=MAX_SEQUENCE_LENGTH),
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer(max_length=MAX_SEQUENCE_LENGTH),
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def train(*, vae_steps: int = VAE_STEPS, dit_steps: int = DIT_STEPS) -> Any:
    """Return a trained pipeline in fp32.

    Args:
        vae_steps: Steps of the autoencoder; each takes 64 digits.
        dit_steps: Steps of the DiT and the two encoders together; each takes 96 digits.
    """
    images, labels = handwritten_digits()
    images, labels = images[:TRAINING_DIGITS].repeat(1, 3, 1, 1), labels[:TRAINING_DIGITS]
    with seeded(_SEED):
        pipeline = build()
        latents = _train_vae(pipeline.vae, images, steps=vae_steps)
        _train_dit(pipeline, latents, labels, steps=dit_steps)
    return pipeline


def main() -> None:
    """Train, and save the weights in fp16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pipeline is saved")
    folder: Path = parser.parse_args().folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    train().to(torch.float16).save_pretrained(folder)


def _train_vae(vae: Any, images: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Train the autoencoder and return the normalised latents `[N, 4, 4, 4]` of all images."""
    optimizer = torch.optim.AdamW(vae.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for step in range(steps):
        batch = images[torch.randint(len(images), (64,))]
        posterior = vae.encode(batch).latent_dist
        loss = functional.l1_loss(vae.decode(posterior.sample()).sample, batch) + 1e-4 * posterior.kl().mean() / 64
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            logger.info("vae step %d of %d: loss %.4f", step + 1, steps, loss.item())
    vae.eval()
    with torch.no_grad():
        latents = torch.cat([vae.encode(batch).latent_dist.mode() for batch in torch.split(images, 256)])
    mean, deviation = latents.mean(), latents.std()
    vae.register_to_config(scaling_factor=1 / deviation.item(), shift_factor=mean.item())
    return (latents - mean) / deviation


def _train_dit(pipeline: Any, latents: torch.Tensor, labels: torch.Tensor, *, steps: int) -> None:
    """Train the DiT and both encoders by rectified flow (Liu et al. 2022, arXiv:2209.03003)."""
    models = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, 2e-3, betas=(0.9, 0.99), weight_decay=1e-3)
    average: list[torch.Tensor] | None = None
    for step in range(steps):
        rate = 2e-3 * min(1, (step + 1) / 30) * (1 - step / steps) ** 0.7
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(latents), (96,))
        loss = _flow_loss(pipeline, latents[chosen], labels[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step >= _AVERAGE_FROM * steps:
            present = [parameter.detach() for parameter in parameters]
            if average is None:
                average = [value.clone() for value in present]
            else:
                torch._foreach_lerp_(average, present, _AVERAGE_RATE)
        if (step + 1) % 100 == 0:
            logger.info("dit step %d of %d: loss %.4f", step + 1, steps, loss.item())
    with torch.no_grad():
        for parameter, value in zip(parameters, average or [], strict=True):
            parameter.copy_(value)
    for model in models:
        model.eval()


def _flow_loss(pipeline: Any, clean: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the squared error of the velocity at a random time of the line from the clean latents to noise."""
    present, row = torch.unique(labels, return_inverse=True)
    prompts = [WORDS[label] for label in present]
    pooled = pipeline.text_encoder(_ids(pipeline.tokenizer, prompts)).pooler_output[row]
    embeddings = pipeline.text_encoder_2(_ids(pipeline.tokenizer_2, prompts)).last_hidden_state[row]
    noise = torch.randn_like(clean)
    time = torch.sigmoid(torch.randn(len(clean)) * 1.2)
    share = time.view(-1, 1, 1, 1)
    velocity = pipeline.transformer(
        hidden_states=_packed((1 - share) * clean + share * noise),
        timestep=time,
        pooled_projections=pooled,
        encoder_hidden_states=embeddings,
        txt_ids=torch.zeros(MAX_SEQUENCE_LENGTH, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(  # noqa: SLF001  (what the pipeline itself uses)
            1, _LATENT_SIZE // 2, _LATENT_SIZE // 2, torch.device("cpu"), torch.float32
        ),
        return_dict=False,
    )[0]
    return functional.mse_loss(velocity, _packed(noise - clean))


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """Return `[B, 4, 4, 4]` as the DiT takes it: `[B, 4, 16]`, a token for each 2 x 2 patch."""
    packed: torch.Tensor = FluxPipeline._pack_latents(  # noqa: SLF001  (what the pipeline itself uses)
        latents, len(latents), _LATENT_CHANNELS, _LATENT_SIZE, _LATENT_SIZE
    )
    return packed


def _ids(tokenizer: Any, prompts: list[str]) -> Any:
    return tokenizer(prompts, padding="max_length", max_length=MAX_SEQUENCE_LENGTH, truncation=True, return_tensors="pt").input_ids


if __name__ == "__main__":
    main()
