"""`omni-offload audit` lists what declarations miss: for people, for programs, and as an exit status."""

import importlib
import json
import sys

import pytest

MODULE = """
import torch
from omni_offload import OmniOffloadMixin
from omni_offload.testing import PipelineCase


class Plain:
    def __init__(self):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 4)

    def __call__(self, x):
        print("a word of the pipeline's own")
        return torch.nn.functional.linear(x, self.net.weight)


class Good(OmniOffloadMixin, Plain):
    _dit_modules = ["net"]

    def __call__(self, x):
        return self.net(x)


class Failing(Good):
    def __call__(self, x):
        raise RuntimeError("out of\\npaint")


def case(cls):
    return PipelineCase(name=cls.__name__.lower(), make_pipeline=cls, make_inputs=lambda _: {"x": torch.ones(2, 4)}, outputs=lambda y: [y])


GOOD, PLAIN, FAILING = case(Good), case(Plain), case(Failing)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that makes `MODULE:NAME` of the module above, which lies in the working folder."""
    (tmp_path / "audited_cases.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "audited_cases", raising=False)
    importlib.invalidate_caches()
    yield lambda name: f"audited_cases:{name}"
    sys.modules.pop("audited_cases", None)


def test_a_clean_pipeline(cli, mine):
    """It says so, and the status is 0."""
    status, out, _ = cli("audit", mine("GOOD"))
    assert status == 0
    assert out == "audit of 'good' (Good): clean\n"


def test_findings(cli, mine):
    """Each stands with where it is and what to add, the status is 1, and what the pipeline itself prints is no part of it."""
    status, out, err = cli("audit", mine("PLAIN"), mine("GOOD"))
    assert status == 1
    assert 'net: Linear, holds weights and stands in no list\n  add _encoder_modules = ["net"]\n' in out
    assert "net: net.weight was read while the component was not in use\n  by Plain.__call__ (audited_cases.py:14)\n" in out
    assert '  add with self.on_device("net"): around the use in Plain.__call__ (audited_cases.py:14)\n' in out
    assert out.endswith("audit of 'good' (Good): clean\n")
    assert "a word of the pipeline's own" in err


def test_json(cli, mine):
    """One object for all cases; nothing else is on standard output."""
    status, out, _ = cli("audit", mine("PLAIN"), mine("GOOD"), "--json")
    assert status == 1
    data = json.loads(out)
    assert data["clean"] is False
    assert [(case["case"], case["clean"], len(case["findings"])) for case in data["cases"]] == [("plain", False, 2), ("good", True, 0)]
    finding = data["cases"][0]["findings"][1]
    assert finding["tensors"] == ["net.weight"]
    assert finding["item"] == {"kind": "context", "path": "net", "method": "__call__"}


def test_no_bars(cli, tmp_path, monkeypatch):
    """A plain pipeline's own bars stay away, in its audits as in those of a scaffold."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain_cases.py").write_text(
        "import attrs, diffusers\n"
        "from pipelines.flux.cases import FLUX\n"
        "CASE = attrs.evolve(FLUX, make_pipeline=lambda: diffusers.FluxPipeline(**FLUX.make_pipeline().components))\n"
    )
    importlib.invalidate_caches()
    status, _, err = cli("audit", "plain_cases:CASE")
    assert (status, err) == (1, "")
    status, _, err = cli("scaffold", "diffusers:FluxPipeline", "--case", "plain_cases:CASE")
    assert (status, err) == (0, "")
    sys.modules.pop("plain_cases")


def test_a_registered_pipeline(cli):
    """All its cases are audited."""
    status, out, err = cli("audit", "stable_diffusion_controlnet")
    assert (status, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("audit of")] == [
        f"audit of '{name}' (OmniStableDiffusionControlNetPipeline): clean"
        for name in ("stable_diffusion_controlnet", "stable_diffusion_multi_controlnet")
    ]


def test_bad_input(refused, mine):
    """What names no case, and a call that fails by itself, are one line and status 2."""
    assert "nonsense" in refused("audit", "nonsense")
    assert "has no 'NOTHING'" in refused("audit", mine("NOTHING"))
    assert "Missing argument" in refused("audit")
    assert "failing: the call itself fails, without any offload: RuntimeError: out of paint" in refused("audit", mine("FAILING"))
