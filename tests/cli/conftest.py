import json

import diffusers
import pytest
import transformers

from omni_offload.cli import main

for library in (diffusers, transformers):
    library.utils.logging.get_logger()  # makes its handler now: one that is made in a test would write to that test's captured stream


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command line in an empty folder and returns status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(cli):
    """Return a function that runs a bad command line and returns its one line of complaint."""

    def run(*arguments):
        status, out, err = cli(*arguments)
        assert status == 2
        assert out == ""
        assert err.startswith("omni-offload: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture
def run_json(cli):
    """Return a function that runs a command line with --json and returns what it printed."""

    def run(*arguments):
        status, out, err = cli(*arguments, "--json")
        assert status == 0, err
        assert err == ""
        return json.loads(out)

    return run
