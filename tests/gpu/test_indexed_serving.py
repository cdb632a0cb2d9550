"""Indexed attention in the runner that serves: growth, copies, reloads, rows beside, and what each step covers.

The twin that offloads serves rows with rings; the other one is exact. Where the budget holds every token, nothing may
be missing; where some are estimated, each step covers its whole context.
"""

from typing import Any

import numpy as np
import pytest
import torch

from gpu.methods.device_side import LayerReads
from gpu.methods.indexed.device import Indexed
from gpu.methods.indexed.host_rows import read_rows
from gpu.methods.indexed.ring import EMPTY
from gpu.methods.indexed.upkeep import IN_PAGES
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import RingCopy, RingWrite, StepPlan
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.ring_twins import RingTwins, ring_parts
from tests.gpu.test_host_read_graphs import Recorded, fake_graphs
from tests.gpu.twin_runners import NUM_KV_HEADS, check_steps, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32, INDEXED_ERROR, INDEXED_LOGITS, KV_ROUNDED_AGAIN_LOGITS
from transfer.partial import Partial, merge
from transfer.reading import Reading

ALL = {"budget_share": 1.0, "budget_tokens": 1024, "min_context_tokens": 0}
FEW = {"budget_share": 0.05, "least_tokens": 16, "budget_tokens": 64, "min_context_tokens": 0}
PROMPT = document_prompt(300, 1)


class IndexedTwins(RingTwins):
    def __init__(self, settings: dict[str, Any], ringed: tuple[int, ...] = (0,), **more: Any) -> None:
        parts = ring_parts(host={"method": "indexed", **settings})
        super().__init__(parts, ringed, **{"reading": Reading.INDEXED, "check_coverage": True, **more})


@pytest.mark.parametrize("kept_tokens", [0, 96])
def test_a_budget_of_everything_gives_the_exact_profiles_logits_while_the_context_grows(kept_tokens: int) -> None:
    twins = IndexedTwins(ALL, kept_tokens=kept_tokens, offload_block_tokens=32)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 40)
    counts = counts_of(twins.side)
    assert counts.read_tokens == counts.offloaded_tokens > 0
    assert sum(counts.estimated_mass) == 0
    assert counts.fetched_rows < counts.read_tokens // 10, "rows stay in their slots"
    assert twins.side.upkeep.known[0].num_tokens == twins.sequences[0].released - 16 > 208 - kept_tokens, "it has grown"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_rings", [1, 2])
@pytest.mark.parametrize("where", [{}, {"resident": "indexed"}], ids=["host", "pages"])
def test_however_few_rings_there_are_the_logits_are_the_exact_profiles(
    where: dict[str, Any], num_rings: int, device: str
) -> None:
    """With one ring, every place of a step once had the address of the first one's number of tokens."""
    twins = IndexedTwins(ALL | where, offload_block_tokens=NEVER if where else 32, num_rings=num_rings, device=device)
    twins.prefill([PROMPT])
    if not where:
        twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 12)
    counts = counts_of(twins.side)
    assert counts.read_tokens == counts.offloaded_tokens > 0


def test_a_context_that_is_offloaded_while_it_runs_is_indexed_from_the_first_step() -> None:
    twins = IndexedTwins(ALL, offload_block_tokens=32)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 24)
    assert counts_of(twins.side).read_tokens > 0


def test_what_is_not_read_is_estimated_and_the_error_is_small() -> None:
    twins = IndexedTwins(FEW)
    twins.prefill_down(0, PROMPT)
    for _ in range(12):
        assert not twins.step([0]).failures
        assert HOP_LOGITS_FLOAT32 < furthest(twins, [0]) < INDEXED_LOGITS
    counts = counts_of(twins.side)
    assert 0 < counts.read_tokens < counts.offloaded_tokens // 5
    assert 0 < sum(counts.estimated_mass) < sum(counts.heads) * 1_000_000


def test_estimating_what_is_not_read_halves_a_layers_error_of_leaving_it_out() -> None:
    twins = IndexedTwins(FEW)
    twins.prefill_down(0, document_prompt(900, 1))
    side, read, errors = twins.side, twins.side.read, []

    def compare(reads: LayerReads, on_device: DevicePartials) -> None:
        read(reads, on_device)
        if reads.kept.get(side) is not None:
            errors.extend(errors_of(side, reads, on_device))

    side.read = compare  # type: ignore[method-assign]
    for _ in range(6):
        twins.step([0])
    estimated, dropped = torch.tensor(errors).mean(0).tolist()
    assert estimated < 0.6 * dropped
    assert estimated < INDEXED_ERROR


