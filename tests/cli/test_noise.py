"""What a user sees on standard error: nothing of what libraries say on import, and everything that concerns the model, once."""

import logging
import subprocess
import sys

import pytest

from omni_offload.cli.noise import without_noise


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "omni_offload", *arguments], capture_output=True, text=True, check=False, cwd=cwd, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("arguments", [("run", "digits", "--prompt", "seven"), ("check", "digits", "--checks", "protocols")])
def test_standard_error_is_empty(arguments, tmp_path):
    done = command(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("pipelines",), ("run", "--help"), ("check", "--help")])
def test_what_needs_no_torch_imports_none(arguments, tmp_path):
    """Help and the list of pipelines come at once."""
    code = (
        "import sys; from omni_offload.cli import main; status = main(sys.argv[1:]);"
        " found = sorted({'torch', 'diffusers', 'transformers', 'torchao'} & set(sys.modules)); sys.exit(str(found) if found else status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def records(name, *messages):
    """Return what a user would read of some messages of a logger of a library."""
    library, seen = logging.getLogger(name.partition(".")[0]), []

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    handler = Handler()
    library.addHandler(handler)
    filters = list(logging.getLogger(name).filters)
    try:
        with without_noise():
            for message in messages:
                logging.getLogger(name).warning(message)
    finally:
        library.removeHandler(handler)
    assert not handler.filters
    assert logging.getLogger(name).filters == filters
    return seen


def test_known_noise_is_kept_back_and_nothing_else():
    log = "diffusers.models.modeling_utils"
    noise = "There are modules in FluxTransformer2DModel that should be kept in float32: []. Casting ..."
    real = "There are modules in WanTransformer3DModel that should be kept in float32: ['norm']. Casting ..."
    assert records(log, noise, real) == [real]


def test_what_concerns_the_model_is_said_once():
    assert records("transformers.tokenization_utils_base", "too long", "too long", "too short") == ["too long", "too short"]


def test_an_error_inside_leaves_nothing(monkeypatch):
    logger = logging.getLogger("torchao")
    with pytest.raises(ValueError, match="inside"), without_noise():
        assert logger.filters
        raise ValueError("inside")
    assert not logger.filters
