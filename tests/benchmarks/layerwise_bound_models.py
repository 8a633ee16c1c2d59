"""What the blocks of FLUX, Wan and SDXL's UNet cost: bytes in 16 bits, and the arithmetic of one step, counted on the meta device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from omni_offload.schedule import BlockCost

__all__ = ["MODELS", "Model"]


@attrs.frozen(kw_only=True)
class Model:
    """One real model.

    Attributes:
        name: As in the table.
        what: What a step is, for the document.
        make: Makes the model.
        inputs: Makes its arguments.
        containers: Where the blocks are, in execution order.
    """

    name: str
    what: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    containers: Sequence[str]

    def costs(self, copies_over_compute: float) -> tuple[BlockCost, ...]:
        """Return the blocks' costs, scaled so that all computations take a second, and all copies so many.

        Args:
            copies_over_compute: Seconds that the copies of all blocks take.
        """
        sizes, flops = self._count()
        per_byte, per_flop = copies_over_compute / sum(sizes), 1 / sum(flops)
        return tuple(BlockCost(work * per_flop, size * per_byte, size) for size, work in zip(sizes, flops, strict=True))

    @functools.cache  # noqa: B019  (the models are constants)
    def _count(self) -> tuple[list[int], list[int]]:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model = self.make()
            blocks = [block for path in self.containers for block in _blocks(model.get_submodule(path))]
            spans: dict[nn.Module, list[int]] = {block: [] for block in blocks}
            for block in blocks:
                block.register_forward_pre_hook(lambda module, _: spans[module].append(counter.get_total_flops()))
                block.register_forward_hook(lambda module, *_: spans[module].append(counter.get_total_flops()))
            model(**self.inputs())
        sizes = [2 * sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        return sizes, [spans[block][1] - spans[block][0] for block in blocks]


def _blocks(module: nn.Module) -> list[nn.Module]:
    return list(module) if isinstance(module, nn.ModuleList) else [module]


def _flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(1, 64 * 64, 64),
        "encoder_hidden_states": torch.empty(1, 512, 4096),
        "pooled_projections": torch.empty(1, 768),
        "timestep": torch.empty(1),
        "guidance": torch.empty(1),
        "img_ids": torch.empty(64 * 64, 3),
        "txt_ids": torch.empty(512, 3),
    }


def _wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(1, 16, 21, 60, 104),
        "timestep": torch.empty(1),
        "encoder_hidden_states": torch.empty(1, 512, 4096),
    }


def _unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def _unet_inputs() -> dict[str, Any]:
    return {
        "sample": torch.empty(2, 4, 128, 128),
        "timestep": torch.empty(2),
        "encoder_hidden_states": torch.empty(2, 77, 2048),
        "added_cond_kwargs": {"text_embeds": torch.empty(2, 1280), "time_ids": torch.empty(2, 6)},
    }


def _unet_layers() -> list[str]:
    """Return the UNet's layers in execution order."""

    def level(name: str, resnets: int, attentions: int, last: str | None) -> list[str]:
        parts = []
        for index in range(resnets):
            parts.append(f"{name}.resnets.{index}")
            parts += [f"{name}.attentions.{index}.transformer_blocks"] if index < attentions else []
        return [*parts, f"{name}.{last}"] if last else parts

    return [
        *level("down_blocks.0", 2, 0, "downsamplers"),
        *level("down_blocks.1", 2, 2, "downsamplers"),
        *level("down_blocks.2", 2, 2, None),
        *level("mid_block", 2, 1, None),
        *level("up_blocks.0", 3, 3, "upsamplers"),
        *level("up_blocks.1", 3, 3, "upsamplers"),
        *level("up_blocks.2", 3, 0, None),
    ]


MODELS = (
    Model(
        name="FLUX",
        what="1024 x 1024 pixels",
        make=lambda: FluxTransformer2DModel(guidance_embeds=True),
        inputs=_flux_inputs,
        containers=("transformer_blocks", "single_transformer_blocks"),
    ),
    Model(
        name="Wan 14B",
        what="832 x 480 pixels, 81 frames",
        make=WanTransformer3DModel,
        inputs=_wan_inputs,
        containers=("blocks",),
    ),
    Model(
        name="SDXL's UNet, by layers",
        what="1024 x 1024 pixels, two prompts",
        make=_unet,
        inputs=_unet_inputs,
        containers=tuple(_unet_layers()),
    ),
    Model(
        name="SD 1.5's UNet, by levels",
        what="512 x 512 pixels, two prompts",
        make=lambda: UNet2DConditionModel(cross_attention_dim=768),
        inputs=lambda: {
            "sample": torch.empty(2, 4, 64, 64),
            "timestep": torch.empty(2),
            "encoder_hidden_states": torch.empty(2, 77, 768),
        },
        containers=("down_blocks", "mid_block", "up_blocks"),
    ),
    Model(
        name="SDXL's UNet, by levels",
        what="1024 x 1024 pixels, two prompts",
        make=_unet,
        inputs=_unet_inputs,
        containers=("down_blocks", "mid_block", "up_blocks"),
    ),
)
