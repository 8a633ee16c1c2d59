"""Compile the software accelerator once per torch version, and keep it in a per-user cache."""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from omni_offload.errors import OffloadStateError

__all__ = ["cache_folder", "load_library", "why_not_buildable"]

logger = logging.getLogger(__name__)

MODULE_NAME = "omni_offload_sim"
OLDEST_TORCH = (2, 11)
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-shared", "-fPIC", "-O1", "-g0", "-std=c++20", f"-DTORCH_EXTENSION_NAME={MODULE_NAME}")
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
COMPILERS = ("c++", "g++", "clang++")
OUTPUT_TAIL = 25  # lines of a failed compiler run that an error quotes


def cache_folder() -> Path:
    """Return the folder of built libraries, below `OMNI_OFFLOAD_CACHE`, `XDG_CACHE_HOME` or `~/.cache`."""
    if root := os.environ.get("OMNI_OFFLOAD_CACHE"):
        return Path(root).expanduser() / "sim"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "omni-offload" / "sim"


def library_path() -> Path:
    """Return where the library for this torch, this Python and these sources is kept, built or not."""
    digest = hashlib.sha256("\0".join((*FLAGS, *LIBRARIES, sys.platform)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return cache_folder() / f"torch-{torch.__version__}-{abi}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command: `CXX` where set, else the first found of c++, g++, clang++, else None."""
    asked = os.environ.get("CXX")
    commands = [shlex.split(asked)] if asked else [[name] for name in COMPILERS]
    return next((command for command in commands if command and shutil.which(command[0])), None)


def why_not_buildable() -> str | None:
    """Say why the library can neither be loaded from the cache nor be built, or return None. Builds nothing."""
    if sys.platform == "win32":
        return "the software accelerator needs Linux or macOS, found Windows"
    if _torch_version() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"the software accelerator needs torch {oldest} or newer, found {torch.__version__}; upgrade torch"
    if _is_intact(library_path()):
        return None
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return (
            "the software accelerator needs Python's headers to build itself once, and there is no Python.h in "
            f"{sysconfig.get_path('include')}; install them (Debian and Ubuntu: `apt install python3-dev`)"
        )
    if find_compiler() is None:
        asked = os.environ.get("CXX")
        found = f"CXX={asked!r} is no program" if asked else f"found none of {', '.join(COMPILERS)} on PATH"
        return (
            f"the software accelerator needs a C++20 compiler to build itself once: {found}; "
            "install one (Debian and Ubuntu: `apt install g++`) or set CXX to one"
        )
    return None


def load_library() -> ModuleType:
    """Load the library, after building it where the cache has none (about 20 seconds).

    Several processes may call this at once: one builds, the others wait for it.

    Raises:
        OffloadStateError: no compiler, a failed compilation, a cache that cannot be written, a torch that is too old.
    """
    if reason := why_not_buildable():
        raise OffloadStateError(reason)
    path = library_path()
    ensure_built(path)
    try:
        return _import_library(path)
    except ImportError as error:
        logger.warning("%s does not load (%s): building it again", path, error)
    ensure_built(path, again=True)
    try:
        return _import_library(path)
    except ImportError as error:
        raise OffloadStateError(f"the software accelerator was built anew, but does not load from {path}: {error}") from error


def ensure_built(path: Path, *, again: bool = False) -> None:
    """Build the library at `path` unless an intact one is there; `again` builds it in any case.

    Raises:
        OffloadStateError: the build failed, or the folder cannot be written. Nothing half-built stays there.
    """
    if not again and _is_intact(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if again or not _is_intact(path):
                _build(path)
    except OSError as error:
        raise OffloadStateError(
            f"the software accelerator cannot be built in {path.parent}: {error}; set OMNI_OFFLOAD_CACHE to a folder that can be written"
        ) from error


def _build(path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise OffloadStateError(why_not_buildable() or "the C++ compiler has disappeared")
    logger.info("building the software accelerator with %s (once per torch version, about 20 s)", compiler[0])
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        output = Path(folder) / path.name
        command = [*compiler, *_arguments(), "-o", str(output)]
        # the command is the user's own compiler and our constants
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603
        if done.returncode != 0 or not output.is_file():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-OUTPUT_TAIL:]) or "(no output)"
            raise OffloadStateError(
                f"the software accelerator does not compile: `{shlex.join(compiler)}` ended with {done.returncode}; "
                f"it needs one that knows C++20 (g++ 10 or newer; set CXX to choose one). Its last lines:\n{tail}"
            )
        _digest_path(path).unlink(missing_ok=True)
        output.replace(path)
        digest = Path(folder) / "digest"
        digest.write_text(_digest(path))
        digest.replace(_digest_path(path))


def _arguments() -> list[str]:
    from torch.utils import cpp_extension  # noqa: PLC0415  (slow to import, and needed to build only)

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()
    platform = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [
        *FLAGS,
        *platform,
        *(part for include in includes for part in ("-isystem", include)),
        str(SOURCES / "sim.cpp"),
        *(f"-L{folder}" for folder in libraries),
        *LIBRARIES,
    ]


def _import_library(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"no import spec for {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_intact(path: Path) -> bool:
    # Mapping a truncated library would end the process: compare it with its digest first.
    try:
        return _digest_path(path).read_text() == _digest(path)
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # noqa: PLC0415  (POSIX only)

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
