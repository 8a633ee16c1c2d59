"""Every registered case called otherwise: in tiles, in slices, in a batch, twice a prompt, with a callback, and with one that raises."""

import contextlib
import functools
import gc
import itertools
import warnings

import attrs
import pytest
import torch
from pipeline_runs import parts, same
from variations import TILED, VARIATIONS, Call, StopError, shrink_tiles, why_not

from omni_offload.errors import OffloadConfigError
from omni_offload.testing import sim
from tests.contract.contract_cases import CASES, rotation

MODES = ("module", "layer")

TOGETHER = {"per_prompt": ("per_prompt",), "tiles of a batch": ("tiling", "slicing", "batch", "callback"), "failure": ("failure",)}
"""What the fast suite does in one call each; the exhaustive one does everything by itself."""

REFUSED = {
    ("allegro", "batch"): "must be greater or equal to the number of dimensions",
    ("animatediff_controlnet", "batch"): "must match the size of tensor b",
    ("animatediff_controlnet", "slicing"): "must match the size of tensor b",
    ("animatediff_v2v_controlnet", "batch"): "You have passed 2 text prompts",
    ("animatediff_v2v_controlnet", "slicing"): "You have passed 2 text prompts",
    ("chrono_edit", "per_prompt"): "Sizes of tensors must match",
    ("cosmos2_5_predict", "batch"): "batch_size must be 1 for video input",
    ("cosmos2_5_predict", "slicing"): "batch_size must be 1 for video input",
    ("easyanimate", "slicing"): "must match",
    ("easyanimate_inpaint", "slicing"): "must match",
    ("hunyuan_skyreels_i2v", "per_prompt"): "Sizes of tensors must match",
    ("hunyuan_video_15", "batch"): "doesn't match the broadcast shape",
    ("hunyuan_video_15", "per_prompt"): "is invalid for input of size",
    ("hunyuan_video_15_i2v", "batch"): "doesn't match the broadcast shape",
    ("hunyuan_video_15_i2v", "per_prompt"): "doesn't match the broadcast shape",
    ("hunyuan_video_framepack", "per_prompt"): "Sizes of tensors must match",
    ("hunyuan_video_i2v", "per_prompt"): "Sizes of tensors must match",
    ("kandinsky5_i2i", "per_prompt"): "Sizes of tensors must match",
    ("ltx", "per_prompt"): "must match the size of tensor b",
    ("ltx", "slicing"): "must match the size of tensor b",
    ("ltx_condition", "batch"): "Sizes of tensors must match",
    ("ltx_condition", "per_prompt"): "Sizes of tensors must match",
    ("ltx_condition", "slicing"): "Sizes of tensors must match",
    ("ltx_long", "batch"): "has batch size 2, but `prompt`",
    ("ltx_long", "slicing"): "has batch size 2, but `prompt`",
    ("lucy_edit", "per_prompt"): "does not match expected shape",
    ("prx", "batch"): "must match the size of tensor b",
    ("prx", "per_prompt"): "must match the size of tensor b",
    ("prx", "slicing"): "must match the size of tensor b",
    ("prx_pixel", "batch"): "must match the size of tensor b",
    ("prx_pixel", "per_prompt"): "must match the size of tensor b",
    ("qwen_image_edit_plus", "batch"): "currently only supports batch_size=1",
    ("qwen_image_edit_plus", "slicing"): "currently only supports batch_size=1",
    ("sana_i2v", "per_prompt"): "must match the size of tensor b",
    ("skyreels_v2_forcing", "batch"): "must match the size of tensor b",
    ("skyreels_v2_forcing", "per_prompt"): "must match the size of tensor b",
    ("skyreels_v2_forcing", "slicing"): "must match the size of tensor b",
    ("skyreels_v2_i2v", "per_prompt"): "Sizes of tensors must match",
    ("stable_cascade_decoder", "batch"): "cannot reshape tensor of 0 elements",
    ("stable_cascade_decoder", "per_prompt"): "must match the size of tensor b",
    ("stable_cascade_decoder", "slicing"): "cannot reshape tensor of 0 elements",
    ("video_to_video_sd", "batch"): "must match the size of tensor b",
    ("video_to_video_sd", "slicing"): "must match the size of tensor b",
    ("wan_2_1_i2v", "per_prompt"): "Sizes of tensors must match",
    ("wan_vace", "batch"): "Passing a list of prompts is not yet supported",
    ("wan_vace", "per_prompt"): "Generating multiple videos per prompt is not yet supported",
    ("wan_vace", "slicing"): "Passing a list of prompts is not yet supported",
}
"""What upstream's own call cannot do, without any offload, each with a part of its error: a line here for a new case that cannot."""

