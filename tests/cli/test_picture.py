"""Outputs become one PNG that can be looked at."""

import pytest
import torch

from omni_offload.cli.picture import tile
from omni_offload.cli.problems import InputError, one_line


def test_a_small_picture_is_enlarged_pixel_by_pixel():
    picture = torch.zeros(1, 1, 8, 8)
    picture[..., 0, 0] = 1
    made = tile([picture])
    assert made.shape == (256, 256, 3)
    assert made[:32, :32].eq(255).all()
    assert made.sum() == 32 * 32 * 3 * 255


def test_a_large_picture_keeps_its_size():
    assert tile([torch.rand(1, 3, 300, 400)]).shape == (300, 400, 3)


def test_videos_get_a_row_each():
    assert tile([torch.rand(2, 5, 3, 128, 128)]).shape == (2 * 128, 5 * 128, 3)


def test_values_beyond_the_range_are_cut():
    assert tile([torch.full((3, 256, 256), 7.0)]).eq(255).all()


@pytest.mark.parametrize("shape", [(4, 4), (1, 7, 8, 8), (0, 3, 8, 8), (1, 1, 1, 3, 8, 8)])
def test_what_is_no_picture_is_refused_by_its_shape(shape):
    with pytest.raises(InputError, match="no picture"):
        tile([torch.rand(*shape)])


def test_a_message_is_one_line():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line("x" * 5000)) < 1100
