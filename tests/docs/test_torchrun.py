"""The program that the page of distributed layerwise offload shows is run by torchrun, on the simulated accelerator, with the digits pipeline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops

import pipelines
from pipelines.digits.cases import CHECKPOINT
from pipelines.digits.sizes import IMAGE_SIZE, MAX_SEQUENCE_LENGTH, STEPS

PAGE = Path(__file__).parents[2] / "docs" / "distributed_layerwise.md"
CALL = f'prompt="seven", height={IMAGE_SIZE}, width={IMAGE_SIZE}, num_inference_steps={STEPS}, max_sequence_length={MAX_SEQUENCE_LENGTH}, '

#: What differs here: the device, the model, and the size of its pictures.
HERE = {
    "dist.init_process_group()": 'dist.init_process_group("gloo")',
    'torch.device("cuda", dist.get_node_local_rank())': 'sim.install(races="raise")',
    '"path/to/model"': f"{str(CHECKPOINT)!r}, torch_dtype=torch.float32",
    'prompt="seven", ': CALL,
    "import pipelines\n": "import pipelines\nfrom omni_offload.testing import sim\n",
}


def program():
    """The program of the page, for this machine."""
    found = re.findall(r"```python\n(# not run: torchrun.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 1
    text = found[0]
    for there, here in HERE.items():
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    return text


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [2, 4])
def test_pictures_of_every_rank(tmp_path, size):
    """Each rank draws the picture that one process alone draws for its seed, pixel by pixel."""
    (tmp_path / "generate.py").write_text(program(), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "generate.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PAGE.parents[1])}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    pipe = pipelines.from_pretrained(str(CHECKPOINT), torch_dtype=torch.float32)
    arguments = {"height": IMAGE_SIZE, "width": IMAGE_SIZE, "num_inference_steps": STEPS, "max_sequence_length": MAX_SEQUENCE_LENGTH}
    pictures = []
    for rank in range(size):
        want = pipe(prompt="seven", generator=torch.Generator().manual_seed(rank), **arguments).images[0]
        made = Image.open(tmp_path / f"{rank}.png")
        assert ImageChops.difference(made, want).getbbox() is None, rank
        pictures.append(want.tobytes())
    assert len({*pictures}) == size
    assert {path.name for path in tmp_path.iterdir()} == {"generate.py", *(f"{rank}.png" for rank in range(size))}