ROUNDS = 3
"""How many runs take every case once."""

TURN = CASES[int(rotation(), 16) % ROUNDS :: ROUNDS]


@attrs.frozen
class Outcome:
    """What a call gave.

    Attributes:
        outputs: Its tensors, on the host; None where it failed.
        error: What it raised.
        steps: The steps at whose end its callback was called.
        left: Bytes that all calls on its pipeline have left on the device so far, such as a scheduler's time steps.
    """

    outputs: list | None
    error: Exception | None
    steps: list
    left: int


class WatchedVae:
    """What a VAE of the resident pipeline did: the shapes of what it decoded last, whether in tiles, and how many samples at once."""

    def __init__(self, vae):
        self.latent = self.sample = None
        self.tiled = self.samples = 0
        vae.decode = functools.partial(self._decode, vae.decode)
        for name in TILED:
            if hasattr(vae, name):
                setattr(vae, name, functools.partial(self._in_tiles, getattr(vae, name)))
        if isinstance(getattr(vae, "decoder", None), torch.nn.Module):
            vae.decoder.register_forward_pre_hook(self._count)

    def _decode(self, decode, latent, *args, **kwargs):
        made = decode(latent, *args, **kwargs)
        self.latent, self.sample = latent.shape, made[0].shape
        return made

    def _in_tiles(self, method, *args, **kwargs):
        self.tiled += 1
        return method(*args, **kwargs)

    def _count(self, _decoder, args):
        self.samples = max(self.samples, len(args[0]) if args else 0)

    def forget(self):
        self.tiled = self.samples = 0


