"""Every pipeline class of the installed diffusers is registered, or left out for one reason."""

import importlib
import warnings

import diffusers
import pytest
import torch

import pipelines
from pipelines.coverage import DEPRECATED, LEFT_OUT, NEVER_RUNS, NOT_YET, coverage


@pytest.fixture(scope="module")
def found():
    return coverage()


@pytest.fixture(scope="module")
def upstream():
    """All pipeline classes, found in another way."""
    waiting, known = [diffusers.DiffusionPipeline], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dir(diffusers):
            getattr(diffusers, name, None)  # is imported when it is asked for
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if getattr(diffusers, cls.__name__, None) is cls:
                known[cls.__name__] = cls
            waiting.append(cls)
    return known


def test_every_class_is_registered_or_has_a_reason(found, upstream):
    """None is missing, and none is both."""
    left_out = [name for names in found.left_out.values() for name in names]
    assert sorted([*found.registered, *left_out]) == sorted(upstream)
    assert found.total == len(upstream)


def test_registered_classes_are_those_of_the_catalog(found):
    """Every built-in pipeline stands for a class of diffusers, and counts."""
    assert {entry.upstream_name for entry in pipelines.registered().values()} == set(found.registered)


def test_reasons_hold(found, upstream):
    """What is said to be deprecated says so itself; a module with a reason is there, and nothing of it is registered."""
    for name in found.left_out[DEPRECATED]:
        cls = upstream[name]
        assert ".deprecated." in cls.__module__ or "DeprecatedPipelineMixin" in {base.__name__ for base in cls.__mro__}
    for module, reason in LEFT_OUT.items():
        importlib.import_module(module)
        inside = {name for name, cls in upstream.items() if f"{cls.__module__}.".startswith(f"{module}.")}
        assert inside
        assert inside <= set(found.left_out[reason])
    assert set(found.left_out) <= {DEPRECATED, NOT_YET, *LEFT_OUT.values()}


def test_what_is_said_never_to_run_does_not(found):
    """A call of it ends in upstream's error, with components of its family and all that its signature asks for."""
    parts = pipelines.registered()["easyanimate"].load_cases()[0].make_pipeline().components
    assert found.left_out[NEVER_RUNS] == ("EasyAnimateControlPipeline",)
    pipe = diffusers.EasyAnimateControlPipeline(**parts)
    with pytest.raises(TypeError, match=r"encode_prompt\(\) got an unexpected keyword argument 'text_encoder_index'"):
        pipe("a red cat", num_frames=5, height=32, width=32, control_video=torch.zeros(1, 3, 5, 32, 32), num_inference_steps=2)


def test_the_line(found):
    """It says how many of how many, of which diffusers, and how many are left out for each reason."""
    line = str(found)
    assert line.startswith(
        f"{len(found.registered)} of the {found.total} pipeline classes of diffusers {diffusers.__version__} are registered"
    )
    assert f"{len(found.left_out[DEPRECATED])} (deprecated upstream)" in line
