"""Somebody else's package, built and installed beside our wheel, registers its pipelines and runs the contract kit on them."""

import json
import shutil
import xml.etree.ElementTree as ET

import pytest
from clean_environment import ROOT, build_wheel, environment_of, run

from omni_offload.testing import all_checks

SOURCE = ROOT / "tests" / "third_party"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the interpreter of a new environment that holds both wheels."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    theirs = build_wheel(folder / "source", folder)
    return environment_of(folder / "environment", wheel, theirs)


def test_nothing_is_imported_from_the_checkout(installed, tmp_path):
    """omni_offload, pipelines and the other package come from the wheels."""
    code = "import acme_diffusion, omni_offload.testing, pipelines; print(acme_diffusion.__file__, omni_offload.testing.__file__, pipelines.__file__)"
    found = run(installed, "-c", code, cwd=tmp_path).split()
    assert len(found) == 3
    assert all(path.startswith(str(installed.parent.parent)) for path in found)


def test_its_pipelines_are_listed(installed, tmp_path):
    """The command line lists them beside ours."""
    listed = json.loads(run(installed, "-m", "omni_offload", "pipelines", "--json", cwd=tmp_path))
    classes = {entry["name"]: entry["class"] for entry in listed}
    assert classes["acme_waves"] == "acme_diffusion.waves:WavesPipeline"
    assert classes["acme_ddpm"] == "acme_diffusion.ddpm:OmniDDPMPipeline"
    assert "flux" in classes


@pytest.mark.timeout(900)
def test_its_own_tests_pass(installed, tmp_path):
    """Its test suite, which is the contract on its cases, passes, and runs every check on each."""
    shutil.copytree(SOURCE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE / "pyproject.toml", tmp_path)
    run(installed, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml", "report.xml", cwd=tmp_path)
    tests = [*ET.parse(tmp_path / "report.xml").iter("testcase")]
    for case, left_out in (("acme_waves", 6), ("acme_ddpm", 9)):  # four of them are about blocks, which do not stream in mode module
        found = {test.get("name"): test.find("skipped") is not None for test in tests if f"[{case}-" in test.get("name")}
        assert {name.partition(f"[{case}-")[2].rstrip("]") for name in found} == {check.__name__ for check in all_checks()}
        assert sum(found.values()) == left_out, [name for name, skipped in found.items() if skipped]
    assert sum("[" not in test.get("name") for test in tests) == 5
