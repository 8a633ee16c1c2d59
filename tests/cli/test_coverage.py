"""`omni-offload pipelines --coverage` says what of the installed diffusers is registered."""

import pipelines


def test_the_line_and_the_reasons(cli):
    """The first line counts; each of the others has a reason and the classes that it holds for."""
    status, out, err = cli("pipelines", "--coverage")
    assert (status, err) == (0, "")
    line, *reasons = out.splitlines()
    registered = {entry.upstream_name for entry in pipelines.registered().values()}
    assert line.startswith(f"{len(registered)} of the ")
    assert all(reason.partition(": ")[2] for reason in reasons)
    assert any(reason.startswith("deprecated upstream: ") for reason in reasons)


def test_as_json(run_json):
    """The same as one object: all classes add up."""
    found = run_json("pipelines", "--coverage")
    assert found["total"] == len(found["registered"]) + sum(map(len, found["left_out"].values()))
    assert "FluxPipeline" in found["registered"]
