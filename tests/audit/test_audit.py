"""The audit names every read that no declaration covers, every component in no list and every stack that is not declared."""

import json

import attrs
import pytest
import torch
from torch import nn

from omni_offload import OffloadPlan, OmniOffloadMixin
from omni_offload.errors import ComponentPathError, ContractViolation, OffloadConfigError, OffloadStateError
from omni_offload.testing import PipelineCase, audit_pipeline
from omni_offload.testing.audit import Declarations, Item
from omni_offload.testing.snapshot import Snapshot

WIDTH = 8


def linear():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Denoiser(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = linear()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.register_buffer("mean", torch.full((WIDTH,), 0.5))
        self.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def encode(self, x):
        return self.inner(x)

    def decode(self, z):
        return self._decode(z)

    def _decode(self, z):
        return self.inner(z) + self.bias

    def forward(self, z):
        return self.decode(z)

    def stream(self, z):
        yield self.inner(z)


class Painter(OmniOffloadMixin):
    _encoder_modules = ["text_encoder"]
    _dit_modules = ["transformer"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})
    _offload_entry_points = {"vae": ("decode",), "": ("encode_prompt",)}

    def __init__(self):
        torch.manual_seed(0)
        self.text_encoder, self.transformer, self.vae = linear(), Denoiser(), Coder()

    def encode_prompt(self, x):
        return self.text_encoder(x)

    def __call__(self, x):
        return self.decode(self.transformer(self.encode_prompt(x)))

    def decode(self, z):
        return self.vae.decode(z)


def case(cls):
    return PipelineCase(
        name=cls.__name__, make_pipeline=cls, make_inputs=lambda _: {"x": torch.ones(2, WIDTH)}, outputs=lambda result: [result]
    )


def audit(cls, **more):
    return audit_pipeline(case(cls), **more)


def items(report):
    return [finding.item for finding in report.findings]


def test_a_pipeline_that_declares_all_is_clean():
    """Nothing is found where every use is declared; what the call needs and the order of the uses are told."""
    report = audit(Painter)
    assert report.clean
    assert report.host_reads == ()
    assert report.uses == ("text_encoder", "transformer", "vae")
    assert set(report.needed) == {*Declarations.of(Painter()).items()}
    assert report.not_exercised == ()
    report.raise_for_findings()


def test_a_method_that_is_no_entry_point_is_named_with_the_line_to_add():
    """The outermost method of the component is named, not one that it calls, and beside those that are declared already."""

    class Forgetful(Painter):
        _offload_entry_points = {"vae": ("encode",), "": ("encode_prompt", "decode")}

    report = audit(Forgetful)
    (finding,) = report.findings
    assert finding.item == Item("entry point", "vae", "decode")
    assert set(finding.tensors) == {"vae.inner.weight", "vae.inner.bias", "vae.bias"}
    assert finding.line == '_offload_entry_points = {"vae": ("encode", "decode")}'
    assert finding.calls == ("Forgetful.__call__", "Forgetful.decode", "Coder.decode", "Coder._decode", "Linear.forward")
    assert finding.where.startswith("linear.py:")
    with pytest.raises(ContractViolation, match=r"vae.inner.bias and 2 more were read while the component was not in use"):
        report.raise_for_findings()


def test_one_run_lists_all():
    """The run goes on after a finding: reads, components in no list and stacks of all components come in one report."""

    class Plain:
        __init__, __call__, encode_prompt, decode = Painter.__init__, Painter.__call__, Painter.encode_prompt, Painter.decode

    report = audit(Plain)
    assert items(report) == [
        Item("component", "text_encoder"),
        Item("component", "transformer"),
        Item("component", "vae"),
        Item("entry point", "vae", "decode"),
        Item("stack", "transformer.blocks"),
    ]
    assert [finding.line for finding in report.findings[:3]] == [
        '_encoder_modules = ["text_encoder"]',
        '_dit_modules = ["transformer"]',
        '_vae_modules = ["vae"]',
    ]
    assert report.findings[-1].line == 'OffloadPlan(block_attrs={"transformer": ("blocks",)})'
    assert {suggestion.item for suggestion in report.suggestions} == {Item("call", "", "encode_prompt"), Item("call", "", "decode")}


