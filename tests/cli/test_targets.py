"""The type of a saved pipeline's weights is read off the headers of its files."""

import pytest
import torch
from safetensors.torch import save_file

from omni_offload.cli.targets import saved_dtype


def test_the_type_of_most_bytes(tmp_path):
    """In all files together; what a writer says beside the tensors is no tensor."""
    (tmp_path / "unet").mkdir()
    save_file({"few": torch.zeros(3, dtype=torch.float32)}, tmp_path / "few.safetensors", metadata={"dtype": "F16"})
    save_file({"most": torch.zeros(9, dtype=torch.bfloat16)}, tmp_path / "unet" / "most.safetensors")
    assert saved_dtype(tmp_path) is torch.bfloat16


def test_a_folder_without_weights(tmp_path):
    """It is loaded in torch's own type."""
    assert saved_dtype(tmp_path) is torch.float32


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b'\x07\x00\x00\x00\x00\x00\x00\x00{"a":1}',
        b'\x14\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32"}}',
        b'\x2d\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":["F32"],"data_offsets":[0,4]}}   ',
        b"\x01\x00\x00\x00\x00\x00\x00\x00\xff",
        b"version https://git-lfs.github.com/spec/v1",
    ],
    ids=["empty", "list", "number", "no place", "no type", "no text", "pointer"],
)
def test_another_file_under_that_name(tmp_path, content):
    """It is named, however large it says that its header is."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        saved_dtype(tmp_path)
