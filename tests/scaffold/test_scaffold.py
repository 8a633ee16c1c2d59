"""`omni-offload scaffold` writes a family that keeps the contract as it is written."""

import importlib
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from omni_offload.cli import main
from omni_offload.testing import Outcome, check_pipeline

ROOT = Path(__file__).parents[2]

#: Family -> upstream class, and case: a DiT of two stacks, a case that is made by a function, several UNets, a weight that the
#: pipeline itself uses, and layers that it calls.
FAMILIES = {
    "bria": ("BriaPipeline", "make_bria"),
    "unclip": ("UnCLIPPipeline", "UNCLIP"),
    "paint_by_example": ("PaintByExamplePipeline", "PAINT_BY_EXAMPLE"),
    "versatile": ("VersatileDiffusionImageVariationPipeline", "VERSATILE"),
}

#: What every run checks of one family; the exhaustive run checks all of each.
SOME = ("check_discovery", "check_plan", "check_numerics", "check_residency", "check_stray_use")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return an empty project that is the working folder while the tests of this module run."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for module in [module for module in sys.modules if module.partition(".")[0] == "families"]:
        del sys.modules[module]


@pytest.fixture
def families(project, monkeypatch):
    """Return a function that scaffolds a family, once, and returns its folder and its case."""
    monkeypatch.chdir(project)

    def scaffold(name):
        cls, case = FAMILIES[name]
        folder = project / "families" / name
        if not folder.exists():
            assert main(["scaffold", f"diffusers:{cls}", "--case", f"upstream_cases:{case}", "--folder", "families", "--name", name]) == 0
            importlib.invalidate_caches()
        return folder, getattr(importlib.import_module(f"families.{name}.cases"), name.upper())

    return scaffold


def require_contract(case, **settings):
    for mode in ("module", "layer"):
        report = check_pipeline(case, mode=mode, **settings)
        report.raise_for_failures()
        assert report.named(Outcome.PASSED)


def test_what_is_written_keeps_the_contract(families):
    """In either mode, without an edit: the rules that declarations can break."""
    require_contract(families("bria")[1], checks=SOME)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_keeps_the_whole_contract(families, name):
    """In either mode, without an edit: every rule, but for what the upstream case says that upstream itself cannot."""
    require_contract(families(name)[1])


@pytest.mark.parametrize("names", [("paint_by_example",), pytest.param((*FAMILIES,), marks=pytest.mark.exhaustive)], ids=["one", "all"])
def test_what_is_written_needs_no_formatting(families, project, names):
    """By all rules of the linter but those that this project leaves out."""
    for name in names:
        families(name)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]["ignore"]
    (project / "ruff.toml").write_text(f'line-length = 140\n[lint]\nselect = ["ALL"]\nignore = {json.dumps(settings)}\n')
    (project / "families" / "__init__.py").write_text('"""Families."""\n')
    ruff = shutil.which("ruff", path=Path(sys.executable).parent) or "ruff"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "families"], cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_weight_that_the_pipeline_uses_is_brought_by_its_method(families):
    """The class has an override with a context, and nothing else of its own but declarations."""
    folder, case = families("paint_by_example")
    text = (folder / "pipeline_paint_by_example.py").read_text()
    assert text.endswith('''
    def _encode_image(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with `image_encoder` on the device: upstream uses weights here outside of any entry point."""
        with self.on_device("image_encoder"):
            return super()._encode_image(*args, **kwargs)
''')
    assert type(case.make_pipeline()).__name__ == "OmniPaintByExamplePipeline"


