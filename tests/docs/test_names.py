"""What the pages name exists: checks, files, settings of commands."""

import re
from pathlib import Path

import pytest

from omni_offload.testing import all_checks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
KIT = {"check_pipeline"}
"""Names that begin like a check's and are none."""
TESTS = {
    word
    for source in (ROOT / "tests").rglob("test_*.py")
    for word in (source.stem, *re.findall(r"^ *def (test_\w+)", source.read_text(encoding="utf-8"), re.MULTILINE))
}


def code(page):
    """Return what stands in backticks on a page, outside of its blocks."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_checks_that_a_page_names_exist(page):
    """A check that was renamed is named anew."""
    named = {word for text in code(page) for word in re.findall(r"\bcheck_\w*[a-z]\b", text)}
    assert not named - {check.__name__ for check in all_checks()} - KIT


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page):
    """Paths in the repository, with `*` for any name and `<family>` for one that is to be chosen."""
    paths = {text for text in code(page) if re.fullmatch(r"(tests|docs|pipelines|omni_offload|\.ci)/[\w./*-]*", text)}
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tests_that_a_page_names_exist(page):
    """A test that was renamed is named anew; a file of tests is a file."""
    named = {word for text in code(page) for word in re.findall(r"(?<![/\w])test_\w+(?![\w.])", text)}
    assert not named - TESTS
