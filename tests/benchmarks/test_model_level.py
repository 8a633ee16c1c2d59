"""Model level beside diffusers' model offload and beside the best schedule, in virtual time."""

import attrs
import pytest
from model_level import SETTINGS, compare
from shapes import SHAPES, Shape

from omni_offload.testing import sim
from pipelines.flux.cases import FLUX

_SMOKE = Shape(
    name="tiny Flux",
    real_gb=SHAPES[0].real_gb,
    make_parts=lambda: {
        name: part for name, part in FLUX.make_pipeline().components.items() if name not in ("image_encoder", "feature_extractor")
    },
    upstream=SHAPES[0].upstream,
    omni=SHAPES[0].omni,
    arguments={"prompt": "a red cat", "height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 32},
)


@pytest.fixture(autouse=True)
def _settings():
    sim.install()
    before = attrs.asdict(sim.current_settings())
    yield
    sim.configure(**before)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # EulerDiscreteScheduler, with numpy 2
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_real_sizes(shape):
    """At most 0.5 of diffusers' weight bytes, 0.6 of its time and 1.02 of the best schedule's, under every budget."""
    found = compare(shape)
    assert found.total >= 200 << 20
    assert found.resident == pytest.approx(0.25 * found.total / (found.link_gbps * 1e9), rel=2e-3)
    assert not found.problems(), "\n".join(found.problems())


def test_smoke():
    """The comparison holds together on a pipeline of a megabyte or two, and two runs of it agree to the last digit."""
    found, again = compare(_SMOKE), compare(_SMOKE)
    assert found.theirs_moved == 2 * found.total
    assert found.theirs_equal
    assert found.theirs == again.theirs
    for row, other in zip(found.rows, again.rows, strict=True):
        assert row.equal
        assert row.weights_moved == found.total
        assert row.seconds == other.seconds
        assert row.seconds <= 0.6 * found.theirs
        assert row.seconds >= row.best * 0.999
    assert SETTINGS["races"] == "raise"
