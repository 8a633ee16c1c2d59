"""A pipeline of Acme's own, without diffusers: words to a wave."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin

__all__ = ["WavesPipeline"]

WIDTH = 48


class Denoiser(nn.Module):
    """Blocks that each add a little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, wave: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            wave = wave + torch.tanh(layer(wave + words))
        return wave


class Codec(nn.Module):
    """Two halves, each with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def encode(self, wave: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(wave))

    def decode(self, wave: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(wave))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(wave))


class WavesPipeline(OmniOffloadMixin, nn.Module):
    """Words to a wave, in a few steps."""

    _dit_modules: ClassVar[list[str]] = ["denoiser"]
    _encoder_modules: ClassVar[list[str]] = ["words"]
    _vae_modules: ClassVar[list[str]] = ["codec"]
    _offload_plan: ClassVar[OffloadPlan] = OffloadPlan(block_attrs={"denoiser": ("layers",)})
    _offload_entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"codec": ("encode", "decode")}

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.denoiser = Denoiser()
        self.codec = Codec()
        self.eval()

    @property
    def _execution_device(self) -> torch.device:
        backend = self.offload_backend
        return backend.device if backend is not None else self.denoiser.layers[0].weight.device

    def forward(
        self, ids: torch.Tensor, noise: torch.Tensor, callback_on_step_end: Callable[[Any, int], None] | None = None
    ) -> torch.Tensor:
        words = self.words(ids.to(self._execution_device))
        wave = noise.to(self._execution_device, words.dtype)
        for step in range(2):
            wave = wave - 0.2 * self.denoiser(wave, words)
            if callback_on_step_end is not None:
                callback_on_step_end(self, step)
        return self.codec.decode(wave)
