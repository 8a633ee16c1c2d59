"""Wheels, and environments that hold nothing else of the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What a child process must not inherit: it would find the checkout.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run(*command, cwd):
    """Return what a command prints, in an environment that does not lead to the checkout; it has to succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in LEAKS}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source, folder):
    """Build the wheel of a project, with what is installed here."""
    before = set(folder.glob("*.whl"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    (found,) = set(folder.glob("*.whl")) - before
    return found


def environment_of(folder, *wheels):
    """Return the interpreter of a new environment: the wheels are installed, and their requirements are those of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    run(*pip, "--target", str(site), *map(str, wheels), cwd=folder)
    # Appended to the path as a plain folder: its own .pth files, such as the checkout's, are not read.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
