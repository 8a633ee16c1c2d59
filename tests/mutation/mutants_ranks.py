"""Mutants of gathered blocks: the waits, what ranks agree on, and what is given back."""

from mutant import Mutant

__all__ = ["RANKS"]

_GATHERED = "tests/backends/test_gathered.py::"

RANKS = (
    Mutant(
        "gather-before-the-copy",
        "accelerator/streams.py",
        "        self.gather_stream.wait_event(self.record_copies())\n",
        "",
        "a rank's piece is gathered before it is in the slot",
        (f"{_GATHERED}test_call",),
    ),
    Mutant(
        "gathers-wait-for-later-copies",
        "accelerator/streams.py",
        "        with self.landing_stream:\n",
        "        with self.gather_stream:\n",
        "a block waits for the copies of blocks that are fetched behind it",
        ("tests/accelerator/test_accelerator.py::test_a_gather_has_landed_before_later_copies_have",),
    ),
    Mutant(
        "gathered-block-does-not-wait",
        "residency/sharded_block.py",
        "            self._await([slot.ready])\n",
        "",
        "a block runs on weights that are being gathered",
        (f"{_GATHERED}test_call",),
    ),
    Mutant(
        "use-of-a-gathered-block-not-noted",
        "residency/sharded_block.py",
        "                views[0].uses.update(self._uses())\n",
        "",
        "a piece is copied over weights that are read",
        (f"{_GATHERED}test_call",),
    ),
    Mutant(
        "copy-over-a-gather",
        "residency/sharded_block.py",
        "            slot.uses[self._accelerator.landing_stream.stream_id] = landed\n",
        "",
        "a slot whose block did not run is filled while it is gathered into",
        (f"{_GATHERED}test_call", f"{_GATHERED}test_any_order_that_is_the_same_everywhere"),
    ),
    Mutant(
        "failure-not-undone",
        "residency/sharded_block.py",
        "        if self._origin is not None:\n",
        "        if False:\n",
        "after a failed enable the blocks hold other memory, or none",
        (f"{_GATHERED}test_all_fail_together",),
    ),
    Mutant(
        "edits-of-parts-unseen",
        "residency/sharded_block.py",
        " and self._versions == self._count()):\n",
        "):\n",
        "an edit of a gathered block is lost without a word",
        (f"{_GATHERED}test_edits_are_refused",),
    ),
    Mutant(
        "writes-of-gathered-blocks-unseen",
        "residency/sharded_block.py",
        "written = not force and self._written(views[1])",
        "written = False",
        "what a block writes is lost without a word",
        (f"{_GATHERED}test_a_block_that_writes_its_weights_is_refused",),
    ),
    Mutant(
        "restored-memory-in-another-phase",
        "residency/shards.py",
        "flat[home.at : home.at + home.nbytes]",
        "flat[: home.nbytes]",
        "disable gives every weight the first one's bytes",
        (f"{_GATHERED}test_call",),
    ),
    Mutant(
        "values-not-compared",
        "residency/shards.py",
        ", values {sample}",
        "",
        "ranks with other weights gather a mixture",
        (f"{_GATHERED}test_all_fail_together",),
    ),
    Mutant(
        "end-of-a-call-not-compared",
        "backends/distributed_layerwise.py",
        '            wrong = gathering.compare("the end of a call", error)\n',
        "            pass\n",
        "a rank whose peer failed is not told why",
        (f"{_GATHERED}test_a_call_that_fails_on_one_rank",),
    ),
    Mutant(
        "parts-can-be-copied",
        "backends/guard.py",
        "            for method in _OF_MODULES:\n",
        "            for method in ():\n",
        "state_dict and deepcopy of a gathered component give empty tensors",
        (f"{_GATHERED}test_a_part_is_not_copied",),
    ),
    Mutant(
        "gathered-component-shared",
        "backends/owners.py",
        "    if not owner.residency.shareable:\n",
        "    if False:\n",
        "a second pipeline uses blocks of which this rank holds a part",
        (f"{_GATHERED}test_a_component_of_two_pipelines",),
    ),
)
