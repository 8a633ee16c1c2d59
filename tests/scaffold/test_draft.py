"""What is drafted for a plain pipeline: the lists in the order of use, blocks, entry points, contexts and co-residents."""

import pytest
import torch
import upstream_cases
from torch import nn

from omni_offload import OffloadPlan
from omni_offload.errors import OffloadConfigError
from omni_offload.testing import PipelineCase
from omni_offload.testing.scaffold import family_name, make_draft
from omni_offload.testing.scaffold.draft import alternating

WIDTH = 4


def linear():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        return self.inner(x) * self.scale


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, x):
        for block in (*self.down, *self.up):
            x = block(x)
        return self.down[0].inner(x) * self.up[2].scale


class Plain:
    """Holds its parts under names that tell nothing of the order in which they are used."""

    def __init__(self):
        torch.manual_seed(0)
        self.vae, self.unet, self.controlnet, self.text_encoder, self.projection = linear(), UNet(), linear(), linear(), linear()

    @property
    def components(self):
        return {**vars(self), "safety_checker": None, "tokenizer": None}

    def encode_prompt(self, x):
        return self.projection(self.text_encoder(x))

    def _guide(self, x):
        return x * self.controlnet.bias

    def __call__(self, x):
        x = self.encode_prompt(x)
        for _ in range(2):
            x = self.unet(x + self.controlnet(x))
        return self.vae(self._guide(x))


def case(cls):
    return PipelineCase(name="plain", make_pipeline=cls, make_inputs=lambda _: {"x": torch.ones(2, WIDTH)}, outputs=lambda result: [result])


def test_everything_that_a_call_shows():
    """Each thing that a plain pipeline's call shows has its place."""
    draft = make_draft(case(Plain))
    declared = draft.declared
    assert [*declared.components.items()] == [
        ("text_encoder", "encoder"),
        ("projection", "encoder"),
        ("controlnet", "dit"),
        ("unet", "dit"),
        ("vae", "vae"),
        ("safety_checker", "encoder"),
    ]
    assert declared.plan == OffloadPlan(
        block_attrs={"unet": ("down.0", "down.1", "down.2", "up.0", "up.1")},  # and not up.2, whose parameter the model itself reads
        encoder_component_types={"projection": "text_encoder"},
        rest_submodules=["unet.down.0.inner"],
    )
    assert declared.entry_points == {"": ("encode_prompt",)}
    assert declared.co_residents == (("controlnet", "unet"),)
    assert draft.contexts == {"_guide": ("controlnet",)}
    assert draft.uses == ("text_encoder", "projection", "controlnet", "unet", "controlnet", "unet", "vae")


def test_what_only_the_whole_call_encloses_is_resident():
    """There is no method to put a context around, so that the component stays on the device; it has no blocks then, and takes no turns."""

    class Reading(Plain):
        def __call__(self, x):
            return super().__call__(x * self.unet.up[0].scale)

    declared = make_draft(case(Reading)).declared
    assert declared.components["unet"] == "resident"
    assert declared.plan.block_attrs == {}
    assert declared.co_residents == ()


def test_what_no_class_can_declare_is_refused():
    """Parameters of the pipeline itself lie in no component."""

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.unet, self.scale = linear(), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return self.unet(x)

    with pytest.raises(OffloadConfigError, match=r"holds parameters of its own \(scale\), in no component; no class can declare that"):
        make_draft(case(Holding))


@pytest.mark.parametrize(
    ("uses", "groups"),
    [
        ("tuuuv", []),
        ("vuuuv", []),
        ("abab", ["ab"]),
        ("tababv", ["ab"]),
        ("abaabb", ["ab"]),
        ("abcabc", ["abc"]),
        ("ababxcdcd", ["ab", "cd"]),
        ("aabbb", []),
    ],
)
def test_components_that_alternate_are_co_residents(uses, groups):
    """Each follows upon the other at least twice; a VAE that encodes and decodes around a denoiser does not."""
    assert alternating([*uses]) == [(*group,) for group in groups]


@pytest.mark.parametrize(
    ("cls", "name"),
    [("StableAudioPipeline", "stable_audio"), ("BriaPipeline", "bria"), ("SDXLControlNetPipeline", "sdxl_control_net"), ("DiT", "di_t")],
)
def test_a_family_is_named_after_its_class(cls, name):
    """Words are told by their capitals."""
    assert family_name(cls) == name


def test_layers_that_a_pipeline_calls_itself():
    """They are entry points of their own."""
    draft = make_draft(upstream_cases.VERSATILE)
    assert draft.declared.entry_points == {
        "image_encoder.vision_model.post_layernorm": ("forward",),
        "image_encoder.visual_projection": ("forward",),
        "vae": ("decode",),
    }