def errors_of(side: Indexed, reads: LayerReads, on_device: DevicePartials) -> list[tuple[float, float]]:
    """Return, for each head, how far its attention is from the exact one, relative: as it is, and with the chosen
    tokens alone.
    """
    layer, found = side._layers[side._places[reads.layer]], reads.fetched[-1]
    tokens = torch.arange(int(reads.rows.skips[1] - reads.rows.skips[0]))
    errors = []
    for head, query in enumerate(reads.query[0]):
        kv_head = head // (len(reads.query[0]) // NUM_KV_HEADS)
        keys, values = read_rows(layer, 0, kv_head, tokens, "bfloat16")
        ids = layer.ids[kv_head]
        sides = [
            softmax_of(query, keys, values),
            Partial(found.out[:1, head : head + 1], found.lse[:1, head : head + 1]),
            softmax_of(query, keys[ids[ids != EMPTY].long()], values[ids[ids != EMPTY].long()]),
        ]
        near = Partial(on_device.near.out[:1, head : head + 1], on_device.near.lse[:1, head : head + 1])
        exact, own, chosen = (merge(near, one).out for one in sides)
        errors.append(tuple(float((one - exact).norm() / exact.norm()) for one in (own, chosen)))
    return errors


def softmax_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Partial:
    logits = query @ keys.T * len(query) ** -0.5
    return Partial((logits.softmax(0) @ values)[None, None], logits.logsumexp(0)[None, None])


def test_the_cpu_is_asked_nothing_unless_some_row_that_reads_the_host_has_no_ring() -> None:
    twins = IndexedTwins(ALL)
    twins.prefill([PROMPT, document_prompt(280, 3)])
    reader = twins.offloading.decode_steps.host_reader
    assert reader is not None
    offloaded = len(twins.offloading.decode_steps.loop.offloaded_layers)
    for slots, requests in (([0], 0), ([1], offloaded), ([0, 1], offloaded)):
        steps, before = reader.times.steps, reader.times.requests
        assert not twins.step(slots).failures
        assert furthest(twins, slots) < HOP_LOGITS_FLOAT32
        assert reader.times.steps > steps
        assert reader.times.requests - before == requests, slots


def test_a_captured_step_of_rows_with_rings_is_replayed_without_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = IndexedTwins(ALL, check_coverage=False)
    twins.prefill([PROMPT, document_prompt(280, 3)])
    fake_graphs(monkeypatch)
    steps = twins.offloading.decode_steps
    with torch.inference_mode():
        steps.capture((2,), lambda fraction: None)
    assert {size for kind, size in steps._captured if kind.lends} == {1, 2}
    assert steps.host_reader is not None
    for slots, asks in (([0], False), ([0, 1], True), ([0], False)):
        Recorded.running, before = None, steps.host_reader.times.requests
        check_steps(twins, slots, 3)
        assert Recorded.running is not None
        assert (steps.host_reader.times.requests > before) == asks, slots


def test_methods_of_other_rows_leave_a_row_that_skips_host_memory_alone() -> None:
    twins = IndexedTwins(ALL, beside=ring_parts(reuse={"method": "mac", "min_context_tokens": 0}))
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 6)


def test_two_parts_of_a_step_do_not_meet() -> None:
    twins = IndexedTwins(ALL, ringed=(0, 1))
    twins.offloading.decode_steps.host_reader.halving.always = 2
    for slot, prompt in enumerate((PROMPT, document_prompt(280, 3))):
        twins.prefill_down(slot, prompt)
    check_steps(twins, [0, 1], 4)


def test_tokens_that_come_back_to_the_device_are_read_there() -> None:
    twins = IndexedTwins(ALL)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 2)
    sequence = twins.sequences[0]
    twins.restore(twins.fetch(sequence, 128))
    check_steps(twins, [0], 2)
    twins.evict(sequence, 208)
    check_steps(twins, [0], 2)


