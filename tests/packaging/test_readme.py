"""What the README and the documentation say of the repository holds. That their code runs, tests/docs shows."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_the_table_is_that_of_the_benchmark(monkeypatch):
    """`make bench` writes both."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    readme_table = importlib.import_module("readme_table")
    assert readme_table.filled(README, readme_table.SOURCE.read_text(encoding="utf-8")) == README


def test_the_class_in_the_readme_is_short():
    """The README shows a pipeline of one's own, from its declaration to its picture, in ten lines at most."""
    (code,) = blocks(README, "python")
    body = code[code.index("class ") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_in_the_documentation_compiles(page):
    """Every block of Python is Python, also one that is not run."""
    for number, code in enumerate(blocks(page.read_text(encoding="utf-8"), "python")):
        compile(code, f"{page.name}[{number}]", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    """A link to a file leads to one that there is."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    targets = {str((page.parent / link).resolve().relative_to(ROOT)) for link in links}
    assert not [target for target in targets if not (ROOT / target).exists()]


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"\bmake ([a-z-]+)(?=`|\s+#)", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))))
)
def test_make_knows_the_targets_that_are_named(target):
    """What the pages tell a reader to make, `make` can make."""
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        line.partition("#")[0].split()
        for block in blocks(README, "sh")
        for line in block.splitlines()
        if "omni-offload " in line and "pip" not in line
    ],
)
def test_the_command_line_has_the_options_that_are_named(command):
    """The README's commands have the options that it gives them."""
    help_text = subprocess.run(
        [sys.executable, "-m", "omni_offload", command[1], "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(word in help_text for word in command if word.startswith("--"))