def test_a_pipeline_without_declarations_is_not_changed():
    """Weights, attributes and hooks are afterwards as they were, also where the call fails, and of the model's global hooks none is left."""

    class Failing(Painter):
        def decode(self, z):
            super().decode(z)
            raise KeyError("mine")

    for cls in (Painter, Failing):
        pipeline = cls()
        parts = {"text_encoder": pipeline.text_encoder, "transformer": pipeline.transformer, "vae": pipeline.vae}
        snapshot = Snapshot(parts, pipeline)
        made = attrs.evolve(case(cls), make_pipeline=lambda pipeline=pipeline: pipeline)
        if cls is Failing:
            with pytest.raises(KeyError, match="mine"):
                audit_pipeline(made)
        else:
            audit_pipeline(made)
        assert snapshot.differences() == []
        assert not nn.modules.module._global_forward_pre_hooks


def test_the_pipelines_own_use_wants_a_context():
    """A weight that the pipeline itself brings together with other tensors is named with the place; `on_device` covers it."""

    class Mixing(Painter):
        def decode(self, z):
            return super().decode(z * self.vae.mean)

    class Covered(Mixing):
        def decode(self, z):
            with self.on_device("vae"):
                return super().decode(z)

    (finding,) = audit(Mixing).findings
    assert finding.item == Item("context", "vae", "decode")
    assert finding.tensors == ("vae.mean",)
    assert finding.line.startswith('with self.on_device("vae"): around the use in Mixing.decode (test_audit.py:')
    assert audit(Covered).clean


@pytest.mark.parametrize(
    "move",
    [
        lambda mean, z: mean.to(z.device, z.dtype),
        lambda mean, z: mean.to(z),
        lambda mean, z: mean.to(device=z.device),
        lambda mean, _: mean.to("cpu"),
    ],
)
def test_a_copy_of_a_weight_to_a_device_is_right(move):
    """What is read on the host, computed there from weights alone and copied to a device by name is no finding; it is told."""

    class Copying(Painter):
        def decode(self, z):
            root = torch.sqrt(self.vae.mean.view(1, -1) + 1)
            return super().decode(z * move(root, z))

    report = audit(Copying)
    assert report.clean
    (read,) = report.host_reads
    assert read.tensor == "vae.mean"
    assert read.calls == ("Copying.__call__", "Copying.decode")


@pytest.mark.parametrize("move", [torch.Tensor.double, lambda mean: mean.to(torch.float64), torch.clone, lambda mean: mean.view(-1)])
def test_what_was_computed_on_the_host_is_followed(move):
    """A tensor that was computed from a weight on the host is there; mixed with others it is the weight's finding."""

    class Computing(Painter):
        def decode(self, z):
            return super().decode(z * move(self.vae.mean + 1).float())

    (finding,) = audit(Computing).findings
    assert finding.tensors == ("vae.mean",)


def test_what_has_no_address_is_taken_for_nothing_else():
    """A sparse tensor that was computed from a weight on the host is not known again: neither is another without memory taken for it."""

    class Sparse(Painter):
        def decode(self, z):
            kept = self.vae.mean.to_sparse()
            nothing = torch.empty(0, WIDTH)
            z = torch.cat([z, torch.mm(nothing, torch.eye(WIDTH))])
            del kept
            return super().decode(z)

    report = audit(Sparse)
    assert report.clean, report


def test_inputs_of_an_entry_point_are_brought_along():
    """A weight that is handed to an entry point of another component comes to the device with the other inputs."""

    class Handing(Painter):
        def encode_prompt(self, x):
            return self.text_encoder(self.vae.mean.expand(2, WIDTH)) + x

    report = audit(Handing)
    assert report.clean
    assert [read.tensor for read in report.host_reads] == ["vae.mean"]


def test_shapes_and_types_are_free():
    """Reading the form of a weight, making a tensor like it, writing it, and casting its module read no weight."""

    class Asking(Painter):
        def decode(self, z):
            weight = self.vae.inner.weight
            size = weight.shape[0] * weight.stride(1) * weight.t().dim()
            z = z.to(weight.dtype) + torch.zeros_like(weight)[0] + weight.new_ones(WIDTH) * (size == 2 * WIDTH)
            self.vae.mean.fill_(1)
            self.vae.mean.copy_(z[0])
            self.vae.to(torch.float64)
            self.vae.to(torch.float32)
            self.vae.to("cpu")
            return super().decode(z)

    report = audit(Asking)
    assert report.clean
    assert report.host_reads == ()


def test_weights_that_a_cast_made_are_known():
    """After a cast in the middle of a call the new weights are looked at, and not what came to lie where the old ones were."""

    class Casting(Painter):
        def decode(self, z):
            self.vae.to(torch.float64)
            return super().decode(z.double() * self.vae.mean)

    (finding,) = audit(Casting).findings
    assert finding.tensors == ("vae.mean",)