def test_a_ring_of_another_slot_begins_empty_and_a_copy_has_what_its_source_had_indexed() -> None:
    twins = IndexedTwins(ALL)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 3)
    known = twins.side.upkeep.known[0].num_tokens
    assert known > 0
    twins.assign(1, 1, RingCopy(0, 100, 303))
    assert twins.side.upkeep.known[1].num_tokens == (100 - 16) // 32 * 32
    index = twins.side.index
    for layer in twins.side.upkeep.layers:
        for kv_head in range(NUM_KV_HEADS):
            places = (NUM_KV_HEADS + kv_head, kv_head)
            copied, source = (layer.rows_of(layer.codes, place, 64) for place in places)
            assert torch.equal(copied, source)
    assert (index.ids[:, NUM_KV_HEADS : 2 * NUM_KV_HEADS] == EMPTY).all()
    twins.prefill_down(1, PROMPT)
    check_steps(twins, [0, 1], 3)
    twins.offloading.launch(StepPlan(released_slots=[0], closed_contexts=[100])).collect()
    twins.assign(2, 0)
    assert twins.side.upkeep.known[0].num_tokens == 0
    twins.prefill_down(2, document_prompt(280, 3))
    check_steps(twins, [1, 2], 3)


def test_a_ring_whose_sequence_has_another_context_reads_its_rows_anew_and_keeps_the_index() -> None:
    twins = IndexedTwins(ALL)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 2)
    known, fetched = twins.side.upkeep.known[0], counts_of(twins.side).fetched_rows
    known.context_id = 7
    codes = twins.side.index.codes.clone()
    check_steps(twins, [0], 1)
    assert twins.side.upkeep.known[0] is known
    assert known.context_id == twins.sequences[0].context_id
    assert torch.equal(codes, twins.side.index.codes)
    counts = counts_of(twins.side)
    assert counts.fetched_rows - fetched == NUM_KV_HEADS * 2 * known.num_tokens, "all of it, anew"


# --- contexts that are whole on the device ----------------------------------------------------------------------------

ON_CARD = {"resident": "indexed"}
NEVER = 100_000  # tokens of an offload block, so that nothing is offloaded


@pytest.mark.parametrize("kv", ["auto", "int8", pytest.param("fp8", marks=pytest.mark.long)])
def test_a_resident_context_read_by_an_index_with_a_budget_of_everything_is_exact_while_it_grows(kv: Any) -> None:
    twins = IndexedTwins(ALL | ON_CARD, offload_block_tokens=NEVER, kv=kv)
    twins.prefill([PROMPT])
    limit = KV_ROUNDED_AGAIN_LOGITS.get(kv, HOP_LOGITS_FLOAT32)  # a new row may be rounded otherwise
    known = twins.side.upkeep.known[0].num_tokens
    check_steps(twins, [0], 40, limit)
    counts = counts_of(twins.side)
    assert counts.read_tokens == counts.offloaded_tokens > 0
    assert counts.fetched_rows == sum(counts.estimated_mass) == 0
    assert known < twins.side.upkeep.known[0].num_tokens == (300 + 39 + 1 - 64 - 16) // 64 * 64


def test_of_a_resident_context_few_rows_are_read_and_the_others_are_estimated() -> None:
    twins = IndexedTwins(FEW | ON_CARD, offload_block_tokens=NEVER)
    twins.prefill([document_prompt(900, 1)])
    for _ in range(6):
        assert not twins.step([0]).failures
        assert HOP_LOGITS_FLOAT32 < furthest(twins, [0]) < INDEXED_LOGITS
    counts = counts_of(twins.side)
    assert 0 < counts.read_tokens < counts.offloaded_tokens // 10
    assert counts.fetched_rows == 0
    assert 0 < sum(counts.estimated_mass) < sum(counts.heads) * 1_000_000


def test_resident_rows_offloaded_rows_and_rows_without_a_ring_share_a_step() -> None:
    twins = IndexedTwins(ALL | ON_CARD, ringed=(0, 1), offload_block_tokens=NEVER)
    twins.prefill([PROMPT, document_prompt(280, 3), document_prompt(60, 2)])
    twins.prefill_down(1, document_prompt(280, 3))
    check_steps(twins, [0, 1, 2], 4)
    counts = counts_of(twins.side)
    assert 0 < counts.fetched_rows < counts.read_tokens
    check_steps(twins, [0, 2], 2)


def test_a_context_that_leaves_the_device_and_comes_back_keeps_its_index() -> None:
    twins = IndexedTwins(ALL | ON_CARD, kept_tokens=1024)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 2)
    sequence, known = twins.sequences[0], twins.side.upkeep.known[0]
    indexed = known.num_tokens
    assert indexed > 0
    twins.evict(sequence, 208)
    check_steps(twins, [0], 2)
    assert twins.side.upkeep.known[0] is known
    assert known.context_id == sequence.context_id
    assert counts_of(twins.side).fetched_rows > 0
    twins.restore(twins.fetch(sequence, 16))
    sequence.released = 0
    check_steps(twins, [0], 2)
    assert (known.context_id, known.num_tokens) == (IN_PAGES, indexed)
    twins.evict(sequence, 128)
    check_steps(twins, [0], 2)