def test_nothing_is_replaced(tmp_path, monkeypatch, capsys):
    """A file that exists ends it, before anything is written."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bria"
    folder.mkdir()
    for name in ("pipeline_bria.py", "cases.py"):
        (folder / name).write_text("mine")
    assert main(["scaffold", "diffusers:BriaPipeline", "--case", "upstream_cases:BRIA"]) == 2
    assert "bria/pipeline_bria.py, bria/cases.py exist already, and nothing is replaced" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"pipeline_bria.py": "mine", "cases.py": "mine"}


def test_json(tmp_path, monkeypatch, capsys):
    """One object says what was written, and how the audit of it ended."""
    monkeypatch.chdir(tmp_path)
    assert main(["scaffold", "diffusers:BriaPipeline", "--case", "upstream_cases:BRIA", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["files"] == ["bria/__init__.py", "bria/pipeline_bria.py", "bria/cases.py"]
    assert (data["family"], data["class"], data["case"]) == ("bria", "OmniBriaPipeline", "BRIA")
    assert data["audit"]["clean"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diffusers", "--case", "upstream_cases:BRIA"], "'diffusers' is no MODULE:NAME"),
        (["diffusers:NoPipeline", "--case", "upstream_cases:BRIA"], "module 'diffusers' has no 'NoPipeline'"),
        (["nowhere:NoPipeline", "--case", "upstream_cases:BRIA"], "there is no module 'nowhere'"),
        (["upstream_cases:BRIA", "--case", "upstream_cases:BRIA"], "is a PipelineCase and no class"),
        (["pipelines.flux.pipeline_flux:OmniFluxPipeline", "--case", "pipelines.flux.cases:FLUX"], "declares its components already"),
        (["diffusers:BriaPipeline", "--case", "upstream_cases:torch"], "upstream_cases:torch is a module; give a PipelineCase"),
        (["diffusers:FluxPipeline", "--case", "upstream_cases:BRIA"], "case 'bria' makes a BriaPipeline, and no FluxPipeline"),
        (["diffusers:BriaPipeline", "--case", "upstream_cases:FAILING"], "failing: the call itself fails, without any offload: KeyError"),
        (["diffusers:BriaPipeline", "--case", "upstream_cases:BRIA", "--name", "my-bria"], "--name 'my-bria' is no name for a package"),
        (["diffusers:BriaPipeline", "--case", "upstream_cases:BRIA", "--name", "class"], "--name 'class' is no name for a package"),
        (
            ["diffusers:BriaPipeline", "--case", "upstream_cases:_fail"],
            "--case upstream_cases:_fail makes no case: TypeError: _fail() missing",
        ),
        (["diffusers:BriaPipeline", "--case", "upstream_cases:BRIA", "--folder", "occupied"], "cannot be written"),
        (["diffusers:BriaPipeline"], "Missing option '--case'"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, message):
    """What the user can put right is one line and status 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "occupied").write_text("")
    assert main(["scaffold", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["occupied"]


def test_what_comes_next_can_be_run_as_it_stands(tmp_path, monkeypatch, capsys):
    """The command names the package as it is imported from the working folder, or the folder that it is imported from."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    for folder, command in [
        ("families", "omni-offload check families.bria.cases:BRIA"),
        (str(tmp_path / "project" / "others"), "omni-offload check others.bria.cases:BRIA"),
        ("..", f"cd {tmp_path} && omni-offload check bria.cases:BRIA"),
    ]:
        assert main(["scaffold", "diffusers:BriaPipeline", "--case", "upstream_cases:BRIA", "--folder", folder]) == 0
        assert capsys.readouterr().out.endswith(f"\nnext: {command}\n")


def test_all_files_are_written_or_none(tmp_path, monkeypatch, capsys):
    """One that cannot be written takes those before it away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("omni_offload.cli.scaffold._refuse_files", lambda _place, _names: None)  # as if the file came just now
    (tmp_path / "bria").mkdir()
    (tmp_path / "bria" / "cases.py").write_text("mine")
    assert main(["scaffold", "diffusers:BriaPipeline", "--case", "upstream_cases:BRIA"]) == 2
    assert "bria cannot be written" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in (tmp_path / "bria").iterdir()} == {"cases.py": "mine"}
