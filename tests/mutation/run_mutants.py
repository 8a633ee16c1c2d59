"""Change one line of the package at a time, and see which test notices.

Every mutant of `mutants.MUTANTS` is applied to a copy of the package in a temporary folder, which stands before the installed one on
`sys.path`. The tests that reach a changed line run on it, those that the mutant names first, up to the first failure:

    KILLED       a named test failed
    OTHER        only a test that is not named failed
    SURVIVED     none failed
    NOT REACHED  no named test runs a changed line

Which tests reach which line is measured once, on an unchanged copy, with a coverage context a test; there, all of them must pass. A
mutant that hangs is killed by a limit of time, and the report says so:

    TIMEOUT      a named test did not end within `TEST_SECONDS`, or the run within `--timeout` seconds

cosmic-ray and mutmut make mutants by operators, all over a module, and know only whether the whole test command failed: neither takes a list of
hand-written ones, nor the name of the test that must fail.

    python tests/mutation/run_mutants.py                        all of them
    python tests/mutation/run_mutants.py NAME ... --json        some, as JSON
    python tests/mutation/run_mutants.py NAME --among PATH ...  find a killer among other tests
"""

# ruff: noqa: T201  (a script prints what it found)

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import coverage
import pytest
import torch
from mutants import CONTROLS, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "omni_offload"
JOBS = min(2, os.cpu_count() or 1)
GOOD = ("KILLED", "TIMEOUT")
#: A test that takes longer hangs.
TEST_SECONDS = 90

#: Changed line -> tests that run it.
Reach = Mapping[tuple[str, int], frozenset[str]]


@attrs.frozen
class Result:
    """What became of one mutant."""

    mutant: Mutant
    status: str
    killer: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return {**attrs.asdict(self.mutant), "status": self.status, "killer": self.killer, "seconds": round(self.seconds, 1)}


class StaleError(Exception):
    """The table and the source disagree, or the tests fail without any change."""


# ---- source --------------------------------------------------------------------------------------------------------------------------


def source_problems(mutants: Iterable[Mutant], package: Path = ROOT / PACKAGE) -> list[str]:
    """Say which mutants do not apply to the source as it is."""
    problems = []
    for mutant in mutants:
        path = package / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.fragment) if path.is_file() else 0
        if count != 1:
            problems.append(f"{mutant.name}: its fragment stands {count} times in {PACKAGE}/{mutant.file}, not once: {mutant.fragment!r}")
            continue
        try:
            compile(mutated(mutant, package), mutant.file, "exec")
        except SyntaxError as error:
            problems.append(f"{mutant.name}: {error}")
    return problems


def mutated(mutant: Mutant, package: Path) -> str:
    """Return the text of the changed file."""
    return (package / mutant.file).read_text(encoding="utf-8").replace(mutant.fragment, mutant.replacement)


def changed_lines(mutant: Mutant, package: Path) -> range:
    """Return the lines of the fragment, in the unchanged file; lines at its ends that stay as they are do not count."""
    text = (package / mutant.file).read_text(encoding="utf-8")
    first = text[: text.index(mutant.fragment)].count("\n") + 1
    old, new = mutant.fragment.split("\n"), mutant.replacement.split("\n")
    while len(old) > 1 and new and old[0] == new[0]:
        old, new, first = old[1:], new[1:], first + 1
    while len(old) > 1 and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return range(first, first + len(old))


# ---- one process a mutant ------------------------------------------------------------------------------------------------------------