def test_a_tied_weight_belongs_to_all_its_owners():
    """A weight that two components share is there while either of them is used."""

    class Tied(Painter):
        def __init__(self):
            super().__init__()
            self.vae.inner.weight = self.text_encoder.weight

        def encode_prompt(self, x):
            return super().encode_prompt(x)

        def decode(self, z):
            with self.on_device("text_encoder"):
                z = nn.functional.linear(z, self.vae.inner.weight)
            return super().decode(z)

    assert audit(Tied).clean


def test_a_submodule_that_is_called_directly_is_an_entry_point():
    """A leaf that the pipeline calls is named by its own path and `forward`."""

    class Direct(Painter):
        def decode(self, z):
            return super().decode(self.transformer.embed(z))

    class Covered(Direct):
        _offload_entry_points = {**Painter._offload_entry_points, "transformer.embed": ("forward",)}

    (finding,) = audit(Direct).findings
    assert finding.item == Item("entry point", "transformer.embed", "forward")
    assert audit(Covered).clean


def test_a_generator_is_no_entry_point():
    """What returns before its work is done is not named: what it calls is."""

    class Streaming(Painter):
        def decode(self, z):
            return next(self.vae.stream(z))

    assert items(audit(Streaming)) == [Item("entry point", "vae.inner", "forward")]


class Peeking(Denoiser):
    """Uses a layer of block 0 after the blocks, as class-conditional DiTs do."""

    def forward(self, x):
        return self.blocks[0].second(super().forward(x))


class Scaling(Denoiser):
    """Reads a parameter of block 1 itself, which lies in no module within the block."""

    def __init__(self):
        super().__init__()
        self.blocks[1].scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        return super().forward(x) * self.blocks[1].scale


def with_denoiser(denoiser, plan=None):
    class Own(Painter):
        _offload_plan = plan or Painter._offload_plan

        def __init__(self):
            super().__init__()
            self.transformer = denoiser()

    return Own


def test_a_block_is_away_unless_it_runs():
    """What a model reads of a block from outside is named to stay with the rest; so declared it is covered."""
    (finding,) = audit(with_denoiser(Peeking)).findings
    assert finding.item == Item("rest", "transformer.blocks.0.second")
    assert finding.problem == "transformer.blocks.0.second.bias and 1 more were read while the block did not run"
    assert finding.line == 'OffloadPlan(rest_submodules=["transformer.blocks.0.second"])'
    plan = OffloadPlan(block_attrs={"transformer": ("blocks",)}, rest_submodules=["transformer.blocks.0.second"])
    assert audit(with_denoiser(Peeking, plan)).clean


def test_a_parameter_of_a_block_itself_cannot_stay_without_it():
    """There is no module to name then: the block is to be left out."""
    (finding,) = audit(with_denoiser(Scaling)).findings
    assert finding.item == Item("whole", "transformer.blocks.1")
    assert "one by one, and without 'transformer.blocks.1'" in finding.line
    plan = OffloadPlan(block_attrs={"transformer": ("blocks.0", "blocks.2")})
    assert audit(with_denoiser(Scaling, plan)).clean


class UNet(nn.Module):
    """Runs its parts in another order than it registers them in, and the middle one stands alone."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.mid = Block()
        self.norms = nn.ModuleList(linear() for _ in range(4))
        self.spare = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for part in (*self.down, self.mid, *self.up, *self.norms):
            x = part(x)
        return x


def test_stacks_are_named_in_the_order_in_which_they_run():
    """Single blocks between stacks too; layers without modules in them, and stacks that did not run, are none."""
    report = audit(with_denoiser(UNet, OffloadPlan(block_attrs={"transformer": ("up",)})))
    assert items(report) == [Item("stack", "transformer.down"), Item("stack", "transformer.mid")]
    assert {finding.line for finding in report.findings} == {'OffloadPlan(block_attrs={"transformer": ("down", "mid", "up")})'}
    declared = Declarations.of(with_denoiser(UNet, OffloadPlan(block_attrs={"transformer": ("down", "mid", "up", "spare")}))())
    report = audit(with_denoiser(UNet), declarations=declared)
    assert report.clean
    assert report.not_exercised == (Item("stack", "transformer.spare"),)


class Nested(nn.Module):
    """Lists of lists, of which the inner ones are never called; a model in a list is no block."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        for level in self.levels:
            for block in level:
                x = block(x)
        return x


