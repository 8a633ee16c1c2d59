"""A folder is loaded without running anything in it: no code, no pickle; and whole, in any form that diffusers saves."""

import io
import json
import pickle
import re
import shutil
import sys

import pytest
import torch

import pipelines
from omni_offload.errors import OffloadConfigError
from pipelines import PipelineLookupError
from pipelines.folder import read_folder, refuse_empty_tokenizers


@pytest.fixture(scope="module")
def flux():
    return pipelines.registered()["flux"].load_cases()[0]


@pytest.fixture(scope="module")
def saved(flux, tmp_path_factory):
    """A folder with a pipeline, its large weights in shards."""
    folder = tmp_path_factory.mktemp("saved")
    flux.make_pipeline().save_pretrained(folder, max_shard_size="300KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def ran(tmp_path):
    """A file that whatever runs makes; nothing may."""
    mark = tmp_path / "ran"
    yield mark
    assert not mark.exists()


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (code(self.mark),)


def code(mark):
    return f"import pathlib; pathlib.Path({str(mark)!r}).touch()\nclass Model: ...\n"


def set_index(folder, **changes):
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def rename(folder, old, new):
    for path in [path for path in folder.rglob("*") if old in path.name]:
        path.rename(path.with_name(path.name.replace(old, new)))


def test_the_traps_are_traps(tmp_path):
    """What these tests plant does run where it is read or imported."""
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


@pytest.mark.parametrize("suffix", ["bin", "ckpt", "pt", "pth", "pkl"])
def test_pickled_weights_are_refused(folder, ran, suffix):
    """By the file's name, with the way to convert it, before anything is loaded."""
    for path in (folder / "text_encoder").glob("*.safetensors"):
        path.unlink()
    (folder / "text_encoder" / f"pytorch_model.{suffix}").write_bytes(pickle.dumps(Bomb(ran)))
    (folder / "vae" / "config.json").unlink()  # would fail if it were loaded
    match = rf"text_encoder/pytorch_model\.{suffix}: pickles run.*FluxPipeline\.from_pretrained\(folder, use_safetensors=False\)\.save_pret"
    with pytest.raises(PipelineLookupError, match=match):
        pipelines.from_pretrained(folder)


def test_every_component_with_pickles_is_named(folder, ran):
    """All problems are in one error."""
    for name in ("vae", "transformer"):
        for path in (folder / name).glob("*.safetensors*"):
            path.unlink()
        (folder / name / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(ran)))
    with pytest.raises(PipelineLookupError, match=r"transformer/diffusion_pytorch_model\.bin, vae/diffusion_pytorch_model\.bin: pickles"):
        pipelines.from_pretrained(folder)


def test_of_both_formats_safetensors_are_read(folder, flux, ran):
    """Pickles beside them, and beside the index, are left alone."""
    for path in ("transformer/diffusion_pytorch_model.bin", "text_encoder/pytorch_model.bin", "old.ckpt", "vae/training.pt"):
        (folder / path).write_bytes(pickle.dumps(Bomb(ran)))
    loaded, made = pipelines.from_pretrained(folder), flux.make_pipeline()
    for name in ("transformer", "text_encoder", "vae"):
        found = loaded.components[name].state_dict()
        assert all(torch.equal(tensor, found[key]) for key, tensor in made.components[name].state_dict().items())


def test_a_component_that_is_given_is_not_looked_at(folder, flux, ran):
    """Its pickles are not read, so that they may be there."""
    for path in (folder / "vae").glob("*.safetensors"):
        path.unlink()
    (folder / "vae" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(ran)))
    vae = flux.make_pipeline().vae
    assert pipelines.from_pretrained(folder, vae=vae).vae is vae


@pytest.mark.parametrize("given", [{"use_safetensors": False}, {"trust_remote_code": True}, {"custom_pipeline": "one"}], ids=str)
def test_arguments_that_would_run_something(folder, given):
    """They are refused, with what to do instead."""
    name, value = next(iter(given.items()))
    with pytest.raises(OffloadConfigError, match=rf"{name}={value!r}.*leave it out"):
        pipelines.from_pretrained(folder, **given)


def test_safetensors_may_be_asked_for(folder):
    """What is done anyway may be said."""
    assert pipelines.from_pretrained(folder, use_safetensors=True, trust_remote_code=False).transformer is not None


