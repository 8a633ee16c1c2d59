"""What `make coverage` does not ask for, in one place."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What is not the core: the kit and the command line have tests of their own.
NOT_THE_CORE = ["omni_offload/testing/*", "omni_offload/cli/*", "omni_offload/__main__.py"]
#: Lines of the core that no test walks, as they stand in the source, each with its reason beside it.
EXCEPTIONS: list[str] = []


def test_what_is_measured_is_the_whole_core_with_every_branch():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["coverage"]
    assert settings["run"] == {"branch": True, "source": ["omni_offload"], "omit": NOT_THE_CORE}
    assert settings["report"]["fail_under"] == 100
    assert not {"exclude_lines", "exclude_also", "partial_branches"} & settings["report"].keys()


def test_every_line_that_is_left_out_is_named_here_and_has_a_reason():
    found = []
    for path in sorted((ROOT / "omni_offload").rglob("*.py")):
        if path.relative_to(ROOT / "omni_offload").parts[0] not in ("testing", "cli"):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}: {line.strip()}" for line in lines if "pragma: no" in line]
    assert found == EXCEPTIONS
    assert [line for line in found if not line.partition("pragma: no")[2].partition("(")[2].endswith(")")] == []
