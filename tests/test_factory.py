import logging
import types

import pytest
import torch

from omni_offload import (
    DistributedLayerwiseOffloadBackend,
    LayerwiseOffloadBackend,
    ModelLevelOffloadBackend,
    OffloadConfig,
    OffloadConfigError,
    OffloadStateError,
    OmniDiffusionConfig,
    get_offload_backend,
)

SELECTORS = {
    ModelLevelOffloadBackend: {"mode": "module"},
    LayerwiseOffloadBackend: {"mode": "layer"},
    DistributedLayerwiseOffloadBackend: {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "rank-local"}}},
}


@pytest.mark.parametrize("cls", SELECTORS)
def test_every_strategy_has_exactly_one_backend(device, cls):
    """A selector's mode decides the class; nothing is enabled."""
    od_config = OmniDiffusionConfig(diffusion_offload_config=SELECTORS[cls])
    for config in (od_config, OffloadConfig.from_od_config(od_config)):
        backend = get_offload_backend(config, device)
        assert type(backend) is cls
        assert (backend.device, backend.enabled) == (device, False)


def test_another_engines_config_works(device):
    """Any object with the attributes will do."""
    backend = get_offload_backend(types.SimpleNamespace(enable_cpu_offload=True, pin_cpu_memory=False), device)
    assert type(backend) is ModelLevelOffloadBackend
    assert backend.config.pin_cpu_memory is False


def test_overridden_requests_are_logged(device, caplog):
    """Of several legacy booleans the strongest wins, and the log names the others."""
    with caplog.at_level(logging.INFO):
        backend = get_offload_backend(OmniDiffusionConfig(enable_cpu_offload=True, enable_layerwise_offload=True), device)
    assert type(backend) is LayerwiseOffloadBackend
    assert "layerwise overrides the request for enable_cpu_offload" in caplog.text


def test_no_offload_is_no_backend(device):
    """A configuration that asks for nothing gives None."""
    assert get_offload_backend(OmniDiffusionConfig(), device) is None


def test_no_accelerator_is_no_backend(device, monkeypatch, caplog):
    """Where no accelerator supports offload the factory says why and gives None."""
    config = OmniDiffusionConfig(enable_cpu_offload=True)
    assert get_offload_backend(config, torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    assert get_offload_backend(config) is None
    assert "no offload: " in caplog.text


def test_an_index_that_does_not_exist_is_an_error(device):
    """A device beyond the last is refused."""
    with pytest.raises(OffloadStateError, match="sim:7"):
        get_offload_backend(OmniDiffusionConfig(enable_cpu_offload=True), torch.device("sim:7"))


def test_a_contradiction_is_an_error(device):
    """All problems of the configuration are named before anything is made."""
    with pytest.raises(OffloadConfigError, match="mode"):
        get_offload_backend(OmniDiffusionConfig(diffusion_offload_config={"components": []}), device)