def test_code_of_a_component_is_not_run(folder, ran):
    """A component that a module beside its weights would make is refused by that file."""
    (folder / "transformer" / "mine.py").write_text(code(ran), encoding="utf-8")
    set_index(folder, transformer=["mine", "Model"])
    with pytest.raises(PipelineLookupError, match=r"transformer/mine\.py would have component 'transformer' made by code of the folder"):
        pipelines.from_pretrained(folder)
    (folder / "transformer" / "mine.py").rename(folder / "transformer" / "diffusers.py")
    set_index(folder, transformer=["diffusers", "FluxTransformer2DModel"])
    with pytest.raises(PipelineLookupError, match=r"transformer/diffusers\.py would have"):
        pipelines.from_pretrained(folder)


@pytest.mark.parametrize("given", [False, True])
def test_a_module_is_not_imported_because_a_folder_names_it(folder, flux, ran, monkeypatch, given):
    """Not even for the type of a component that is given, which diffusers looks at; one that was imported before is taken."""
    (folder / "elsewhere_module.py").write_text(code(ran), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    set_index(folder, transformer=["elsewhere_module", "Model"])
    transformer = flux.make_pipeline().transformer
    with pytest.raises(PipelineLookupError, match="component 'transformer' is a Model of module 'elsewhere_module', which is neither"):
        pipelines.from_pretrained(folder, **({"transformer": transformer} if given else {}))
    assert "elsewhere_module" not in sys.modules
    known = type(sys)("elsewhere_module")
    known.Model = type(transformer)
    known.ModelMixin = type(transformer).__mro__[1]
    monkeypatch.setitem(sys.modules, "elsewhere_module", known)
    assert read_folder(folder).refuse_what_runs(given={}, variant=None) is None


def test_code_that_an_auto_class_would_run(folder, ran):
    """A transformers class that picks another by the component's configuration may be told to import it from the folder."""
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "mine.Model"}}), encoding="utf-8")
    (folder / "text_encoder" / "mine.py").write_text(code(ran), encoding="utf-8")
    set_index(folder, text_encoder=["transformers", "AutoModel"])
    with pytest.raises(PipelineLookupError, match=r"text_encoder/config\.json would have component 'text_encoder' made by code"):
        pipelines.from_pretrained(folder)


def test_code_that_a_processor_would_run(folder, ran, monkeypatch):
    """The tokenizer in one is looked up like that, too, after a question to whoever sits at the terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    path = folder / "tokenizer" / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["mine.Model", "mine.Model"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map, "tokenizer_class": "Model"}), encoding="utf-8")
    (folder / "tokenizer" / "mine.py").write_text(code(ran), encoding="utf-8")
    set_index(folder, tokenizer=["transformers", "CLIPProcessor"])
    with pytest.raises(PipelineLookupError, match=r"tokenizer/tokenizer_config\.json would have component 'tokenizer' made by code"):
        pipelines.from_pretrained(folder)


@pytest.mark.parametrize("library", ["diffusers", "flux"])
def test_a_component_that_is_a_pipeline(folder, ran, library):
    """diffusers would load it from an index of its own, and read pickles that it names."""
    inner = folder / "transformer" / "unet"
    inner.mkdir()
    (inner / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Bomb(ran)))
    (inner / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}', encoding="utf-8")
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (folder / "transformer" / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    set_index(folder, transformer=[library, "FluxPipeline"])
    with pytest.raises(
        PipelineLookupError, match=r"'transformer' is a pipeline of its own, with an index \(transformer/model_index\.json\)"
    ):
        pipelines.from_pretrained(folder)


def test_an_adapter_of_another_model(folder):
    """A component's folder with an adapter alone leads to another model, which may be anywhere: it is named. Beside its own it is none."""
    path = folder / "text_encoder" / "adapter_config.json"
    path.write_text('{"base_model_name_or_path": "../elsewhere"}', encoding="utf-8")
    with pytest.raises(
        PipelineLookupError, match=r"text_encoder/adapter_config\.json has the weights.*another model, \.\./elsewhere: load"
    ):
        pipelines.from_pretrained(folder)
    for content in ({"base_model_name_or_path": str(folder / "text_encoder")}, {"base_model_name_or_path": None}, {}):
        path.write_text(json.dumps(content), encoding="utf-8")
        read_folder(folder).refuse_what_runs(given={}, variant=None)


