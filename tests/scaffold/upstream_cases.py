"""Plain upstream pipelines that are not registered, tiny and with random weights."""

import functools

import attrs
import torch
from diffusers import (
    BriaPipeline,
    BriaTransformer2DModel,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    PaintByExamplePipeline,
    PriorTransformer,
    UnCLIPPipeline,
    UnCLIPScheduler,
    UNet2DConditionModel,
    UNet2DModel,
    VersatileDiffusionImageVariationPipeline,
)
from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder
from diffusers.pipelines.deprecated.unclip import UnCLIPTextProjModel
from transformers import CLIPVisionConfig

from omni_offload.testing import PipelineCase
from pipelines.tiny.components import (
    TEXT_WIDTH,
    autoencoder_kl,
    clip_image_processor,
    clip_text_encoder,
    clip_vision_encoder,
    ready,
    t5_encoder,
)
from pipelines.tiny.inputs import as_tensors, picture
from pipelines.tiny.seeding import generator, seeded_pipeline
from pipelines.tiny.tokenizers import clip_tokenizer, t5_tokenizer
from pipelines.tiny.unets import unet_2d


def _case(name, seed, make, inputs, **more):
    return PipelineCase(
        name=name,
        make_pipeline=functools.partial(seeded_pipeline, seed, make),
        make_inputs=lambda _: {**inputs(), "generator": generator()},
        outputs=as_tensors,
        **more,
    )


def _no_class(name):
    """Return that diffusers, which exports no longer all classes of models of its deprecated pipelines, cannot load one of these."""
    return {"check_save_pretrained": f"diffusers saves a {name}, but offers no class of that name to load it by"}


# ---- Bria: a DiT of double and single blocks ------------------------------------------------------------------------------------


def _bria():
    transformer = BriaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=[4, 6, 6],
    )
    return BriaPipeline(
        transformer=ready(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=autoencoder_kl(widths=(8, 16), use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1),
        text_encoder=t5_encoder(layers=2),
        tokenizer=t5_tokenizer(max_length=32),
    )


BRIA = _case(
    "bria",
    101,
    _bria,
    lambda: {
        "prompt": "a red cat",
        "negative_prompt": "blurry",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 32,
        "output_type": "pt",
    },
)

# ---- unCLIP: a prior, a UNet, two more for more pixels; the prior's parameters are used in a method of its own ---------------------


def _super_resolution():
    return ready(
        UNet2DModel(
            sample_size=16,
            in_channels=6,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
            up_block_types=("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
            add_attention=False,
        )
    )


def _unclip():
    prior = PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, embedding_dim=TEXT_WIDTH, num_layers=2, num_embeddings=77, additional_embeddings=4
    )
    prior.clip_mean.data.normal_(std=0.1)
    prior.clip_std.data.uniform_(0.5, 1.5)
    decoder = UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=6,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        class_embed_type="identity",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        resnet_time_scale_shift="scale_shift",
    )
    return UnCLIPPipeline(
        prior=ready(prior),
        decoder=ready(decoder),
        text_encoder=clip_text_encoder(layers=2, projects=True),
        tokenizer=clip_tokenizer(),
        text_proj=ready(UnCLIPTextProjModel(clip_embeddings_dim=TEXT_WIDTH, time_embed_dim=32, cross_attention_dim=TEXT_WIDTH)),
        super_res_first=_super_resolution(),
        super_res_last=_super_resolution(),
        prior_scheduler=UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample_range=5.0
        ),
        decoder_scheduler=UnCLIPScheduler(variance_type="learned_range", prediction_type="epsilon", num_train_timesteps=1000),
        super_res_scheduler=UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="epsilon", num_train_timesteps=1000),
    )


UNCLIP = _case(
    "unclip",
    102,
    _unclip,
    lambda: {
        "prompt": "a red cat",
        "prior_num_inference_steps": 2,
        "decoder_num_inference_steps": 2,
        "super_res_num_inference_steps": 2,
        "output_type": "pt",
    },
    expected_failures=_no_class("UnCLIPTextProjModel"),
)

# ---- Paint by Example: the image encoder hands out a parameter of its own ----------------------------------------------------------


def _image_encoder():
    config = CLIPVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=9,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    return ready(PaintByExampleImageEncoder(config))


def _paint_by_example():
    return PaintByExamplePipeline(
        vae=autoencoder_kl(widths=(8, 16)),
        image_encoder=_image_encoder(),
        unet=unet_2d(in_channels=9),
        scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=clip_image_processor(),
    )


def _mask():
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., 8:24, 8:24] = 1
    return mask


PAINT_BY_EXAMPLE = _case(
    "paint_by_example",
    103,
    _paint_by_example,
    lambda: {
        "example_image": picture(),
        "image": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32),
        "mask_image": _mask(),
        "num_inference_steps": 2,
        "output_type": "pt",
    },
    expected_failures=_no_class("PaintByExampleImageEncoder"),
)


# ---- Versatile Diffusion: layers of the image encoder that the pipeline calls itself ------------------------------------------------


def _versatile():
    return VersatileDiffusionImageVariationPipeline(
        image_feature_extractor=clip_image_processor(),
        image_encoder=clip_vision_encoder(layers=2, projects=True),
        image_unet=unet_2d(),
        vae=autoencoder_kl(widths=(8, 16)),
        scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False),
    )


VERSATILE = _case(
    "versatile", 104, _versatile, lambda: {"image": picture(), "num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt"}
)


def make_bria():
    """Return a case, as a factory of one does."""
    return BRIA


def _fail(_pipeline):
    raise KeyError("nothing to call it with")


FAILING = attrs.evolve(BRIA, name="failing", make_inputs=_fail)