def test_a_copied_ring_of_a_resident_context_is_read_in_the_copys_own_pages() -> None:
    twins = IndexedTwins(ALL | ON_CARD, offload_block_tokens=NEVER)
    twins.prefill([PROMPT, PROMPT])
    check_steps(twins, [0], 1)
    known = twins.side.upkeep.known
    twins.assign(1, 1, RingCopy(0, 100, 303))
    assert known[1].num_tokens == 64
    check_steps(twins, [0, 1], 3)
    assert known[1].num_tokens == 192
    twins.offloading.launch(StepPlan(released_slots=[1])).collect()
    twins.assign(2, 1)
    assert known[1].num_tokens == int(twins.side.upkeep.in_pages[1]) == 0


def test_a_captured_step_of_resident_rows_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = IndexedTwins(ALL | ON_CARD, check_coverage=False, offload_block_tokens=NEVER)
    twins.prefill([PROMPT, document_prompt(280, 3)])
    fake_graphs(monkeypatch)
    with torch.inference_mode():
        twins.offloading.decode_steps.capture((2,), lambda fraction: None)
    for slots in ([0], [0, 1], [0]):
        Recorded.running = None
        check_steps(twins, slots, 3)
        assert Recorded.running is not None
    assert counts_of(twins.side).read_tokens > 0


@pytest.mark.parametrize("is_first", [True, False])
def test_resident_rows_of_two_parts_are_exact_whichever_side_comes_first(is_first: bool) -> None:
    other = ring_parts(host={"method": "indexed", **ALL, **ON_CARD, "key_bits": 8})
    order = {"beside" if is_first else "before": other}
    twins = IndexedTwins(ALL | ON_CARD, offload_block_tokens=NEVER, **order)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 4)
    assert counts_of(twins.side).read_tokens > 0


def test_a_resident_row_beside_a_row_of_mac_is_exact() -> None:
    (mac,) = ring_parts(reuse={"method": "mac", "min_context_tokens": 0})
    for order in ((), (mac,)):
        twins = IndexedTwins(ALL | ON_CARD, before=order, beside=() if order else (mac,), offload_block_tokens=NEVER)
        twins.prefill([PROMPT, document_prompt(280, 3)])
        twins.offloading.launch(StepPlan(ring_writes=[RingWrite(1, mac.id, 1, Reading.WHOLE)])).collect()
        for _ in range(4):
            assert not twins.step([0, 1]).failures
            assert furthest(twins, [0]) < HOP_LOGITS_FLOAT32
        assert counts_of(twins.side).read_tokens > 0


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        pytest.param(ALL | ON_CARD, 0, id="all"),
        pytest.param(ALL | ON_CARD, 1, id="all, again"),
        pytest.param(FEW | ON_CARD, 0, id="few"),
        pytest.param(FEW | ON_CARD, 1, id="few, again", marks=pytest.mark.long),
        pytest.param(ALL, 0, id="all, full on the card"),
        pytest.param(ALL, 1, id="all, full on the card, again", marks=pytest.mark.long),
        pytest.param(FEW, 0, id="few, full on the card"),
        pytest.param(FEW, 1, id="few, full on the card, again", marks=pytest.mark.long),
    ],
)
def test_whatever_becomes_of_a_contexts_pages_every_step_covers_all_of_it(settings: dict[str, Any], seed: int) -> None:
    """Steps check their coverage, and with a budget of everything a lost or doubled token shows in the logits.

    With `resident: full`, a context that is whole on the device is read in full, and an evicted one by its index.
    """
    draw, is_all = np.random.default_rng(seed), settings["budget_share"] == 1.0
    limit = HOP_LOGITS_FLOAT32 if is_all else INDEXED_LOGITS
    twins = IndexedTwins(settings, ringed=(0,), kept_tokens=1024)
    twins.prefill([PROMPT, PROMPT])
    check_steps(twins, [0, 1], 1, limit)
    for _ in range(8):
        twins.change(int(draw.choice([0, 1])), draw, 300)
        check_steps(twins, [0, 1], int(draw.integers(1, 5)), limit)
    counts = counts_of(twins.side)
    assert counts.read_tokens > 0
    assert (counts.read_tokens == counts.offloaded_tokens) == is_all == (sum(counts.estimated_mass) == 0)