@pytest.mark.parametrize(
    "entry", [None, 5, "diffusers", [], ["diffusers"], ["diffusers", None], [None, "X"], ["a", "b", "c"], {"a": 1}], ids=str
)
def test_a_component_without_its_class(folder, entry):
    """What stands in the index for it is quoted."""
    set_index(folder, transformer=entry)
    with pytest.raises(PipelineLookupError, match=re.escape(f"has {entry!r} for component 'transformer', and no names of a library and")):
        pipelines.from_pretrained(folder)


@pytest.mark.parametrize(("library", "name"), [("diffusers", "logging"), ("transformers", "pipeline"), ("os", "system")])
def test_a_component_whose_class_is_none(folder, library, name):
    """A function or a module of a known library is not asked to load anything."""
    set_index(folder, transformer=[library, name])
    with pytest.raises(PipelineLookupError, match=f"component 'transformer' is to be a {name} of '{library}', which is no class there"):
        pipelines.from_pretrained(folder)


@pytest.mark.parametrize(("name", "whole"), [("tokenizer", True), ("tokenizer_2", False)], ids=["no folder", "no vocabulary"])
def test_a_tokenizer_without_a_vocabulary(folder, name, whole):
    """transformers makes one of nothing, to which all prompts are alike: the folder is not complete."""
    if whole:
        shutil.rmtree(folder / name)
    else:
        (folder / name / "tokenizer.json").unlink()
    with pytest.raises(PipelineLookupError, match=f": {name} has no vocabulary, as its files are not there: the folder is not complete"):
        pipelines.from_pretrained(folder)
    refuse_empty_tokenizers(folder, {"other": None})


def test_another_model_that_a_description_names(folder):
    """diffusers loads it along with some pipelines, from wherever it is: it is refused, and the way around it is told."""
    from pipelines.folder import refuse_connected

    (folder / "README.md").write_text("---\nprior:\n- ../other\n---\n", encoding="utf-8")
    connected = type("Combined", (), {"_load_connected_pipes": True})
    with pytest.raises(PipelineLookupError, match=r"README\.md names another model to be loaded with it.*\.\./other"):
        refuse_connected(folder, connected)
    refuse_connected(folder, type("Plain", (), {}))
    (folder / "README.md").write_text("# A model\n", encoding="utf-8")
    refuse_connected(folder, connected)


def test_a_shard_that_is_missing(folder):
    """The index that names it is named, before anything is loaded."""
    (shard,) = (folder / "transformer").glob("*-00002-of-*.safetensors")
    shard.unlink()
    with pytest.raises(PipelineLookupError, match=rf"safetensors\.index\.json names '{shard.name}', which is not there: the folder is not"):
        pipelines.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "shard.bin"])
def test_a_shard_elsewhere(folder, name):
    """An index leads to safetensors beside it only."""
    (index,) = (folder / "transformer").glob("*.index.json")
    content = json.loads(index.read_text(encoding="utf-8"))
    content["weight_map"] = dict.fromkeys(content["weight_map"], name)
    index.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(PipelineLookupError, match="as a shard, which is no safetensors beside it"):
        pipelines.from_pretrained(folder)


def _as_variant(folder, name):
    """Make a folder's files those of a variant, as diffusers names them."""
    rename(folder, ".safetensors.index.json", f".safetensors.index.{name}.json")
    for path in folder.rglob("*.safetensors"):
        first, dash, shard = path.name.removesuffix(".safetensors").partition("-")
        path.rename(path.with_name(f"{first}.{name}{dash}{shard}.safetensors"))
    for index in folder.rglob(f"*.index.{name}.json"):
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {key: shard.replace("model-", f"model.{name}-") for key, shard in content["weight_map"].items()}
        index.write_text(json.dumps(content), encoding="utf-8")


def test_a_variant_is_asked_for(folder, flux):
    """Where weights are there in a variant only, the error says so; asked for it is loaded, in the type that is asked for."""
    _as_variant(folder, "fp16")
    with pytest.raises(PipelineLookupError, match="'transformer' has its weights as variant='fp16', not as variant=None: ask"):
        pipelines.from_pretrained(folder)
    loaded = pipelines.from_pretrained(folder, variant="fp16", dtype=torch.float16)
    assert {p.dtype for p in loaded.transformer.parameters()} == {torch.float16}
    wanted = flux.make_pipeline().transformer.to(torch.float16).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.transformer.state_dict().items())


