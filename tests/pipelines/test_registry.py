"""Registered pipelines are found by name, by folder and by class, and every mistake ends in one clear error."""

import inspect
import json
import subprocess
import sys

import diffusers
import pytest
import torch

import pipelines
from omni_offload import OmniOffloadMixin
from omni_offload.errors import OffloadConfigError, OffloadError
from pipelines import PipelineEntry, PipelineLookupError

FLUX = "pipelines.flux.pipeline_flux:OmniFluxPipeline"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with entry points of the group."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, code, *points):
        (tmp_path / f"{package}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        text = "\n".join(["[omni_offload.pipelines]", *points])
        (info / "entry_points.txt").write_text(text + "\n", encoding="utf-8")
        monkeypatch.delitem(sys.modules, package, raising=False)

    yield install
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def flux():
    return pipelines.registered()["flux"].load_cases()[0]


@pytest.fixture
def upstream(flux):
    """A plain Flux pipeline."""
    return diffusers.FluxPipeline(**flux.make_pipeline().components)


def save_index(folder, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model_index.json").write_text(text, encoding="utf-8")
    return folder


def test_import_is_cheap():
    """Importing the package and listing what is registered imports neither diffusers nor transformers."""
    code = (
        "import sys, pipelines; pipelines.registered(); "
        "sys.exit(', '.join({'diffusers', 'transformers', 'accelerate', 'sklearn'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registered_is_sorted_and_read_only():
    """Entries are listed by name, and cannot be changed there."""
    entries = pipelines.registered()
    assert list(entries) == sorted(entries)
    assert {"digits", "flux", "wan", "wan_i2v"} <= set(entries)
    with pytest.raises(TypeError):
        entries["more"] = entries["flux"]


@pytest.mark.parametrize("name", list(pipelines.registered()))
def test_classes_are_named_after_the_upstream_class(name):
    """A registered class is `Omni` and the name of the diffusers class that it derives from."""
    entry = pipelines.registered()[name]
    cls = pipelines.get(name)
    assert cls.__name__ == f"Omni{entry.upstream_name}"
    assert issubclass(cls, getattr(diffusers, entry.upstream_name))
    assert entry.load_cases()


def test_two_entries_may_name_one_class():
    """`digits` is a checkpoint of the class that `flux` names too."""
    assert pipelines.get("digits") is pipelines.get("flux")


def test_unknown_name():
    """An unknown name is refused with the nearest one and with all there are; the error is a LookupError and ours."""
    with pytest.raises(PipelineLookupError, match=r"'fluxx' \(did you mean 'flux'\?\); there are: .*digits, .*flux, .*wan") as info:
        pipelines.get("fluxx")
    assert isinstance(info.value, OffloadError)
    assert isinstance(info.value, LookupError)
    with pytest.raises(PipelineLookupError, match=r"registered as 'zzz'; there are"):
        pipelines.get("zzz")


@pytest.mark.parametrize("name", ["", "Flux", "my model", None])
def test_bad_names(name):
    """A name is one lower-case word."""
    with pytest.raises(ValueError, match="a pipeline's name must be"):
        PipelineEntry(name, pipeline="a:B")


@pytest.mark.parametrize("reference", ["a.b", "a:", ":B", "a:B.c", "a b:C", None])
def test_bad_references(reference):
    """Classes and cases are named as module:Name."""
    with pytest.raises(ValueError, match=r"must read 'package\.module:Name'"):
        PipelineEntry("x", pipeline=reference)
    with pytest.raises(ValueError, match=r"must read 'package\.module:Name'"):
        PipelineEntry("x", pipeline="a:B", cases=(reference,))


def test_names_that_are_not_there():
    """A module that lacks the name, a name that is no class and a module that is not there are told apart."""
    with pytest.raises(PipelineLookupError, match=r"module 'pipelines\.entry' has no 'Missing'"):
        PipelineEntry("x", pipeline="pipelines.entry:Missing").load()
    with pytest.raises(PipelineLookupError, match="which is no class but"):
        PipelineEntry("x", pipeline="pipelines.registry:GROUP").load()
    with pytest.raises(ModuleNotFoundError):
        PipelineEntry("x", pipeline="not_installed:Class").load()
    with pytest.raises(PipelineLookupError, match="has no 'CASE'"):
        PipelineEntry("x", pipeline="a:B", cases=("pipelines.entry:CASE",)).load_cases()


ENTRY = "from pipelines import PipelineEntry\nENTRY = PipelineEntry({name!r}, pipeline={pipeline!r})\n"


def test_third_party_entry(install):
    """A package registers through an entry point; its class is found by name."""
    code = ENTRY.format(name="theirs", pipeline="their_package:OmniTheirPipeline") + "class OmniTheirPipeline: ...\n"
    install("their_package", code, "theirs = their_package:ENTRY")
    assert "theirs" in pipelines.registered()
    assert pipelines.get("theirs").__module__ == "their_package"


def test_third_party_name_taken(install):
    """A name that is registered twice is refused, with both."""
    install("their_copy", ENTRY.format(name="flux", pipeline="their_copy:Flux"), "flux = their_copy:ENTRY")
    with pytest.raises(PipelineLookupError, match=r"two pipelines are registered as 'flux'.*'their_copy'"):
        pipelines.registered()


def test_third_party_entry_of_another_type(install):
    """An entry point that loads to something else is refused by its name and package."""
    install("their_wrong", "ENTRY = 3\n", "wrong = their_wrong:ENTRY")
    with pytest.raises(PipelineLookupError, match=r"'wrong' = 'their_wrong:ENTRY'.*'their_wrong'.*not 3"):
        pipelines.registered()


def test_third_party_entry_that_fails(install):
    """An entry point that cannot be loaded is refused by its name and package, with the cause."""
    install("their_broken", "raise RuntimeError('broken')\n", "broken = their_broken:ENTRY")
    with pytest.raises(PipelineLookupError, match="does not load: broken; repair or uninstall") as info:
        pipelines.registered()
    assert isinstance(info.value.__cause__, RuntimeError)


def test_two_classes_for_one_upstream_class(install, tmp_path):
    """Where two classes stand for one upstream class, that class finds neither; names still find both."""
    install("their_flux", ENTRY.format(name="their_flux", pipeline="their_flux:OmniFluxPipeline"), "x = their_flux:ENTRY")
    assert pipelines.get("flux") is pipelines.get("digits")
    with pytest.raises(PipelineLookupError, match=r"several classes are registered for that: .*load one of them by its own"):
        pipelines.from_pretrained(save_index(tmp_path, {"_class_name": "FluxPipeline"}))


def test_no_folder(tmp_path):
    """A path that leads to no folder is refused."""
    with pytest.raises(PipelineLookupError, match="cannot load 'model': it is no local folder"):
        pipelines.from_pretrained("model")
    (tmp_path / "file").touch()
    with pytest.raises(PipelineLookupError, match="no local folder"):
        pipelines.from_pretrained(tmp_path / "file")


def test_folder_without_index(tmp_path):
    """A folder of something else is refused."""
    with pytest.raises(PipelineLookupError, match=r"has no model_index\.json"):
        pipelines.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["not json", "[]", {}, {"_class_name": ["module", "Class"]}, {"_class_name": None}, {"_class_name": "os.system"}, "[" * 10_000],
)
def test_bad_index(tmp_path, content):
    """An index without the name of a class is refused."""
    with pytest.raises(PipelineLookupError, match=r"cannot load .*model_index\.json"):
        pipelines.from_pretrained(save_index(tmp_path, content))


@pytest.mark.parametrize("name", ["NobodysPipeline", "OmniNobodysPipeline"])
def test_unregistered_class(tmp_path, name):
    """A class that nobody registered is refused with the code that would declare it."""
    upstream = "NobodysPipeline"
    with pytest.raises(PipelineLookupError, match="no pipeline is registered for the pipeline in") as info:
        pipelines.from_pretrained(save_index(tmp_path, {"_class_name": name}))
    assert f"class Omni{upstream}(OmniOffloadMixin, {upstream}):" in str(info.value)
    assert '        _dit_modules = ["transformer"]\n        _encoder_modules = ["text_encoder"]\n' in str(info.value)
    assert "'omni_offload.pipelines'" in str(info.value)
    assert f"`omni-offload scaffold diffusers:{upstream} --case " in str(info.value)


def test_unregistered_class_with_other_components(tmp_path):
    """The code that would declare it lists the components that its index names."""
    unknown = ["diffusers", "UNet2DModel"]
    index = {"_class_name": "NobodysPipeline", "unet": unknown, "movq": unknown, "mystery": unknown, "prior": [None, None], "size": 3}
    with pytest.raises(PipelineLookupError) as info:
        pipelines.from_pretrained(save_index(tmp_path, index))
    assert '        _dit_modules = ["unet"]\n        _vae_modules = ["movq"]\nand register' in str(info.value)


def run(flux, pipeline):
    (images,) = flux.outputs(pipeline(**flux.make_inputs(pipeline)))
    return images


def cloned(pipeline):
    """Put every weight into memory of its own: safetensors maps them unaligned, which changes the last digit."""
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            for parameter in component.parameters():
                parameter.data = parameter.data.clone()
    return pipeline


def test_folder_that_names_the_upstream_class(flux, upstream, tmp_path):
    """A folder that plain diffusers saved loads as our class, with the same weights."""
    upstream.save_pretrained(tmp_path)
    loaded = pipelines.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is pipelines.get("flux")
    assert torch.equal(run(flux, cloned(loaded)), run(flux, flux.make_pipeline()))


def test_folder_that_names_our_class(flux, upstream, tmp_path):
    """A folder that names our class loads too."""
    upstream.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text(encoding="utf-8"))
    save_index(tmp_path, {**index, "_class_name": "OmniFluxPipeline"})
    assert type(pipelines.from_pretrained(str(tmp_path))) is pipelines.get("flux")


def test_folder_that_we_saved(flux, tmp_path):
    """What we save loads as the upstream class in plain diffusers, and as ours here."""
    flux.make_pipeline().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text(encoding="utf-8"))["_class_name"] == "FluxPipeline"
    assert type(diffusers.DiffusionPipeline.from_pretrained(tmp_path)) is diffusers.FluxPipeline
    assert type(pipelines.from_pretrained(tmp_path)) is pipelines.get("flux")