class Varied:
    """A case's pipeline, and a resident one that says what each variation is to give; made once for all of the case's variations."""

    def __init__(self, case, device):
        self.case = case
        self.device = device
        self.pipeline = case.make_pipeline()
        self.resident = case.make_pipeline().to(device)
        self.vaes = {
            path: WatchedVae(part) for path in self.resident._vae_modules if hasattr(part := getattr(self.resident, path), "decode")
        }
        self._along = False
        self._wanted = {}
        self._left = {id(self.pipeline): 0, id(self.resident): 0}

    @property
    def left(self):
        """Bytes that resident calls leave."""
        return max((outcome.left for outcome in self._wanted.values()), default=0)

    def call(self, pipeline):
        return Call(pipeline, dict(self.case.make_inputs(pipeline)), along=self._along)

    def wanted(self, changes):
        """What the resident pipeline makes of some changes; a batch has a picture for all, or, where that is refused, one for each."""
        if "tiling" in changes and all(vae.latent is None for vae in self.vaes.values()):
            self.run(self.resident, ())  # to know the sizes
        if changes not in self._wanted:
            for vae in self.vaes.values():
                vae.forget()
            found = self.run(self.resident, changes)
            if found.error is not None and not self._along and {"batch", "slicing"} & set(changes):
                self._along = True
                again = self.run(self.resident, changes)
                found, self._along = (again, True) if again.error is None else (found, False)
            self._wanted[changes] = found
            if found.error is None:
                self._require_change(changes)
        return self._wanted[changes]

    def run(self, pipeline, changes):
        call, before = self.call(pipeline), sim.allocated()
        with self._vaes_as_they_were(pipeline):
            for change in changes:
                VARIATIONS[change](call)
            if "tiling" in changes:
                for path, watched in self.vaes.items():
                    if watched.latent is not None:
                        shrink_tiles(getattr(pipeline, path), watched.latent, watched.sample)
            outputs, error = self._called(call)
        if sim.allocated() != before:
            gc.collect()  # what a traceback held
        self._left[id(pipeline)] += sim.allocated() - before
        return Outcome(outputs, error, call.steps, self._left[id(pipeline)])

    def _called(self, call):
        try:
            with torch.no_grad():
                return [tensor.cpu() for tensor in self.case.outputs(call.pipeline(**call.inputs))], None
        except Exception as error:  # what upstream cannot do is as good an outcome
            return None, error.with_traceback(None)

    @contextlib.contextmanager
    def _vaes_as_they_were(self, pipeline):
        vaes = [getattr(pipeline, path) for path in self.vaes]
        before = [(vae, name, getattr(vae, name)) for vae in vaes for name in ("use_tiling", "use_slicing") if hasattr(vae, name)]
        yield
        for vae, name, value in before:
            setattr(vae, name, value)

    def _require_change(self, changes):
        """Require that the resident pipeline did what a variation says."""
        decoding = {path: vae for path, vae in self.vaes.items() if vae.latent is not None}
        for path, vae in decoding.items():
            module = getattr(self.resident, path)
            assert "tiling" not in changes or not any(hasattr(module, name) for name in TILED) or vae.tiled
            assert "slicing" not in changes or not hasattr(module, "use_slicing") or vae.samples <= 1

    def check(self, mode, changes, note):
        """Require of some changes of a call what the resident pipeline gives, and that no more is left on the device than by that.

        Args:
            mode: The mode in which the pipeline is enabled.
            changes: Their names; those that do not apply, or are refused among others, are left out.
            note: Takes for each change `ran`, or why it did not.
        """
        missing = {change: why_not(change, self.call(self.pipeline)) for change in changes}
        refusals = {change: REFUSED.get((self.case.name, change)) for change in changes}
        for change in changes:
            if missing[change] is not None:
                note(f"do not apply: {missing[change]}")
            else:
                note("ran" if refusals[change] is None else "are refused by upstream, which has no outputs to compare")
        changes = tuple(one for one in changes if missing[one] is None and (len(changes) == 1 or refusals[one] is None))
        if not changes:
            return
        wanted, found = self.wanted(changes), self.run(self.pipeline, changes)
        if (refusal := refusals[changes[0]]) is not None:
            assert refusal in str(wanted.error)
            assert refusal in str(found.error)
        elif "failure" in changes:
            assert isinstance(wanted.error, StopError)
            assert isinstance(found.error, StopError)
        else:
            assert wanted.error is None, wanted.error
            assert found.error is None, found.error
            assert same(found.outputs, wanted.outputs)
            assert bool(found.steps) is ("callback" in changes)
        assert found.steps == wanted.steps
        assert found.left <= self.left
        assert [row.name for row in self.pipeline.offload_report.components if row.resident_bytes and row.name not in self.staying] == []
        assert sim.races() == [], mode

    @property
    def staying(self):
        return self.pipeline._resident_modules

    def check_all(self, variations, note):
        """Check variations in both modes."""
        for mode in MODES:
            problem = self._enable(mode)
            if problem is not None:
                for _change in itertools.chain(*variations.values()):
                    note(f"do not apply: nothing streams in mode {mode}")
                continue
            for name, changes in variations.items():
                try:
                    self.check(mode, changes, note)
                except BaseException as error:
                    error.add_note(f"{self.case.name}, mode {mode}, {name}")
                    raise
            self.pipeline.disable_omni_offload()
            assert all(t.device.type == "cpu" for part in parts(self.pipeline).values() for t in (*part.parameters(), *part.buffers()))

    def _enable(self, mode):
        """Enable the pipeline; say why not where nothing of it streams."""
        problem = None
        try:
            self.pipeline.enable_omni_offload(mode, device=self.device)
        except OffloadConfigError as error:
            problem = str(error)
        assert problem is None or (mode == "layer" and "there is nothing to stream" in problem)
        return problem


@pytest.fixture
def vary(device, record_property):
    """Return a function that checks variations of a case; how many ran, and why others did not, stands at the end of pytest's output."""

    def vary(case, variations):
        gc.collect()
        varied = Varied(case, device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You have passed 2 text prompts", FutureWarning)
            varied.check_all(variations, lambda outcome: record_property("variation", outcome))

    return vary


@pytest.mark.rotating
@pytest.mark.parametrize("case", TURN, ids=lambda case: case.name)
def test_some_variations(case, vary, record_property):
    """Called otherwise a pipeline gives bit for bit what it gives resident, without races, and leaves nothing on the device.

    Each run takes a third of the cases.
    """
    record_property("rotation", f"OMNI_CONTRACT_ROTATION={rotation()} takes {', '.join(case.name for case in TURN)}")
    vary(case, TOGETHER)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_variation(case, vary):
    """The same, of every case, one change at a time."""
    vary(case, {name: (name,) for name in VARIATIONS})


def test_who_is_refused():
    """What upstream cannot do is said of cases that there are, and of variations."""
    names = {case.name for case in CASES}
    assert all(name in names and change in VARIATIONS for name, change in REFUSED)
