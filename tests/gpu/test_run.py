"""The checks for a real accelerator run on the simulated one, so that they work when there is one."""

import importlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def run(*arguments, out, **environment):
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), **environment}
    done = subprocess.run([str(FOLDER / "run.sh"), *arguments], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_script_is_executable():
    assert (FOLDER / "run.sh").stat().st_mode & stat.S_IXUSR


def test_all_sections_hold_on_the_simulated_accelerator(tmp_path):
    status, out, err = run("--device", "sim", "--quick", out=tmp_path)
    assert status == 0, out + err
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert {section["name"] for section in told["sections"]} == {
        *("pinning", "streams", "copy speed", "equality", "peaks", "recording", "contract")
    }
    assert all(section["held"] for section in told["sections"])
    assert "| peaks | yes |" in (tmp_path / "gpu.md").read_text()


def test_without_an_accelerator_it_says_so_and_succeeds(tmp_path):
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type != "sim":
        pytest.skip("this machine has an accelerator")
    status, out, _ = run(out=tmp_path)
    assert (status, out) == (0, "no GPU: nothing to check here\n")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    checks = importlib.import_module("checks")
    monkeypatch.setattr(checks, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["checks.py"])
    assert checks.main() == 2
    assert "no_such_package" in capsys.readouterr().err


def test_wheels_are_taken_from_a_folder(tmp_path):
    package = tmp_path / "source" / "only_in_a_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "source" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "only-in-a-wheel"\nversion = "1"\n'
    )
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(tmp_path / "source")]
    subprocess.run(pip, check=True)
    probe = tmp_path / "python"
    probe.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && exec {sys.executable} "$@"\nexec {sys.executable} -c "import only_in_a_wheel; print(only_in_a_wheel.__file__)"\n'
    )
    probe.chmod(0o755)
    status, out, err = run(out=tmp_path, PYTHON=str(probe), WHEELS=str(wheels))
    assert status == 0, err
    assert out.endswith("only_in_a_wheel/__init__.py\n")
    assert not Path(out.strip()).exists()
