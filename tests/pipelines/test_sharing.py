"""Three pipelines over the same modules: enabled, called, changed and disabled in any order, in either mode."""

import functools
import gc

import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from pipeline_runs import parts, run, same

import pipelines
from omni_offload.errors import OffloadStateError
from omni_offload.testing import sim

MODES = ("module", "layer")


class StopError(Exception):
    """Ends a call in its midst."""


def _case(name):
    return pipelines.registered()[name].load_cases()[0]


class Family:
    """Three pipelines over the same modules, and what may be put in the place of some of their components.

    Attributes:
        cases: What each is called with.
        pipes: The pipelines.
        others: Name of a component -> what may stand there; the first does at first, and is the same for all three.
    """

    def __init__(self, names, given, others):
        self.cases = [_case(name) for name in names]
        first = self.cases[0].make_pipeline()
        self.pipes = [first]
        for name, case in zip(names[1:], self.cases[1:], strict=True):
            own = {key: case.make_pipeline().components[key] for key in given.get(name, ())}
            self.pipes.append(pipelines.get(name).from_pipe(first, **own))
            self.pipes[-1].set_progress_bar_config(disable=True)
        self.others = {name: [self.pipes[0].components[name], *made] for name, made in others().items()}

    def put(self, pipe, versions):
        """Let one pipeline have these versions of its components."""
        for name, version in versions.items():
            setattr(pipe, name, self.others[name][version])


def _flux():
    def others():
        return {
            "vae": [_case("flux_img2img").make_pipeline().vae, None],
            "text_encoder": [_case("flux_kontext").make_pipeline().text_encoder],
            "scheduler": [FlowMatchEulerDiscreteScheduler(shift=3.0)],
            "image_encoder": [pipelines.registered()["wan_i2v"].load_cases()[0].make_pipeline().image_encoder],
        }

    return Family(("flux", "flux_img2img", "flux_kontext"), {}, others)


def _stable_diffusion():
    def others():
        checked = pipelines.registered()["stable_diffusion"].load_cases()[2].make_pipeline()
        return {
            "vae": [_case("stable_diffusion_img2img").make_pipeline().vae],
            "unet": [_case("stable_diffusion_img2img").make_pipeline().unet],
            "scheduler": [EulerDiscreteScheduler()],
            "safety_checker": [checked.safety_checker],
            "feature_extractor": [checked.feature_extractor],
        }

    names = ("stable_diffusion", "stable_diffusion_img2img", "stable_diffusion_controlnet")
    return Family(names, {"stable_diffusion_controlnet": ("controlnet",)}, others)


FAMILIES = {"flux": _flux, "stable_diffusion": _stable_diffusion}
TOGETHER = {"safety_checker": "feature_extractor"}
"""A component -> another without which it does not run."""


@functools.cache
def plain(name):
    """The same pipelines, which are never offloaded."""
    return FAMILIES[name]()


@functools.cache
def resident(name, index, versions):
    """What a call on one of the pipelines makes without offload, with some versions of its components."""
    family = plain(name)
    family.put(family.pipes[index], dict(versions))
    return run(family.cases[index], family.pipes[index])


