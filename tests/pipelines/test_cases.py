"""Every registered case runs on the CPU as it is, and gives the same every time."""

import inspect
import operator

import pytest
import torch

import pipelines

CASES = [case for entry in pipelines.registered().values() for case in entry.load_cases()]

#: Those of pipelines that take a prompt.
PROMPTED = [
    case
    for entry in pipelines.registered().values()
    if "prompt" in inspect.signature(entry.load().__call__).parameters
    for case in entry.load_cases()
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def test_runs_the_same_twice(case):
    """Two fresh pipelines with fresh inputs agree bit for bit; the outputs are finite and no plain colour."""
    first, second = (case.outputs(pipeline(**case.make_inputs(pipeline))) for pipeline in _pair(case))
    assert first
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()
        assert one.std() > min(0.01, 0.001 * one.abs().max())  # the sound of random weights is faint


def test_one_pipeline_runs_the_same_twice(case):
    """Inputs are fresh every time: a second call of one pipeline agrees with the first."""
    pipeline = case.make_pipeline()
    first, second = (case.outputs(pipeline(**case.make_inputs(pipeline))) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_pipelines_are_fresh(case):
    """Two pipelines of a case share no component and no weight."""
    first, second = _pair(case)
    mine, theirs = ({id(value): name for name, value in pipeline.components.items() if value is not None} for pipeline in (first, second))
    assert not mine.keys() & theirs.keys()
    one, other = (
        {p.data_ptr() for c in pipeline.components.values() if isinstance(c, torch.nn.Module) for p in c.parameters()}
        for pipeline in (first, second)
    )
    assert not one & other


def test_weights_are_drawn(case, monkeypatch):
    """No weight is left as memory happens to be: where fresh memory is filled, none is as it was filled."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        pipeline = case.make_pipeline()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    weights = {f"{name}.{path}": weight for name, module in modules.items() for path, weight in module.named_parameters()}
    assert [name for name, weight in weights.items() if weight.isnan().any()] == []


@pytest.mark.parametrize("case", PROMPTED, ids=lambda case: case.name)
def test_prompts_matter(case):
    """Another prompt gives another output: the encoders take part."""
    pipeline = case.make_pipeline()
    inputs = case.make_inputs(pipeline)
    other = "two blue dogs" if isinstance(inputs["prompt"], str) else inputs["prompt"][::-1]
    first = case.outputs(pipeline(**inputs))
    second = case.outputs(pipeline(**{**case.make_inputs(pipeline), "prompt": other}))
    assert not all(torch.equal(one, another) for one, another in zip(first, second, strict=True))


def test_progress_bars_are_off(case, capfd):
    """Making and running a case prints nothing."""
    pipeline = case.make_pipeline()
    pipeline(**case.make_inputs(pipeline))
    assert capfd.readouterr() == ("", "")


def test_declarations_name_components(case):
    """Every component with weights is declared, and every declared container of blocks, or single block, is there, or None: left out by configuration."""
    pipeline = case.make_pipeline()
    declared = {*pipeline._dit_modules, *pipeline._encoder_modules, *pipeline._vae_modules}
    weighty = {
        name
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module) and any(True for _ in component.parameters())
    }
    assert weighty <= declared <= set(pipeline.components)
    plan = pipeline._offload_plan
    for path, containers in {**plan.block_attrs, **plan.encoder_block_attrs}.items():
        if (component := getattr(pipeline, path)) is not None:
            found = [operator.attrgetter(container)(component) for container in containers]
            assert any(blocks is not None for blocks in found)
            for blocks in found:
                assert not isinstance(blocks, torch.nn.ModuleList) or len(blocks) > 1
                assert blocks is None or any(True for _ in blocks.parameters())


def _pair(case):
    return case.make_pipeline(), case.make_pipeline()
