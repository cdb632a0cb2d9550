"""MAC in the runner that serves: rings, seeds, skips of either kind, and rows of other profiles beside.

The twin that offloads serves rows with rings; the other one is exact, and its oracle where nothing matches.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu.methods.mac.device import Mac
from gpu.step import RingCopy, RingWrite, StepPlan
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt, layer_units
from tests.gpu.ring_twins import RingTwins, ring_parts
from tests.gpu.twin_runners import NUM_HEADS, NUM_LAYERS, Twins, check_steps, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32, MAC_QUERY_RTOL, MAC_SUMMARY_ATOL, MAC_SUMMARY_STORED_ATOL
from transfer.reading import Reading

SMALL = {
    "capacity": 32, "band": 16, "max_prefix_share": 1.0, "min_context_tokens": 0, "summaries": "float32",
    "stops_matching": False,
}  # fmt: skip
STRICT = SMALL | {"tau": 0.999, "layer_tau": {0: False}}  # the first layer's queries are those of equal tokens
LOOSE = SMALL | {"tau": 0.0}
PROMPT = document_prompt(300, 1)


class MacTwins(RingTwins):
    def __init__(self, settings: dict[str, Any], ringed: tuple[int, ...] = (0,), **more: Any) -> None:
        super().__init__(ring_parts(reuse={"method": "mac", **settings}), ringed, **more)

    @property
    def counts(self) -> SimpleNamespace:
        return counts_of(self.side)

    def entries(self, ring: int) -> dict[str, torch.Tensor]:
        store = self.side._store
        return {name: getattr(store, name)[:, ring].clone() for name in store.__slots__}


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_where_nothing_matches_the_logits_are_the_exact_profiles(is_offloaded: bool) -> None:
    twins = MacTwins(STRICT, check_coverage=True)
    twins.prefill([PROMPT if is_offloaded else document_prompt(70, 1)])
    check_steps(twins, [0], 20)
    assert bool(twins.sequences[0].run_end) == is_offloaded
    assert sum(twins.counts.tries) == 20 * NUM_HEADS * (NUM_LAYERS - 1)
    assert sum(twins.counts.hits) == 0


@pytest.mark.parametrize(("kept_tokens", "reading"), [(0, Reading.WHOLE), (96, Reading.SAMPLE)])
def test_hits_and_misses_cover_every_cell_once_wherever_it_lies(reading: Reading, kept_tokens: int) -> None:
    """Coverage is checked in each layer of each step; heads that hit ask the host for nothing."""
    twins = MacTwins(LOOSE, reading=reading, check_coverage=True, kept_tokens=kept_tokens, offload_block_tokens=32)
    twins.prefill([PROMPT])
    for _ in range(40):
        assert not twins.step([0]).failures
    counts = twins.counts
    assert all(0 < hits <= tries for hits, tries in zip(counts.hits, counts.tries, strict=True))
    assert sum(counts.hits) < sum(counts.tries) or sum(counts.ages) > sum(counts.gaps)
    assert twins.sequences[0].run_end > 224, "more than with the prompt"


def test_hits_are_near_what_exact_attention_gives_and_not_equal_to_it() -> None:
    twins = MacTwins(SMALL | {"tau": 0.6})
    twins.prefill([PROMPT])
    far = []
    for _ in range(30):
        twins.step([0])
        far.append(furthest(twins, [0]))
    assert sum(twins.counts.hits) > 0
    assert max(far) > HOP_LOGITS_FLOAT32


def test_heads_that_are_refused_read_everything_and_are_counted() -> None:
    """Where no share is small enough every near match is refused, and what is left is exact attention."""
    twins = MacTwins(LOOSE | {"max_prefix_share": 1e-6}, check_coverage=True)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 12)
    counts = twins.counts
    assert sum(counts.hits) == 0
    assert 0 < sum(counts.refused) <= sum(counts.tries)


def test_a_step_in_which_no_row_holds_a_ring_goes_without_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = MacTwins(LOOSE, ringed=(0,))
    twins.prefill([PROMPT, PROMPT])
    seen: list[int] = []
    monkeypatch.setattr(Mac, "before", lambda self, reads: seen.append(reads.layer))
    check_steps(twins, [1], 2)
    assert seen == []


# --- rings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_what_decode_leaves_in_a_ring_is_what_a_prompt_of_the_same_tokens_leaves(is_offloaded: bool) -> None:
    """Queries, summaries, refusals and what is said of them: also where the skipped range is the host's, over a full
    ring.
    """
    prompt = PROMPT if is_offloaded else document_prompt(90, 1)
    settings = STRICT | {"max_prefix_share": 0.5}
    twins = MacTwins(settings, window_tokens=64)
    twins.prefill([prompt])
    tokens = list(prompt)
    for _ in range(40):
        tokens.append(int(twins.exact._last_tokens[0]))
        check_steps(twins, [0], 1)
    decoded = twins.entries(0)
    fresh = MacTwins(settings)
    fresh.prefill([np.array(tokens, np.int32)])
    seeded = fresh.entries(0)
    assert decoded["norms"].isfinite().all()
    assert 0 < (decoded["norms"] < 0).float().mean() < 1
    check_entries(decoded, seeded, MAC_SUMMARY_STORED_ATOL if is_offloaded else MAC_SUMMARY_ATOL)
    assert torch.equal(decoded["origins"], seeded["origins"])
    assert bool(twins.sequences[0].run_end) == is_offloaded


def test_seeds_are_those_of_the_last_positions_wherever_units_end() -> None:
    stores = []
    for chunk in (300, 37):
        twins = MacTwins(STRICT | {"seed_tokens": 20})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tests.gpu.twin_runners.layer_units", lambda job, _, layers, c=chunk: layer_units(job, c, layers)
            )
            twins.prefill([PROMPT])
        stores.append(twins.entries(0))
        seeded = stores[-1]["norms"].isfinite()[0, 0]
        cells = stores[-1]["origins"][0, 0][seeded]
        assert sorted(cells.tolist()) == list(range(len(PROMPT) - 20, len(PROMPT)))
        assert torch.equal(cells % 32, seeded.nonzero()[:, 0].to(cells.dtype))
    check_entries(stores[0], stores[1], MAC_SUMMARY_ATOL)
    with pytest.raises(AssertionError):  # power: a band that is one shorter
        check_entries(stores[0], other_band(STRICT | {"seed_tokens": 20, "band": 15}), MAC_SUMMARY_ATOL)


def check_entries(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float) -> None:
    for name, near in (("queries", MAC_QUERY_RTOL), ("norms", MAC_QUERY_RTOL), ("outs", atol), ("lses", atol)):
        torch.testing.assert_close(got[name].float(), wanted[name].float(), rtol=near, atol=near)


def other_band(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    twins = MacTwins(settings)
    twins.prefill([PROMPT])
    return twins.entries(0)


def test_a_ring_that_comes_to_another_slot_is_empty() -> None:
    twins = MacTwins(LOOSE)
    twins.prefill([PROMPT])
    twins.step([0])
    assert twins.side.has_ring(0)
    twins.offloading.launch(StepPlan(released_slots=[0], closed_contexts=[100])).collect()
    assert not twins.side.has_ring(0)
    assert twins.side.ring_of_slot.tolist() == [-1] * 6
    twins.assign(4, 0)
    assert twins.side._store.norms[:, 0].isinf().all()
    assert twins.side.ring_of_slot.tolist() == [-1, -1, -1, -1, 0, -1]


def test_a_fork_begins_with_what_is_before_its_own_tokens() -> None:
    twins = MacTwins(STRICT)
    twins.prefill([PROMPT])
    seeded = twins.entries(0)
    check_steps(twins, [0], 5)
    begin, end = len(PROMPT) - 7, len(PROMPT) + 5
    twins.assign(1, 1, RingCopy(0, begin, end))
    copied = twins.entries(1)
    kept = [cell % 32 for cell in range(end - 32, begin)]
    assert copied["norms"].isfinite()[0, 0].nonzero()[:, 0].tolist() == sorted(kept)
    for name in seeded:
        assert torch.equal(copied[name][:, :, kept], seeded[name][:, :, kept]), name


def test_layers_that_are_off_keep_no_ring_and_read_everything() -> None:
    twins = MacTwins(LOOSE | {"layer_tau": {0: False, 2: "off"}}, check_coverage=True)
    twins.prefill([PROMPT])
    for _ in range(10):
        twins.step([0])
    assert [bool(tries) for tries in twins.counts.tries] == [False, True, False, True]
    assert twins.counts.matching == [0, 1, 0, 1]
    assert len(twins.side._store.norms) == 2


def test_two_settings_have_rings_of_their_own_and_share_steps() -> None:
    (part,), (other,) = (ring_parts(reuse={"method": "mac", **settings}) for settings in (LOOSE, STRICT))
    twins = Twins(more_parts=[part, other], check_coverage=True)
    for slot, own in ((0, part), (1, other)):
        twins.offloading.launch(StepPlan(ring_writes=[RingWrite(slot, own.id, 0, Reading.NONE)])).collect()
    twins.prefill([PROMPT, document_prompt(290, 5), document_prompt(280, 6)])
    for _ in range(8):
        assert not twins.step([0, 1, 2]).failures
        assert furthest(twins, [1, 2]) < HOP_LOGITS_FLOAT32
    counts = twins.offloading.method_counts()
    assert sum(counts[part.id]["reuse_hits"]) > 0
    assert sum(counts[other.id]["reuse_tries"]) == 8 * NUM_HEADS * (NUM_LAYERS - 1)
