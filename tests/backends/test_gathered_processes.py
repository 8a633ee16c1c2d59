"""Real pipelines on ranks that are processes: outputs, bytes and weights, and what is left where a rank is killed."""

import pytest
from launch import by_torchrun, one_by_one


def check_killed(told, size):
    """Every rank that is left names what happened, well within the limit, frees the device and its hooks, and says what is lost."""
    for rank in told[: size - 1]:
        first, second, third = rank["killed"]["told"]
        assert first.startswith("OffloadStateError: the end of a call: a gather of weights failed"), first
        assert second.startswith("OffloadStateError: the offload of OmniFluxPipeline cannot be used: a gather of weights failed"), second
        assert "the blocks of transformer hold no weights any more: load these components again" in third
        assert rank["killed"]["seconds"] < 60
        device, pinned = rank["killed"]["left"]
        assert device <= 1024, device  # the scheduler's own
        assert pinned == 0
        assert rank["killed"]["hooks"] is False
    assert told[-1].keys().isdisjoint({"killed"})


@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks(tmp_path, size):
    """Flux with its encoders gathered, beside FSDP2 (four ranks: on a mesh of 2 x 2), and Wan 2.2 with two DiTs; a world that ends early."""
    for rank in by_torchrun(tmp_path, size, "flux_with_encoders", "wan", "hsdp", *(["world_destroyed"] if size == 2 else [])):
        assert rank["flux_with_encoders"]["gathered"] == ["text_encoder", "text_encoder_2", "transformer"]
        assert rank["wan"]["gathered"] == ["transformer", "transformer_2"]
        assert rank["hsdp"]["ranks"] == 2


@pytest.mark.timeout(700)
def test_a_rank_is_killed_in_a_call(tmp_path):
    """The other one says so, and gives up what it holds."""
    check_killed(one_by_one(tmp_path, 2, "killed"), 2)


@pytest.mark.exhaustive
@pytest.mark.timeout(1400)
@pytest.mark.parametrize("size", [2, 4])
def test_all_pipelines(tmp_path, size):
    """Flux, Wan 2.2 and Qwen-Image, with text encoders gathered and not, with compiled blocks, by rank order and by a mesh with tensor-parallel ranks."""
    scenarios = [f"{name}{encoders}" for name in ("flux", "wan", "qwen_image") for encoders in ("", "_with_encoders")]
    told = by_torchrun(tmp_path, size, *scenarios, "flux_compiled", *(["by_mesh"] if size == 4 else []))
    for rank in told:
        assert all(rank[name]["held"] <= 1.03 * rank[name]["whole"] / size for name in scenarios)


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
def test_one_of_four_ranks_is_killed(tmp_path):
    """The three others say so, and give up what they hold."""
    check_killed(one_by_one(tmp_path, 4, "killed"), 4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1400)
@pytest.mark.parametrize("where", ["claiming", "preparing", "hooking", "before_a_gather", "in_a_gather", "ending_a_call", "disabling"])
def test_a_rank_is_killed(tmp_path, where):
    """Wherever it is, the other rank raises within the limit, and leaves no hook, nothing pinned and nothing on the device."""
    name = f"killed_{where}"
    told = one_by_one(tmp_path, 2, name)[0][name]
    assert told["told"], told
    assert all(one.startswith("OffloadStateError: ") for one in told["told"]), told
    assert told["seconds"] < 60
    assert told["left"][0] <= 1024, told  # the scheduler's own
    assert told["left"][1] == 0
    assert told["hooks"] is False
    if where in {"claiming", "preparing", "hooking"}:
        assert "not all of the ranks 0, 1 came to" in told["told"][0]
    else:
        assert "the blocks of transformer hold no weights any more" in told["told"][-1]
