"""Offload beside FSDP2, tensor and context parallelism, on ranks that are processes."""

import pytest
from launch import by_torchrun


@pytest.mark.exhaustive
@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", [2, 4])
def test_beside_other_owners(tmp_path, size):
    """HSDP on a mesh of 2 x 2, and tensor and sequence parallelism with data parallelism of two: what is gathered is halved."""
    for rank in by_torchrun(tmp_path, size, "hsdp", "tp", "sp"):
        gathered = {"hsdp": 2, "tp": size // 2, "sp": 2}
        assert {name: rank[name]["ranks"] for name in gathered} == gathered
        for name, ranks in gathered.items():
            assert rank[name]["treated"]["transformer"] == "stream"
            assert (rank[name]["held"] > 0) is (ranks > 1)