def test_arguments_are_passed_on(flux, tmp_path):
    """Keyword arguments reach the upstream loader: a component that is given is not loaded."""
    flux.make_pipeline().save_pretrained(tmp_path)
    vae = flux.make_pipeline().vae
    assert pipelines.from_pretrained(tmp_path, vae=vae).vae is vae


def test_from_pipe_shares_the_components(flux, upstream):
    """The new pipeline has the same component objects, neither cast nor moved, and runs the same."""
    before = run(flux, _quiet(upstream))
    made = pipelines.from_pipe(upstream)
    assert type(made) is pipelines.get("flux")
    assert all(made.components[name] is component for name, component in upstream.components.items())
    assert torch.equal(run(flux, made), before)


def test_from_pipe_does_not_cast(upstream):
    """Weights in bf16 stay in bf16."""
    upstream.to(torch.bfloat16)
    assert pipelines.from_pipe(upstream).transformer.dtype == torch.bfloat16


def test_from_pipe_keeps_the_configuration():
    """Settings of the pipeline are kept, those among them that its class does not know; so is the progress bar's."""
    case = pipelines.registered()["wan"].load_cases()[1]
    made = case.make_pipeline()
    upstream = diffusers.WanPipeline(**made.components, boundary_ratio=0.5)
    upstream.register_to_config(_name_or_path="somewhere", _note="kept")
    upstream.set_progress_bar_config(disable=True)
    made = pipelines.from_pipe(upstream)
    assert made.config.boundary_ratio == 0.5
    assert made.config._note == "kept"
    assert made.config._name_or_path == "somewhere"
    assert made._progress_bar_config == {"disable": True}


