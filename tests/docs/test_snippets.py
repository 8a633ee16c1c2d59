"""What README.md and the pages show runs as it stands there, and prints what they say.

A page's blocks run in order, in one namespace and one folder. A `text title="Output"` block is what the block before it printed, with
`...` for what differs from run to run. A python block that cannot run here says so in its first line: `# not run: <reason>`.
"""

import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from omni_offload.cli import main, places

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"# not run: .{10,}")
OUTPUT = 'text title="Output"'
RUNS = ("python", "console", "sh", OUTPUT)
SHOWN_ONLY = ("text", "toml", "json")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_python(example):
    if NOT_RUN.match(example.parsed):
        compile(example.parsed, example.path, "exec")
        return
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            PythonEvaluator()(example)
    finally:
        example.namespace["__printed__"] = captured.getvalue()


def run_command(line):
    """Run a line of a shell that begins with `omni-offload`, and return status and both outputs."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured), contextlib.redirect_stderr(captured):
        status = main(shlex.split(line, comments=True)[1:])
    return status, captured.getvalue()


def run_console(example):
    for part in re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)[1:]:
        line, _, wanted = part.partition("\n")
        assert line.startswith("omni-offload "), f"{example.path}:{example.line}: only omni-offload is run: {line}"
        status, got = run_command(line)
        assert status == (2 if wanted.startswith("omni-offload: ") else 0), got
        compare(wanted, got, example)


def run_sh(example):
    for line in str(example.parsed).splitlines():
        if line.startswith("omni-offload "):
            status, got = run_command(line)
            assert status == 0, got


def compare_output(example):
    compare(str(example.parsed), example.namespace.pop("__printed__"), example)


def compare(wanted, got, example):
    checker = doctest.OutputChecker()
    if not checker.check_output(wanted, got, FLAGS):
        pytest.fail(f"{example.path}:{example.line} shows\n{wanted}\nand got\n{got}")


EVALUATORS = dict(zip(RUNS, (run_python, run_console, run_sh, compare_output), strict=True))
SYBIL = Sybil(parsers=[CodeBlockParser(language, evaluate) for language, evaluate in EVALUATORS.items()])


def fences(page):
    return re.findall(r"^ *```(.*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[::2]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if set(fences(page)) & {*RUNS}], ids=name)
def test_what_a_page_shows_runs(page, workplace, monkeypatch):
    """Every python block runs, every console block prints what it shows."""
    monkeypatch.setattr(places, "find_accelerator", lambda: None)  # as on a machine without one, also where there is one
    document = SYBIL.parse(page)
    for example in document.examples():
        try:
            example.evaluate()
        except Exception as error:
            error.add_note(f"in the block at {name(page)}:{example.line}")
            raise
    document.namespace.clear()


@pytest.mark.parametrize(
    "text",
    [
        '```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n',
        "```python\nraise ValueError\n```\n",
        "```python\n# not run: it needs a real model\nif:\n```\n",
        "```console\n$ omni-offload pipelines --json\n{}\n```\n",
        "```console\n$ omni-offload nonsense\n```\n",
        "```console\n$ rm page.md\n```\n",
        "```sh\nomni-offload run nothing\n```\n",
    ],
)
def test_what_is_wrong_is_noticed(text, tmp_path):
    """Other output, an error, a command that fails or is none of ours: each ends the test of a page."""
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, pytest.fail.Exception, SyntaxError, ValueError)):
        for example in SYBIL.parse(page).examples():
            example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_of_a_language_that_is_known(page):
    """No block escapes the tests by its language."""
    assert not {*fences(page)} - {*RUNS, *SHOWN_ONLY}


def test_blocks_that_are_not_run_are_rare():
    """At most three blocks of all pages are not run, each with its reason in it."""
    found = [match for page in PAGES for match in re.findall(r"# not run\b.*", page.read_text(encoding="utf-8"))]
    assert len(found) <= 3, found
    assert all(NOT_RUN.match(line) for line in found)
