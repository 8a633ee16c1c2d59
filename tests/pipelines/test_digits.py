"""The digits checkpoint draws what it is asked for, from the files of this package alone."""

import pytest
import torch

from pipelines.digits import cases, judge, sizes, train


@pytest.fixture(scope="module")
def pipeline():
    return cases.load()


def test_judge_knows_real_digits():
    """The judge is right on real digits that it has not seen."""
    images, labels = judge.handwritten_digits()
    held_out = slice(judge.TRAINING_DIGITS, None)
    right = judge.judge(images[held_out] / 2 + 0.5) == labels[held_out]
    assert len(right) == 297
    assert right.float().mean() > 0.97


def test_judge_takes_larger_images():
    """An image enlarged for viewing is judged like the original."""
    images, _ = judge.handwritten_digits()
    images = images[:20].repeat(1, 3, 1, 1) / 2 + 0.5
    larger = torch.nn.functional.interpolate(images, scale_factor=4, mode="nearest")
    assert torch.equal(judge.judge(larger), judge.judge(images))


def test_generated_digits_are_judged_right(pipeline):
    """At least 90 of 100 generated images show the digit that was asked for; six of ten for the worst digit."""
    prompts = tuple(word for word in sizes.WORDS for _ in range(10))
    result = pipeline(**cases.make_inputs(pipeline, prompts=prompts))
    (images,) = cases.DIGITS.outputs(result)
    right = judge.judge(images) == torch.arange(10).repeat_interleave(10)
    assert images.shape == (100, 3, sizes.IMAGE_SIZE, sizes.IMAGE_SIZE)
    assert right.sum() >= 90
    assert right.view(10, 10).sum(1).min() >= 6


def test_seeds_differ(pipeline):
    """Another seed draws other digits."""
    first, second = (pipeline(**cases.make_inputs(pipeline, seed=seed)).images for seed in (0, 1))
    assert not torch.equal(first, second)


def test_checkpoint_is_fp16_and_loads_in_fp32(pipeline):
    """The files hold fp16, the pipeline runs in fp32, and every weight lies on a 64-byte boundary, as results depend on it."""
    from safetensors import safe_open

    files = sorted(cases.CHECKPOINT.rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        with safe_open(file, "pt") as content:
            assert {content.get_tensor(name).dtype for name in content.keys()} == {torch.float16}  # noqa: SIM118
    for component in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer, pipeline.vae):
        assert {parameter.dtype for parameter in component.parameters()} == {torch.float32}
        assert all(parameter.data_ptr() % 64 == 0 for parameter in component.parameters())


def test_checkpoint_is_small():
    """The package stays small."""
    assert sum(file.stat().st_size for file in cases.CHECKPOINT.rglob("*")) < 2 << 20


def test_data_is_attributed():
    """The data set's licence asks for a name, a source and the changes."""
    text = (cases.CHECKPOINT.parent / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert all(part in text for part in ("Alpaydin", "10.24432/C50P49", "CC BY 4.0", "Changes"))


def test_training_is_deterministic():
    """The same steps give the same weights, and leave the global generator alone."""
    state = torch.get_rng_state()
    first, second = (train.train(vae_steps=2, dit_steps=4) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        one, other = (getattr(pipeline, name).state_dict() for pipeline in (first, second))
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert not getattr(first, name).training


def test_training_saves_what_loads(tmp_path, monkeypatch):
    """The script writes a folder in diffusers' format with weights in fp16."""
    from diffusers import FluxPipeline

    monkeypatch.setattr(train, "train", train.build)
    monkeypatch.setattr("sys.argv", ["train", str(tmp_path / "made")])
    threads = torch.get_num_threads()
    train.main()
    torch.set_num_threads(threads)
    loaded = FluxPipeline.from_pretrained(tmp_path / "made")
    assert set(loaded.components) == set(cases.load().components)