class Watch:
    """A pytest plugin: which tests passed, which failed first; with `lines`, which lines each runs."""

    def __init__(self, lines: coverage.Coverage | None) -> None:
        self.lines = lines
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.late = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.lines is not None:
            self.lines.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.late = self.late or "Timeout (>" in str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def work(folder: Path, tests: Sequence[str], *, data: Path | None) -> None:
    """Run tests against the copy of the package in a folder, and write there what happened; in a forked process."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # a stale .pyc of the same size and second would be taken for the changed file
    measured = coverage.Coverage(data_file=str(data), source=[str(folder / PACKAGE)], config_file=False) if data else None
    watch = Watch(measured)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    options += ["-m", "not exhaustive and not rotating"]
    if measured is not None:
        measured.start()
    else:
        options += ["-x", f"--timeout={TEST_SECONDS}"]
    code = pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[watch])
    if measured is not None:
        measured.stop()
        measured.save()
    origin = importlib.import_module(PACKAGE).__file__
    result = {"code": int(code), "passed": watch.passed, "failed": list(dict.fromkeys(watch.failed)), "late": watch.late, "origin": origin}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def fork(folder: Path, tests: Sequence[str], *, data: Path | None = None) -> int:
    """Start `work` in a copy of this process, which has imported torch already; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(folder, tests, data=data)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outcome(folder: Path) -> dict[str, object]:
    """Read what `work` wrote, and make sure that it ran the copy."""
    path = folder / "result.json"
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
    if not path.is_file():
        raise StaleError(f"the tests ended without a result:\n{log}")
    result: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    if not Path(str(result["origin"])).is_relative_to(folder):
        raise StaleError(f"the tests imported {result['origin']}, not the copy in {folder}")
    if result["code"] not in (0, 1) and not result["failed"]:
        raise StaleError(f"pytest ended with code {result['code']}:\n{log}")
    return {**result, "log": log}