class Sharing(RuleBasedStateMachine):
    """Everything that users do with pipelines over the same modules, in any order."""

    family_name = ""
    indices = st.integers(0, 2)

    @initialize(mode=st.sampled_from(MODES), keep=st.booleans())
    def make(self, mode, keep):
        gc.collect()
        self.before = sim.allocated(), sim.pinned_bytes()
        self.family = FAMILIES[self.family_name]()
        self.keys = {"config": mode, "keep_between_calls": keep}
        self.other_mode = MODES[mode == MODES[0]]
        self.versions = [dict.fromkeys(self.family.others, 0) for _ in range(3)]
        self.enabled = set()

    def expected(self, index):
        return resident(self.family_name, index, tuple(self.versions[index].items()))

    def may_run(self, index):
        """What is managed for another pipeline only is no business of one that is not enabled; without a VAE none runs."""
        return (index in self.enabled or not self.enabled) and plain(self.family_name).others["vae"][
            self.versions[index]["vae"]
        ] is not None

    @rule(index=indices)
    def enable(self, index):
        self.family.pipes[index].enable_omni_offload(device="sim", **self.keys)
        self.enabled.add(index)

    @precondition(lambda self: self.enabled)
    @rule(index=indices)
    def enable_otherwise(self, index):
        """Another treatment of what another pipeline shares is refused, and changes nothing."""
        with pytest.raises(OffloadStateError):
            self.family.pipes[index].enable_omni_offload(self.other_mode, device="sim")
        assert (self.family.pipes[index].offload_backend is not None) is (index in self.enabled)

    @rule(index=indices)
    def disable(self, index):
        self.family.pipes[index].disable_omni_offload()
        self.enabled.discard(index)

    @rule(index=indices)
    def call(self, index):
        if self.may_run(index):
            assert same(run(self.family.cases[index], self.family.pipes[index]), self.expected(index))

    @rule(index=indices, inner=indices)
    def call_within(self, index, inner):
        """Another pipeline, or the same, is called between two steps."""
        if not (self.may_run(index) and self.may_run(inner)) or "scheduler" not in self.others_apart(index, inner):
            return
        found = []

        def step(_pipe, number, _time, values):
            if number == 0:
                found.extend(run(self.family.cases[inner], self.family.pipes[inner]))
            return values

        outer = run(self.family.cases[index], self.family.pipes[index], callback_on_step_end=step)
        assert same(found, self.expected(inner))
        assert same(outer, self.expected(index))

    def others_apart(self, index, inner):
        """The components of which two pipelines have different ones: a scheduler counts the steps of one call at a time."""
        return {name for name, version in self.versions[index].items() if version != self.versions[inner][name]}

    @rule(index=indices)
    def fail(self, index):
        if not self.may_run(index):
            return

        def step(*_):
            raise StopError

        with pytest.raises(StopError):
            run(self.family.cases[index], self.family.pipes[index], callback_on_step_end=step)

    @rule(index=indices, data=st.data())
    def replace(self, index, data):
        """Also by None, and None by a component; two pipelines may have the same one then, or not."""
        name = data.draw(st.sampled_from(sorted(set(self.family.others) - set(TOGETHER.values()))), label="component")
        version = data.draw(st.integers(0, len(self.family.others[name]) - 1), label="version")
        for one in (name, *([TOGETHER[name]] if name in TOGETHER else [])):
            self.versions[index][one] = version
        self.family.put(self.family.pipes[index], self.versions[index])

    @invariant()
    def nothing_is_left(self):
        """But for the tables of a scheduler, which are where it was used last, and the time at which a call failed, a part of them."""
        assert sim.races() == []
        for pipe in self.family.pipes:
            if getattr(pipe, "_current_timestep", None) is not None:
                pipe._current_timestep = None
        for scheduler in self.family.others["scheduler"]:
            for name, value in vars(scheduler).items():
                if isinstance(value, torch.Tensor):
                    setattr(scheduler, name, value.cpu())
        if not self.keys["keep_between_calls"] or not self.enabled:
            if sim.allocated() != self.before[0]:
                gc.collect()  # what an error's traceback held
            assert sim.allocated() == self.before[0]
        if not self.enabled:
            assert sim.pinned_bytes() == self.before[1]

    def teardown(self):
        for pipe in self.family.pipes:
            pipe.disable_omni_offload()
        self.enabled.clear()
        self.nothing_is_left()
        for pipe, versions in zip(self.family.pipes, self.versions, strict=True):
            assert all(tensor.device.type == "cpu" for part in parts(pipe).values() for tensor in (*part.parameters(), *part.buffers()))
            self.family.put(pipe, versions)
        for index in range(3):
            self.call(index)


def check(name, *, examples, steps):
    machine = type("Machine", (Sharing,), {"family_name": name})
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_order(name, device):
    """Every call gives what it gives without offload, and leaves nothing; what conflicts is refused; no wait is missing."""
    check(name, examples=3, steps=10)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_orders(name, device):
    """The same, for long."""
    check(name, examples=100, steps=30)
