"""Acme's pipelines keep the contract, by both front ends of the kit; and the kit still sees what is wrong."""

import attrs
import pytest
import torch
from acme_diffusion.cases import DDPM, WAVES
from acme_diffusion.ddpm import OmniDDPMPipeline
from acme_diffusion.waves import WavesPipeline

import pipelines
from omni_offload.errors import ContractViolation, OffloadConfigError
from omni_offload.testing import Outcome, PipelineContractTests, all_checks, check_pipeline, parametrize_with_checks


@parametrize_with_checks([WAVES])
def test_waves(check):
    check()


class TestDDPM(PipelineContractTests):
    cases = [DDPM]


class ForgetsDecode(WavesPipeline):
    """The method that its call ends with is no declared entry point."""

    _offload_entry_points = {}


def _forgetful():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return ForgetsDecode()


def test_the_kit_sees_a_wrong_pipeline():
    case = attrs.evolve(WAVES, name="forgetful", make_pipeline=_forgetful)
    report = check_pipeline(case, checks=["check_entry_points", "check_numerics"])
    assert report.named(Outcome.FAILED) == ("check_numerics", "check_entry_points")
    with pytest.raises(ContractViolation, match="check_numerics"):
        report.raise_for_failures()


def test_reports_hold_every_check():
    report = check_pipeline(WAVES, checks=["check_numerics"], dtype=torch.bfloat16)
    assert report.named(Outcome.PASSED) == ("check_numerics",)
    assert [result.check for result in report.results] == [check.__name__ for check in all_checks()]
    assert report.case == "acme_waves[bfloat16]"


def test_expected_failures_are_strict():
    with pytest.raises(OffloadConfigError, match="check_nothing"):
        parametrize_with_checks([attrs.evolve(WAVES, expected_failures={"check_nothing": "a reason"})])


def test_the_pipelines_are_registered():
    assert pipelines.get("acme_waves") is WavesPipeline
    assert pipelines.get("acme_ddpm") is OmniDDPMPipeline
    assert pipelines.registered()["acme_waves"].load_cases() == (WAVES,)


def test_a_plain_pipeline_becomes_acmes():
    from diffusers import DDPMPipeline

    plain = DDPMPipeline(**DDPM.make_pipeline().components)
    made = pipelines.from_pipe(plain, pipeline_class=OmniDDPMPipeline)
    assert type(made) is OmniDDPMPipeline
    assert made.unet is plain.unet