def test_from_pipe_of_our_class(flux):
    """Ours is taken too."""
    pipeline = flux.make_pipeline()
    made = pipelines.from_pipe(pipeline)
    assert made is not pipeline
    assert made.transformer is pipeline.transformer


def test_from_pipe_of_an_unregistered_class(upstream):
    """A subclass of a registered class has code of its own, which ours would lose: it is refused."""

    class Mine(diffusers.FluxPipeline): ...

    with pytest.raises(PipelineLookupError, match=r"no pipeline is registered for .*Mine.*To declare one"):
        pipelines.from_pipe(Mine(**upstream.components))
    with pytest.raises(PipelineLookupError, match=r"builtins\.dict"):
        pipelines.from_pipe({})


def test_from_pipe_of_another_class_of_that_name(upstream):
    """The name alone does not do."""
    imposter = type("FluxPipeline", (diffusers.FluxPipeline,), {})
    with pytest.raises(PipelineLookupError, match="is another class: its own methods would be lost"):
        pipelines.from_pipe(imposter(**upstream.components))


def _quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize(
    ("installed", "known"), [("0.38.0", "torch_dtype"), ("0.39.2", "torch_dtype"), ("0.40.0", "dtype"), ("1.0.0.dev0", "dtype")]
)
@pytest.mark.parametrize("given", ["dtype", "torch_dtype"])
def test_the_type_of_the_weights_is_passed_under_the_name_that_diffusers_takes(tmp_path, monkeypatch, installed, known, given):
    from pipelines import registry

    asked = {}
    monkeypatch.setattr(registry, "version", lambda _: installed)
    monkeypatch.setattr(pipelines.get("flux"), "from_pretrained", lambda _folder, **kwargs: asked.update(kwargs))
    pipelines.from_pretrained(save_index(tmp_path, {"_class_name": "FluxPipeline"}), **{given: torch.bfloat16})
    assert asked == {"local_files_only": True, "use_safetensors": True, known: torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ({"transformer": "float16", "default": torch.bfloat16}, {"transformer": torch.float16, "default": torch.bfloat16}),
        (None, None),
    ],
)
def test_the_type_of_the_weights_by_its_name(tmp_path, monkeypatch, given, passed):
    """Of all components or of each; diffusers would load float32 in the place of what it does not know."""
    asked = {}
    monkeypatch.setattr(pipelines.get("flux"), "from_pretrained", lambda _folder, **kwargs: asked.update(kwargs))
    pipelines.from_pretrained(save_index(tmp_path, {"_class_name": "FluxPipeline"}), dtype=given)
    assert asked["dtype"] == passed


