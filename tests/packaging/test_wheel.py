"""The wheel holds both packages with all that they need, and works in a clean environment."""

import email
import json
import zipfile
from pathlib import Path

import pytest
from clean_environment import ROOT, environment_of, run


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the interpreter of a new environment that holds the wheel."""
    return environment_of(tmp_path_factory.mktemp("environment"), wheel)


@pytest.mark.parametrize("package", ["omni_offload", "pipelines"])
def test_both_packages_are_typed(names, package):
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names


def test_every_python_file_of_both_packages_is_there(names):
    expected = {
        str(path.relative_to(ROOT))
        for package in ("omni_offload", "pipelines")
        for path in (ROOT / package).rglob("*.py")
        if "/." not in str(path)
    }
    assert expected <= names


def test_the_sources_of_the_simulated_accelerator_are_there(names):
    sources = ROOT / "omni_offload" / "testing" / "sim" / "csrc"
    assert {str(path.relative_to(ROOT)) for path in sources.iterdir()} <= names


def test_the_checkpoint_of_the_digits_is_there_with_its_attribution(names):
    checkpoint = ROOT / "pipelines" / "digits" / "checkpoint"
    expected = {str(path.relative_to(ROOT)) for path in checkpoint.rglob("*") if path.is_file()}
    assert "pipelines/digits/checkpoint/transformer/diffusion_pytorch_model.safetensors" in expected
    assert expected | {"pipelines/digits/ATTRIBUTION.md"} <= names


def test_nothing_else_is_there(names):
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"omni_offload", "pipelines"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_licence_is_there(names, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_requirements_stay_wide(metadata):
    required = metadata.get_all("Requires-Dist")
    assert "torch>=2.11" in required
    core = {item.partition(">")[0] for item in required if "extra ==" not in item}
    assert core == {"torch", "diffusers", "typing-extensions", "attrs"}
    assert not [item for item in required if "==" in item.partition(";")[0]]
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_extras_are_there(metadata):
    assert {"cli", "dev", "pipelines", "plot", "test"} <= set(metadata.get_all("Provides-Extra"))


def test_it_is_imported_from_the_clean_environment(installed, tmp_path):
    code = "import omni_offload, pipelines; print(omni_offload.__file__, pipelines.__file__)"
    found = run(installed, "-c", code, cwd=tmp_path).split()
    assert all(path.startswith(str(installed.parent.parent)) for path in found)


def test_its_command_lists_the_pipelines(installed, tmp_path):
    command = installed.parent.parent / next(installed.parent.parent.rglob("omni-offload")).relative_to(installed.parent.parent)
    listed = json.loads(run(installed, command, "pipelines", "--json", cwd=tmp_path))
    assert {"digits", "flux", "wan"} <= {entry["name"] for entry in listed}


def test_its_command_makes_a_picture(installed, tmp_path):
    told = json.loads(run(installed, "-m", "omni_offload", "run", "digits", "--prompt", "seven", "--json", cwd=tmp_path))
    assert (tmp_path / told["output"]).is_file()
