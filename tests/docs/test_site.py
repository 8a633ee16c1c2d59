"""The site is built without a warning and without the network, and shows what the code has."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipelines
from omni_offload.refusals import REFUSALS
from omni_offload.testing import all_checks

ROOT = Path(__file__).parents[2]
REFERENCE = {
    "omni_offload": "omni_offload.html",
    "omni_offload.testing": "testing.html",
    "omni_offload.testing.sim": "sim.html",
    "pipelines": "pipelines.html",
}
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)=[\"'](?:https?:)?//[^>]*>|@import\s+url\(|url\([\"']?https?:"
)


def _as_html(text):
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does; warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_public_name_every_pipeline_and_every_check(site):
    """Each name in an `__all__` is documented; the tables that the build makes, that of refusals too, are the code's; nothing is fetched."""
    missing = []
    for module, page in REFERENCE.items():
        text = (site / "reference" / page).read_text(encoding="utf-8")
        names = importlib.import_module(module).__all__
        missing += [f"{module}.{name}" for name in names if f'id="{module}.{name}"' not in text]
    for page, names in (("pipelines.html", pipelines.registered()), ("testing.html", [check.__name__ for check in all_checks()])):
        text = (site / page).read_text(encoding="utf-8")
        missing += [f"{page}: {name}" for name in names if f"<td><code>{name}</code></td>" not in text]
    text = (site / "distributed_layerwise.html").read_text(encoding="utf-8")
    missing += [refusal.request for refusal in REFUSALS if f"<td>{_as_html(refusal.request)}</td>" not in text]
    missing += [refusal.instead for refusal in REFUSALS if f"<td>{_as_html(refusal.instead)}</td>" not in text]
    assert not missing
    fetched = {tag for page in site.rglob("*.html") for tag in _FETCHED.findall(page.read_text(encoding="utf-8"))}
    fetched |= {tag for sheet in site.rglob("*.css") for tag in _FETCHED.findall(sheet.read_text(encoding="utf-8"))}
    assert not fetched