@pytest.mark.parametrize("given", ["fp16", "auto", "Tensor", "", 5, torch.int8, "int8", {"vae": "half precision"}], ids=str)
def test_what_is_no_type_of_weights(tmp_path, given):
    """It is refused before anything is loaded; of one among several the component is named."""
    folder = save_index(tmp_path, {"_class_name": "FluxPipeline"})
    for name in ("dtype", "torch_dtype"):
        with pytest.raises(OffloadConfigError, match=rf"was given {name}(\['vae'\])?=.*, which is no floating type of torch; give one"):
            pipelines.from_pretrained(folder, **{name: given})


def test_from_pipe_of_a_class():
    """What is wanted is a pipeline of it."""
    with pytest.raises(PipelineLookupError, match=r"was given .*OmniFluxPipeline itself; give a pipeline"):
        pipelines.from_pipe(pipelines.get("flux"))


def test_from_pipe_with_a_class_of_ones_own(upstream):
    """A class that is not registered is taken where it extends the pipe's; any other would lose the pipe's own methods."""

    class Mine(OmniOffloadMixin, diffusers.FluxPipeline):
        _dit_modules = ["transformer"]

    made = pipelines.from_pipe(upstream, pipeline_class=Mine)
    assert type(made) is Mine
    assert made.transformer is upstream.transformer
    with pytest.raises(PipelineLookupError, match=r"builtins\.dict does not extend .*FluxPipeline: the pipe's own methods would be lost"):
        pipelines.from_pipe(upstream, pipeline_class=dict)


@pytest.mark.parametrize("name", pipelines.registered())
def test_signatures_are_upstreams(name):
    """What counts as a call takes the arguments that it takes upstream, and says so."""
    entry = pipelines.registered()[name]
    upstream, cls = getattr(diffusers, entry.upstream_name), entry.load()
    methods = ["__call__", *(method for method in cls._offload_entry_points.get("", ()) if hasattr(upstream, method))]
    for method in methods:
        assert inspect.signature(getattr(cls, method)) == inspect.signature(getattr(upstream, method)), method
