"""The wheel holds both packages with all that they need, and works in a clean environment."""

import email
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a child process must not inherit: it would find the checkout.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name not in LEAKS}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


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
    """Return the interpreter of a new environment: the wheel is installed, and its requirements are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    run(*pip, "--target", str(site), str(wheel), cwd=folder)
    # Appended to the path as a plain folder: its own .pth files, such as the checkout's, are not read.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


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
