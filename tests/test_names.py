"""What `import omni_offload` offers, and what it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import omni_offload


@pytest.mark.parametrize("name", omni_offload.__all__)
def test_every_public_name_is_found(name):
    assert getattr(omni_offload, name) is not None
    assert name in dir(omni_offload)


def test_what_type_checkers_read_is_what_is_imported():
    tree = ast.parse(Path(omni_offload.__file__).read_text())
    read = {(node.module, a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    imported = {(module, name) for module, names in omni_offload._MODULES.items() for name in names}
    assert imported == {pair for pair in read if pair[0].startswith("omni_offload.")}
    assert sorted(name for _, name in imported) == sorted(omni_offload.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="OmniOfload"):
        omni_offload.OmniOfload  # noqa: B018


def test_the_package_imports_torch_only_where_it_is_needed():
    code = "import sys, omni_offload.errors, pipelines; pipelines.registered(); print(sorted({'torch', 'diffusers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
