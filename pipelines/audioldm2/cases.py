"""AudioLDM cases: random weights, two hundred thousand parameters, sixteen milliseconds of sound."""

import functools
from typing import Any

from diffusers import (
    AudioLDM2ProjectionModel,
    AudioLDM2UNet2DConditionModel,
    DDIMScheduler,
    DiffusionPipeline,
)
from transformers import (
    ClapAudioConfig,
    ClapConfig,
    ClapFeatureExtractor,
    ClapModel,
    ClapTextConfig,
    ClapTextModelWithProjection,
    GPT2Config,
    GPT2LMHeadModel,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)

from pipelines.audioldm2.pipeline_audioldm2 import OmniAudioLDM2Pipeline, OmniAudioLDMPipeline
from pipelines.tiny.cases import prompted_case
from pipelines.tiny.components import TEXT_WIDTH, autoencoder_kl, ready, t5_encoder
from pipelines.tiny.logs import DEPRECATED, keep_back
from pipelines.tiny.tokenizers import QWEN_VOCABULARY_SIZE, roberta_tokenizer, t5_tokenizer
from pipelines.tiny.unets import unet_2d

__all__ = ["AUDIOLDM", "AUDIOLDM2"]

_WIDTH = 16
_MEL_BINS = 8


def _clap_text() -> ClapTextConfig:
    return ClapTextConfig(
        vocab_size=QWEN_VOCABULARY_SIZE,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=80,
        projection_dim=_WIDTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )


def _clap() -> Any:
    audio = ClapAudioConfig(
        spec_size=8,
        window_size=4,
        num_mel_bins=_MEL_BINS,
        patch_embeds_hidden_size=_WIDTH,
        patch_size=4,
        patch_stride=[4, 4],
        hidden_size=_WIDTH,
        depths=[1, 1],
        num_attention_heads=[1, 2],
        num_hidden_layers=2,
        projection_dim=_WIDTH,
        mlp_ratio=2.0,
        enable_fusion=False,
    )
    return ready(ClapModel(ClapConfig(text_config=_clap_text().to_dict(), audio_config=audio.to_dict(), projection_dim=_WIDTH)))


def _language_model() -> Any:
    tokens = {"vocab_size": QWEN_VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 0}
    return ready(GPT2LMHeadModel(GPT2Config(n_embd=_WIDTH, n_head=4, n_layer=2, n_ctx=256, n_positions=256, **tokens)))


def _unet() -> Any:
    return ready(
        AudioLDM2UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=([None, _WIDTH, TEXT_WIDTH], [None, _WIDTH, TEXT_WIDTH]),
            attention_head_dim=4,
        )
    )


def _vocoder() -> Any:
    return ready(
        SpeechT5HifiGan(
            SpeechT5HifiGanConfig(
                model_in_dim=_MEL_BINS,
                sampling_rate=16000,
                upsample_initial_channel=16,
                upsample_rates=[2, 2],
                upsample_kernel_sizes=[4, 4],
                resblock_kernel_sizes=[3, 7],
                resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
                normalize_before=False,
                initializer_range=0.2,
            )
        )
    )


def _common() -> dict[str, Any]:
    return {
        "vae": autoencoder_kl(widths=(8, 16), in_channels=1, out_channels=1),
        "tokenizer": roberta_tokenizer(max_length=77),
        "scheduler": DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        "vocoder": _vocoder(),
    }


def _second() -> OmniAudioLDM2Pipeline:
    return OmniAudioLDM2Pipeline(
        **_common(),
        text_encoder=_clap(),
        text_encoder_2=t5_encoder(layers=2),
        projection_model=ready(AudioLDM2ProjectionModel(text_encoder_dim=_WIDTH, text_encoder_1_dim=TEXT_WIDTH, langauge_model_dim=_WIDTH)),
        language_model=_language_model(),
        tokenizer_2=t5_tokenizer(max_length=77),
        feature_extractor=ClapFeatureExtractor(feature_size=8, hop_length=40, fft_window_size=64, sampling_rate=16000, max_length_s=1),
        unet=_unet(),
    )


def _first() -> OmniAudioLDMPipeline:
    keep_back(DiffusionPipeline, DEPRECATED)
    return OmniAudioLDMPipeline(
        **_common(),
        text_encoder=ready(ClapTextModelWithProjection(_clap_text())),
        unet=unet_2d(
            class_embed_type="simple_projection",
            projection_class_embeddings_input_dim=_WIDTH,
            class_embeddings_concat=True,
            cross_attention_dim=(8, 16),  # without a text to see, its layers attend to what they have
        ),
    )


_case = functools.partial(prompted_case, leave_out=("height", "width"), negative_prompt="noise", audio_length_in_s=0.016)

AUDIOLDM2 = _case("audioldm2", _second, seed=181, max_new_tokens=3)
"""Text to sound with guidance: the language model runs three times for each prompt."""

AUDIOLDM = _case("audioldm", _first, seed=182)
"""Text to sound by the first model, whose UNet takes the text beside the time."""
