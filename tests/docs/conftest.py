"""What the pages' snippets find: an empty folder with two saved models, and the simulated accelerator."""

import gc

import pytest

from omni_offload.testing import sim


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a folder with tiny models, under the paths that the pages name."""
    from pipelines.flux.cases import FLUX
    from pipelines.stable_diffusion.cases import TEXT_TO_IMAGE
    from pipelines.tiny.components import autoencoder_kl
    from pipelines.tiny.seeding import seeded

    folder = tmp_path_factory.mktemp("models")
    pipe = FLUX.make_pipeline()
    with seeded(0):  # five levels, so that a picture of real size has few latents
        pipe.register_modules(vae=autoencoder_kl(widths=(8, 8, 8, 8, 8), shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False))
    pipe.save_pretrained(folder / "path" / "to" / "flux")
    TEXT_TO_IMAGE.make_pipeline().save_pretrained(folder / "path" / "to" / "model")
    return folder


@pytest.fixture
def workplace(device, models, tmp_path, monkeypatch):
    """Be in an empty folder, from which the models can be reached, on a fresh device; nothing may be left on that, and no race."""
    (tmp_path / "path").symlink_to(models / "path")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    gc.collect()
    before = sim.allocated(device), sim.pinned_bytes()
    yield tmp_path
    gc.collect()
    assert [str(race) for race in sim.races()] == []
    assert (sim.allocated(device), sim.pinned_bytes()) == before, "a snippet leaves weights on the device, or pinned"