def test_a_pickled_variant_is_not_read(folder, ran):
    """A variant as a pickle is refused, and the one beside it as safetensors is named."""
    (folder / "vae" / "diffusion_pytorch_model.fp16.bin").write_bytes(pickle.dumps(Bomb(ran)))
    with pytest.raises(
        PipelineLookupError, match=r"'vae' has its weights as variant='None'.*vae/diffusion_pytorch_model\.fp16\.bin: pickle"
    ):
        pipelines.from_pretrained(folder, variant="fp16")


def test_which_variant_the_command_line_takes(folder):
    """The one without a name where it is complete, else the first that is; a component without one may fill in."""
    from omni_offload.cli.targets import load_folder

    assert read_folder(folder).variant() is None
    _as_variant(folder, "fp16")
    assert read_folder(folder).variant() == "fp16"
    for path in (folder / "vae").glob("*.safetensors"):
        path.rename(path.with_name(path.name.replace(".fp16", "")))
    assert read_folder(folder).variant() == "fp16"
    assert load_folder(folder).transformer is not None
    for path in (folder / "vae").glob("*.safetensors"):
        path.rename(path.with_name(path.name.replace("_model", "_model.ema")))
    assert read_folder(folder).variant() is None


def test_several_models_as_one_component(tmp_path):
    """Weights of a component that is several models lie in folders with numbers, and are looked at too."""
    case = pipelines.registered()["stable_diffusion_controlnet"].load_cases()[1]
    case.make_pipeline().save_pretrained(tmp_path)
    saved = read_folder(tmp_path)
    assert [files[0].path.parent.name for files in saved.weight_files("controlnet")] == ["controlnet", "controlnet_1"]
    for path in (tmp_path / "controlnet_1").glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(PipelineLookupError, match=r"controlnet_1/.*\.bin: pickles"):
        pipelines.from_pretrained(tmp_path)


@pytest.fixture
def cache(saved, tmp_path):
    """A cache of the hub with one model."""
    model = tmp_path / "hub" / "models--owner--model"
    shutil.copytree(saved, model / "snapshots" / ("a" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    return tmp_path / "hub"


def test_a_name_of_the_hub(cache, flux):
    """A model in the hub's cache is loaded by its name, as the registered class, without a connection."""
    loaded = pipelines.from_pretrained("owner/model", cache_dir=cache, local_files_only=True)
    assert type(loaded) is pipelines.get("flux")
    assert loaded.config._name_or_path == "owner/model"
    found = loaded.transformer.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in flux.make_pipeline().transformer.state_dict().items())


def test_a_model_of_the_hub_is_looked_at_too(cache, ran):
    """Its folder is refused as any other."""
    folder = next((cache / "models--owner--model" / "snapshots").iterdir())
    (folder / "transformer" / "mine.py").write_text(code(ran), encoding="utf-8")
    set_index(folder, transformer=["mine", "Model"])
    with pytest.raises(PipelineLookupError, match=r"transformer/mine\.py would have component"):
        pipelines.from_pretrained("owner/model", cache_dir=cache, local_files_only=True)


def test_what_is_fetched(saved, monkeypatch):
    """First the index alone; then, of the registered class, safetensors of the variant, without components that are given."""
    asked = []

    def fetch_index(name, file, **how):
        asked.append((name, file, how))
        return str(saved / file)

    def download(name, **how):
        asked.append((name, how))
        return str(saved)

    cls = pipelines.get("flux")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch_index)
    monkeypatch.setattr(cls, "download", download)
    monkeypatch.setattr(cls, "from_pretrained", lambda folder, **how: asked.append((folder, how)) or cls.__new__(cls))
    monkeypatch.setattr(cls, "register_to_config", lambda _, **values: asked.append(values))
    pipelines.from_pretrained("owner/model", revision="v1", variant="fp16", vae=None)
    assert asked == [
        ("owner/model", "model_index.json", {"revision": "v1"}),
        ("owner/model", {"variant": "fp16", "vae": None, "revision": "v1", "use_safetensors": True}),
        (saved, {"revision": "v1", "variant": "fp16", "vae": None, "local_files_only": True, "use_safetensors": True}),
        {"_name_or_path": "owner/model"},
    ]


def test_a_hub_that_cannot_be_reached(tmp_path):
    """One line says that it is neither a folder nor in the cache nor to be had."""
    with pytest.raises(PipelineLookupError, match="cannot load 'owner/other': it is no local folder, and on the hub it was not") as info:
        pipelines.from_pretrained("owner/other", cache_dir=tmp_path)
    assert "\n" not in str(info.value)