def test_lists_of_lists_are_one_stack():
    """The blocks are the innermost modules."""
    assert items(audit(with_denoiser(Nested, OffloadPlan()))) == [Item("stack", "transformer.levels")]


def test_a_component_that_is_in_use_may_use_itself():
    """Methods, parameters and functional uses within a use are covered; so are torch hooks of users around it."""

    class Hooked(Painter):
        def __init__(self):
            super().__init__()
            self.vae.inner.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
            self.transformer.register_forward_pre_hook(lambda module, args: (args[0] + module.embed.bias,))

    assert audit(Hooked).clean


def test_needless_declarations_are_told():
    """A component that is None, a method that another entry encloses and a call that nothing enters are not exercised."""

    class Lavish(Painter):
        _encoder_modules = ["text_encoder", "image_encoder"]
        _offload_entry_points = {"vae": ("decode", "_decode"), "": ("encode_prompt", "encode_image")}
        image_encoder = None

        def encode_image(self, x):
            return self.image_encoder(x)

    report = audit(Lavish)
    assert report.clean
    assert set(report.not_exercised) == {
        Item("component", "image_encoder"),
        Item("entry point", "vae", "decode"),
        Item("entry point", "vae", "_decode"),
        Item("call", "", "encode_image"),
    }
    assert "declared, and not needed by this call: component image_encoder" in str(report)


def test_parameters_beside_components_are_named():
    """Those of a pipeline that is a module itself, and of what holds a component, can stand in no list."""

    class Module(OmniOffloadMixin, nn.Module):
        _dit_modules = ["model.net"]
        _encoder_modules = _vae_modules = []

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
            self.model = nn.Module()
            self.model.net, self.model.other, self.model.bias = linear(), linear(), nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x):
            return self.model.net(x)

    found = {finding.component: finding.item for finding in audit(Module).findings}
    assert found == {"(the pipeline itself)": None, "model": None, "model.other": Item("component", "model.other")}


def test_resident_components_are_always_there():
    """What is on the device while offload is enabled may be read at any time."""

    class Resident(Painter):
        _vae_modules = []
        _resident_modules = ["vae"]

        def decode(self, z):
            return super().decode(z * self.vae.mean)

    assert audit(Resident, declarations=attrs.evolve(Declarations.of(Resident()), entry_points={})).clean


@pytest.mark.parametrize(
    ("error", "declarations"),
    [
        (ComponentPathError, {"_vae_modules": ["vea"]}),
        (ComponentPathError, {"_offload_entry_points": {"vae.nothing": ("forward",)}}),
        (OffloadStateError, {"_offload_entry_points": {"vae": ("undecode",)}}),
        (OffloadStateError, {"_offload_entry_points": {"vae": ("stream",)}}),
        (OffloadConfigError, {"_offload_plan": "blocks"}),
    ],
)
def test_wrong_declarations_are_refused(error, declarations):
    """What cannot be right however the call runs is an error that names it, and nothing is left behind."""
    pipeline = Painter()
    vars(pipeline).update(declarations)
    before = {name: dict(vars(getattr(pipeline, name))) for name in ("transformer", "vae")}
    with pytest.raises(error, match=r"vea|nothing|undecode|stream|_offload_plan"):
        audit_pipeline(attrs.evolve(case(Painter), make_pipeline=lambda: pipeline))
    assert before == {name: vars(getattr(pipeline, name)) for name in before}


def test_nothing_to_audit_is_refused():
    """A pipeline without weights would be clean whatever it does."""

    class Empty:
        def __call__(self, x):
            return x

    with pytest.raises(OffloadConfigError, match="has no component with weights"):
        audit(Empty)


def test_report_as_json_and_text():
    """Both name everything."""

    class Forgetful(Painter):
        _offload_entry_points = {}

    report = audit(Forgetful)
    data = json.loads(report.to_json())
    assert data["clean"] is False
    assert data["findings"][0]["item"] == {"kind": "entry point", "path": "vae", "method": "decode"}
    assert data["findings"][0]["calls"][:2] == ["Forgetful.__call__", "Forgetful.decode"]
    text = str(report)
    assert text.startswith("audit of 'Forgetful' (Forgetful): 1 finding\n")
    assert '  add _offload_entry_points = {"vae": ("decode",)}' in text
    assert "suggestion: text_encoder: called by itself, Forgetful.encode_prompt leaves it on the device" in text