def copy_package(package: Path, folder: Path, mutant: Mutant | None = None) -> Path:
    """Copy the package to a new folder, changed or not."""
    folder.mkdir()
    shutil.copytree(package, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        (folder / PACKAGE / mutant.file).write_text(mutated(mutant, package), encoding="utf-8")
    return folder


# ---- all of them ---------------------------------------------------------------------------------------------------------------------


def measure(folder: Path, tests: Sequence[str], *, tolerant: bool) -> Reach:
    """Run tests on the unchanged package in a folder; return which of them run which line.

    Args:
        folder: Where the package is.
        tests: Paths, or names.
        tolerant: Leave out tests that fail.

    Raises:
        StaleError: A test fails, or none of a name runs.
    """
    data = folder / "coverage"
    os.waitpid(fork(folder, tests, data=data), 0)
    result = outcome(folder)
    if result["failed"] and not tolerant:
        raise StaleError(f"these tests fail on the unchanged package: {result['failed']}\n{result['log']}")
    passed = set(map(str, result["passed"])) - set(map(str, result["failed"]))  # type: ignore[call-overload]  # lists of names
    missing = [test for test in tests if "::" in test and not any(matches(name, test) for name in passed)]
    if missing:
        raise StaleError(f"these tests do not run (gone, exhaustive or rotating?): {missing}")
    reached: dict[tuple[str, int], frozenset[str]] = {}
    measured = coverage.CoverageData(str(data))
    measured.read()
    for path in measured.measured_files():
        file = str(Path(path).relative_to(folder / PACKAGE))
        for line, contexts in measured.contexts_by_lineno(path).items():
            reached[file, line] = frozenset(passed) if "" in contexts else passed.intersection(contexts)  # "": at import
    return reached


def matches(nodeid: str, name: str) -> bool:
    """Whether a test is of a name, which may leave the parameters out."""
    return nodeid == name or nodeid.startswith(f"{name}[")


def order(mutant: Mutant, package: Path, reach: Reach) -> tuple[list[str], list[str]]:
    """Return the tests that reach a mutant's lines: the named ones, in their order, and the others, those that run least first."""
    size = Counter(test for tests in reach.values() for test in tests)
    reaching = sorted(
        frozenset[str]().union(*(reach.get((mutant.file, line), frozenset()) for line in changed_lines(mutant, package))),
        key=lambda test: (size[test], test),
    )
    named = [test for name in mutant.killers for test in reaching if matches(test, name)]
    return named, [test for test in reaching if test not in named]


def run(mutants: Sequence[Mutant], *, timeout: float, among: Sequence[str] = (), tell: bool = True) -> list[Result]:
    """Run mutants, two processes at a time.

    Args:
        mutants: Which.
        timeout: Seconds after which the tests of one are ended.
        among: Paths of tests to look for killers in, instead of the named ones.
        tell: Whether each result is printed to stderr as it comes.
    """
    tests = list(among) or list(dict.fromkeys(name for mutant in mutants for name in mutant.killers))
    with tempfile.TemporaryDirectory(prefix="omni-mutants-") as root:
        package = copy_package(ROOT / PACKAGE, Path(root, "unchanged")) / PACKAGE  # edits during the run change nothing
        if problems := source_problems(mutants, package):
            raise StaleError("\n".join(problems))
        reach = measure(package.parent, tests, tolerant=bool(among))
        waiting = [(mutant, *order(mutant, package, reach)) for mutant in mutants]
        results: dict[str, Result] = {}
        running: dict[int, tuple[Mutant, list[str], list[str], Path, float]] = {}
        while waiting or running:
            while waiting and len(running) < JOBS:
                mutant, named, others = waiting.pop(0)
                tests = named or (others if among else [])
                if not tests:
                    results[mutant.name] = note(Result(mutant, "NOT REACHED"), tell=tell)
                    continue
                folder = copy_package(package, Path(root, f"{mutant.name}-{len(others)}-{len(named)}"), mutant)
                running[fork(folder, tests)] = (mutant, named, others, folder, time.monotonic())
            for pid, (mutant, named, others, folder, start) in [*running.items()]:
                late = time.monotonic() - start > timeout
                if late:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                if not late and not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
                if late:
                    os.waitpid(pid, 0)
                del running[pid]
                result = judge(mutant, folder, time.monotonic() - start, late=late)
                if result.status == "SURVIVED" and named and others:
                    waiting.append((mutant, [], others)) if among else waiting.append((mutant, others, []))
                else:
                    results[mutant.name] = note(result, tell=tell)
                shutil.rmtree(folder)
            time.sleep(0.02)
    return [results[mutant.name] for mutant in mutants]


def judge(mutant: Mutant, folder: Path, seconds: float, *, late: bool) -> Result:
    """Say what became of a mutant whose tests have ended."""
    if late:
        return Result(mutant, "TIMEOUT", f"no end after {seconds:.0f} s", seconds)
    found = outcome(folder)
    failed = found["failed"]
    if not isinstance(failed, list) or not failed:
        return Result(mutant, "SURVIVED", seconds=seconds)
    killer = str(failed[0])
    if not any(matches(killer, name) for name in mutant.killers):
        return Result(mutant, "OTHER", killer, seconds)
    return (
        Result(mutant, "TIMEOUT", f"{killer}, no end after {TEST_SECONDS} s", seconds)
        if found["late"]
        else Result(mutant, "KILLED", killer, seconds)
    )


def note(result: Result, *, tell: bool) -> Result:
    if tell:
        print(f"{result.status:<11}  {result.seconds:5.1f} s  {result.mutant.name}  {result.killer}", file=sys.stderr, flush=True)
    return result


def table(results: Sequence[Result]) -> str:
    """Return the results as text, a line each and their sum."""
    rows = [("status", "mutant", "file", "fault", "killed by")]
    rows += [(r.status, r.mutant.name, r.mutant.file, r.mutant.fault, r.killer) for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
    counts = ", ".join(f"{sum(r.status == s for r in results)} {s}" for s in dict.fromkeys(r.status for r in results))
    return "\n".join([*lines, f"{len(results)} mutants: {counts}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a mutant was not killed by a test it names, 2 where the table is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants; none: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--timeout", type=float, default=240, help="seconds after which the tests of one mutant are ended")
    parser.add_argument("--among", nargs="+", default=(), metavar="PATH", help="look for killers among these tests instead")
    asked = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in (*MUTANTS, *CONTROLS)}
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    torch.set_num_threads(1)
    mutants = [known[name] for name in asked.names] or list(MUTANTS)
    try:
        results = run(mutants, timeout=asked.timeout, among=asked.among)
    except StaleError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps([result.as_dict() for result in results], indent=2) if asked.json else table(results))
    return int(any(result.status not in GOOD for result in results))


if __name__ == "__main__":
    sys.exit(main())
