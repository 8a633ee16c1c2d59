"""The library is built once, in a cache that never holds anything broken; what stands in the way is said in one error."""

import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest
import torch

from omni_offload.errors import OffloadStateError
from omni_offload.testing.sim import build, device, why_unavailable

BUILT = build.library_path()  # of the cache that this run uses


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a function that makes a compiler from a shell script in which `$out` is the library to write."""
    monkeypatch.setenv("OMNI_OFFLOAD_CACHE", str(tmp_path / "cache"))

    def compiler(script):
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nfor out; do :; done\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(program))

    compiler.runs = lambda: (tmp_path / "runs").read_text().count("run") if (tmp_path / "runs").exists() else 0
    return compiler


def left():
    return sorted(path.name for path in build.cache_folder().glob("*"))


def load_in_a_process():
    """Install in a fresh interpreter and return its last line of output."""
    script = "from omni_offload.testing import sim; import torch; print((torch.ones(2, device=sim.install()) + 1).cpu().tolist())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"OMNI_OFFLOAD_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a/sim"),
        ({"OMNI_OFFLOAD_CACHE": "~/x", "HOME": "/c"}, "/c/x/sim"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/omni-offload/sim"),
        ({"HOME": "/c"}, "/c/.cache/omni-offload/sim"),
    ],
)
def test_cache_folder(monkeypatch, names, expected):
    for name in ("OMNI_OFFLOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert str(build.cache_folder()) == expected


def test_key_names_torch_python_and_sources(monkeypatch, tmp_path):
    name = build.library_path().name
    assert name.startswith(f"torch-{torch.__version__}-cpython-{sys.version_info.major}{sys.version_info.minor}")
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.library_path().name == name
    source = tmp_path / "csrc" / "sim.cpp"
    source.write_text(source.read_text() + "// changed\n")
    changed = build.library_path().name
    assert changed != name
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O3"))
    assert build.library_path().name not in (name, changed)


def test_no_compiler_and_no_cached_build(cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -v")
    assert "CXX='/nowhere/g++ -v' is no program" in why_unavailable()
    assert "apt install g++" in why_unavailable()
    with pytest.raises(OffloadStateError, match="C\\+\\+20 compiler"):
        build.load_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "found none of c++, g++, clang++ on PATH" in why_unavailable()


def test_missing_python_headers_are_named(cache, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _name: "/nowhere/include")
    assert "no Python.h in /nowhere/include" in why_unavailable()


def test_cached_build_needs_no_compiler(cache, monkeypatch):
    cache(f'cp {BUILT} "$out"')
    build.ensure_built(build.library_path())
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert why_unavailable() is None
    assert load_in_a_process() == "[2.0, 2.0]"


def test_failed_compilation_shows_the_last_lines_and_leaves_nothing(cache):
    cache('for i in $(seq 99); do echo "note $i"; done; echo "sim.cpp:1: error: no such thing" >&2; echo half > "$out"; exit 3')
    with pytest.raises(OffloadStateError, match=r"does not compile.* ended with 3") as caught:
        build.load_library()
    message = str(caught.value)
    assert message.endswith("sim.cpp:1: error: no such thing")
    assert "note 99\n" in message
    assert "note 70\n" not in message
    assert left() == ["lock"]


def test_compiler_that_writes_nothing_is_a_failure(cache):
    cache("exit 0")
    with pytest.raises(OffloadStateError, match=r"ended with 0.*(?s:.)*no output"):
        build.load_library()
    assert left() == ["lock"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no digest"])
def test_damaged_cache_is_built_again(cache, damage):
    cache(f'cp {BUILT} "$out"')
    path = build.library_path()
    build.ensure_built(path)
    whole = path.read_bytes()
    if damage == "no digest":
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes({"truncated": whole[:5000], "changed": whole[:-1] + b"x", "empty": b""}[damage])
    for _ in range(2):
        build.ensure_built(path)
        assert path.read_bytes() == whole
        assert cache.runs() == 2


def test_library_that_never_loads_is_built_once_more_and_reported(cache):
    cache('echo "not a library" > "$out"')
    with pytest.raises(OffloadStateError, match="built anew, but does not load"):
        build.load_library()
    assert cache.runs() == 2


def test_folder_that_cannot_be_written(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNI_OFFLOAD_CACHE", str(tmp_path / "file"))
    with pytest.raises(OffloadStateError, match="set OMNI_OFFLOAD_CACHE to a folder that can be written"):
        build.load_library()


def test_processes_that_start_together_build_once(cache):
    cache(f'sleep 0.3; cp {BUILT} "$out"')
    script = "from omni_offload.testing.sim import build; build.ensure_built(build.library_path())"
    started = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    assert cache.runs() == 1


def test_old_torch_and_other_systems_are_named(cache, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert "needs torch 2.11 or newer, found 2.9.1" in why_unavailable()
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in why_unavailable()


def test_another_backend_in_the_place(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    assert "'npu' is registered already" in why_unavailable()
    with pytest.raises(OffloadStateError, match="one out-of-tree backend"):
        device.install()


def test_nothing_works_before_install():
    script = """
        from omni_offload.errors import OffloadStateError
        from omni_offload.testing import sim
        for call in (sim.allocated, sim.configure, sim.races, sim.clock, sim.current_settings, lambda: sim.spin(1)):
            try:
                call()
            except OffloadStateError as error:
                assert "install() first" in str(error)
            else:
                raise SystemExit(f"{call} did not raise")
        import torch
        assert not torch.accelerator.is_available()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=os.environ)
