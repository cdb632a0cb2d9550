"""Prediction in the runner that serves: blocks that are fetched, dropped or left to the host, and rows beside.

The twin that offloads serves rows with rings; the other one is exact. Where every block is fetched, or the host reads
what is not, nothing may be missing; where some are dropped, the rest is what a softmax without them gives.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.memory.host_demand import HostDemand
from gpu.methods.kept import Kept
from gpu.methods.predicted.block_choice import pack_bits
from gpu.methods.predicted.device import Predicted
from gpu.methods.predicted.fetching import fetch_blocks
from gpu.methods.predicted.held_blocks import EMPTY
from gpu.methods.predicted.noting import note_step
from gpu.methods.predicted.turns import NEVER
from gpu.methods.registry import list_methods
from gpu.step import RingCopy, RingWrite, StepPlan
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.ring_twins import RingTwins, ring_parts
from tests.gpu.twin_runners import NUM_KV_HEADS, Twins, check_steps, furthest
from tests.reference_tier import stored_rows
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.copies import Event
from transfer.host_config import HostConfig
from transfer.places import COLUMNS, KEY_SCALE, VALUE_ROW_BYTES
from transfer.reading import Reading

WEIGHTS = Path(__file__).parents[2] / "deploy" / "predictors" / "reference.safetensors"
WIDE = {"weights": str(WEIGHTS), "budget_tokens": 512, "min_context_tokens": 0, "local_tokens": 32, "history": 8}
NARROW = WIDE | {"budget_tokens": 64, "look_stride_blocks": 4}
PROMPT = document_prompt(300, 1)
PAGE = BLOCK = 16


class PredictedTwins(RingTwins):
    def __init__(self, settings: dict[str, Any], method: str = "predicted", ringed: tuple[int, ...] = (0,),
                 **more: Any) -> None:  # fmt: skip
        parts = ring_parts(host={"method": method, **settings})
        super().__init__(parts, ringed, reading=list_methods()[method].reading, **more)

    def ids(self, ring: int) -> torch.Tensor:
        """`[layers, kv_heads, slots]`."""
        return self.side.blocks.ids[:, ring * NUM_KV_HEADS : (ring + 1) * NUM_KV_HEADS]

    def check_slots(self, slot: int) -> None:
        """What stands in a slot is the block that it names, no block stands twice, and bits say which they are."""
        sequence, side = self.sequences[slot], self.side
        ring = side.held[slot]
        for place in range(len(self.tier.shape.layers)):
            stored = stored_rows(self.tier, sequence.context_id, place, sequence.run_end - PAGE)
            for kv_head in range(NUM_KV_HEADS):
                at, store = ring * NUM_KV_HEADS + kv_head, side.blocks.layer(place)
                ids, slots = store.ids[at], store.ids.shape[1]
                there = ids[ids != EMPTY]
                assert len(there.unique()) == len(there)
                assert torch.equal(store.bits[at].cpu(), pack_bits(there.cpu(), store.bits.shape[1]))
                for number in (ids != EMPTY).nonzero().flatten().tolist():
                    tokens = slice(BLOCK * int(ids[number]), BLOCK * (int(ids[number]) + 1))
                    for rows, wanted in zip((store.keys, store.values), stored, strict=True):
                        got = rows[at * slots + number, 0].cpu().double()
                        torch.testing.assert_close(
                            got, wanted[kv_head, tokens].float().to(rows.dtype).double(), rtol=0, atol=0
                        )


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept_tokens", [0, 96])
def test_where_every_block_is_fetched_the_logits_are_the_exact_profiles(kept_tokens: int) -> None:
    """From the first step on, over offload blocks that are offloaded meanwhile: each is fetched before the step that
    releases it.
    """
    twins = PredictedTwins(WIDE, check_coverage=True, kept_tokens=kept_tokens, offload_block_tokens=32)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 40)
    counts = counts_of(twins.side)
    assert counts.hole_tokens == counts.read_tokens > 0
    assert counts.dropped_tokens == 0
    assert counts.fetched_blocks == NUM_KV_HEADS * 2 * (twins.sequences[0].released - PAGE) // BLOCK
    twins.check_slots(0)


@pytest.mark.parametrize("every", [1, 3])
def test_a_layers_blocks_change_in_its_turns_alone(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = PredictedTwins(NARROW | {"predict_every": every})
    twins.prefill_down(0, PROMPT)
    twins.step([0])  # its blocks were chosen before it
    side, noise = twins.side, torch.Generator().manual_seed(5)
    monkeypatch.setattr(side, "_score", lambda layer, _: torch.rand(layer.scores.shape, generator=noise))
    monkeypatch.setattr(side, "_choose_now", lambda behind: pytest.fail("nothing is offloaded meanwhile"))
    changed = []
    for _ in range(2 * every):
        before, cell = twins.ids(0).clone(), twins.sequences[0].num_tokens
        twins.step([0])
        now = [bool((old != new).any()) for old, new in zip(before, twins.ids(0), strict=True)]
        assert now == [(cell + place) % every == 0 for place in range(len(now))]
        changed += now
    assert sum(changed) == 2 * len(before)
    twins.check_slots(0)


def test_a_context_that_is_offloaded_while_it_runs_has_its_blocks_from_the_first_step() -> None:
    twins = PredictedTwins(WIDE, check_coverage=True, offload_block_tokens=32)
    twins.prefill([PROMPT])
    check_steps(twins, [0], 40)
    assert counts_of(twins.side).dropped_tokens == 0


def test_what_is_not_fetched_is_dropped_and_counted() -> None:
    twins = PredictedTwins(NARROW, check_coverage=True)
    twins.prefill_down(0, PROMPT)
    for _ in range(12):
        assert not twins.step([0]).failures
        assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32
        twins.check_slots(0)
    counts = counts_of(twins.side)
    assert counts.read_tokens == 12 * 2 * NUM_KV_HEADS * 64
    assert counts.dropped_tokens == counts.hole_tokens - counts.read_tokens > 0
    assert counts.looked_blocks > 0


def test_what_is_not_fetched_is_left_to_the_host_where_it_samples() -> None:
    """The tier of this test reads all that it covers, so a block that is read twice or by nobody shows."""
    twins = PredictedTwins(NARROW, "predicted+sampled", check_coverage=True)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 40)
    counts = counts_of(twins.side)
    assert counts.read_tokens < counts.hole_tokens
    assert counts.dropped_tokens == 0
    twins.check_slots(0)


def leave_some_late(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Of calls that may: as if the step had been over when their layer's blocks were to be fetched."""
    draw = np.random.default_rng(11)

    def fetch(*given: Any) -> None:
        *others, late = given
        if late is not None:
            assert int(late.open_parts) == 1, "the step is computed now"
            if draw.random() < share:
                late = replace(late, open_parts=torch.zeros_like(late.open_parts))
        fetch_blocks(*others, late)

    monkeypatch.setattr("gpu.methods.predicted.device.fetch_blocks", fetch)


def wish_for_others(twins: PredictedTwins) -> None:
    """Other blocks at every step, whatever is predicted."""
    twins.side._score = lambda layer, choice: torch.rand(layer.scores.shape)


def test_late_blocks_are_left_to_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; a block that came after all, or stands in a slot that it does not fill, shows as well."""
    leave_some_late(monkeypatch, 0.5)
    twins = PredictedTwins(NARROW | {"late": "sample"}, "predicted+sampled", check_coverage=True)
    twins.prefill_down(0, PROMPT)
    wish_for_others(twins)
    for _ in range(30):
        check_steps(twins, [0], 1)
        twins.check_slots(0)
    counts = counts_of(twins.side)
    assert counts.late_blocks > 0
    assert 0 < counts.read_tokens < counts.hole_tokens
    assert counts.dropped_tokens == 0
    assert int(twins.side._open_parts) == 0
    reads = counts.read_tokens
    monkeypatch.undo()
    twins.step([0])
    twins.step([0])
    assert counts_of(twins.side).late_blocks == counts.late_blocks, "nothing is late where steps are in order"
    slots, layers = NARROW["budget_tokens"], len(twins.tier.shape.layers)
    assert reads < 30 * slots * NUM_KV_HEADS * layers, "some slots stood empty"


def test_late_blocks_are_waited_for_where_nobody_asks_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_some_late(monkeypatch, 1.0)
    twins = PredictedTwins(NARROW, "predicted+sampled", check_coverage=True)
    twins.prefill_down(0, PROMPT)
    wish_for_others(twins)
    check_steps(twins, [0], 6)
    assert counts_of(twins.side).late_blocks == 0


def test_a_step_that_failed_leaves_none_open() -> None:
    twins = PredictedTwins(NARROW | {"late": "sample"}, "predicted+sampled")
    twins.prefill_down(0, PROMPT)
    twins.side._open_parts.fill_(3)
    twins.step([0])
    assert int(twins.side._open_parts) == 0


def test_a_step_of_two_parts_ends_once_and_late_is_what_is_not_begun_behind_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the first part's end waited, all of its blocks would be there, and the second part's last layer behind it."""
    twins = PredictedTwins(NARROW | {"late": "sample"}, "predicted+sampled", ringed=(0, 1))
    twins.offloading.decode_steps.host_reader.halving.always = 2
    for slot, prompt in enumerate((PROMPT, document_prompt(280, 3))):
        twins.prefill_down(slot, prompt)
    join, ends = Predicted._join, []

    def note(side: Predicted) -> None:
        if side._used:
            ends.append((int(side._open_parts), len(side._used)))
        join(side)

    monkeypatch.setattr(Predicted, "_join", note)
    check_steps(twins, [0, 1], 2)
    num_layers = len(twins.tier.shape.layers)
    assert ends == [(0, 2 * 2 * num_layers)] * 2, "a query and an lse of each part and layer, in each step"


def test_rows_are_lent_until_a_step_that_failed_has_fetched_what_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = PredictedTwins(NARROW)
    twins.prefill_down(0, PROMPT)
    twins.step([0])
    side, steps, events = twins.side, twins.offloading.decode_steps, list[str]()
    choose, join, point = side._choose, Predicted._join, steps._point

    def choose_once(*given: Any) -> None:
        if "chosen" in events:
            raise RuntimeError("out of memory")
        events.append("chosen")
        choose(*given)

    def end() -> Event:
        events.append("ended")
        return point()

    def note(one: Predicted) -> None:
        events.extend(["waited"] if one._used else [])
        join(one)

    monkeypatch.setattr(side, "_choose", choose_once)
    monkeypatch.setattr(Predicted, "_join", note)
    monkeypatch.setattr(steps, "_point", end)
    with pytest.raises(RuntimeError, match="out of memory"):
        twins.offloading.launch(twins.plan([0], []))
    assert events == ["chosen", "waited", "ended"]
    assert (side._num_open, int(side._open_parts), side._used) == (0, 0, [])


def test_only_the_difference_crosses_the_link() -> None:
    twins = PredictedTwins(NARROW | {"look_stride_blocks": 0})
    twins.prefill_down(0, PROMPT)
    fetched, before, kept = 0, torch.full_like(twins.ids(0), EMPTY), 0
    for _ in range(10):
        twins.step([0])
        now = twins.ids(0).clone()
        is_known = (now[..., None] == before[..., None, :]).any(-1) & (now != EMPTY)
        assert bool((now == before)[is_known].all()), "a block that stays keeps its slot"
        fetched, before, kept = fetched + int((~is_known).sum()), now, kept + int(is_known.sum())
    counts = counts_of(twins.side)
    assert fetched <= counts.fetched_blocks <= fetched + before.numel()  # the first choice was made before the step
    assert kept > fetched
    assert counts.looked_blocks == 0


# --- steps that attend to everything ----------------------------------------------------------------------------------


def test_where_every_step_calibrates_the_logits_are_the_exact_profiles() -> None:
    """With room for a few blocks only, the host reads all the others; nothing is dropped, and all of it is noted."""
    twins = PredictedTwins(NARROW | {"calibrate_every": 1}, check_coverage=True)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 12)
    counts = counts_of(twins.side)
    assert counts.hole_tokens > counts.read_tokens > 0
    assert counts.dropped_tokens == 0


def test_one_step_of_so_many_calibrates() -> None:
    twins = PredictedTwins(NARROW | {"calibrate_every": 3, "look_stride_blocks": 0}, check_coverage=True)
    twins.prefill_down(0, PROMPT)
    dropped, looked, full = 0, 0, []
    for _ in range(7):
        cell = twins.sequences[0].num_tokens
        assert not twins.step([0]).failures
        counts = counts_of(twins.side)
        full.append(counts.looked_blocks > looked)
        assert full[-1] == (cell % 3 == 0), "the keys of all blocks are looked at"
        assert full[-1] == (counts.dropped_tokens == dropped), "and nothing is dropped"
        dropped, looked = counts.dropped_tokens, counts.looked_blocks
    assert full.count(True) >= 2


def test_what_a_sample_says_of_the_rest_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that calibrates has the host read all the rest, and then its mass counts, or a sample, and then not."""
    noted = {}
    for method in ("predicted", "predicted+sampled"):
        for every in (0, 1):
            twins, lses = PredictedTwins(NARROW | {"calibrate_every": every}, method), []
            twins.prefill_down(0, PROMPT)

            def note(history: torch.Tensor, maxima: torch.Tensor, near_lse: torch.Tensor, *more: Any,
                     lses: list[torch.Tensor] = lses) -> torch.Tensor:  # fmt: skip
                lses.append(near_lse.clone())
                return note_step(history, maxima, near_lse, *more)

            monkeypatch.setattr("gpu.methods.predicted.device.note_step", note)
            twins.step([0])
            noted[method, every] = lses[0]
    assert torch.equal(noted["predicted+sampled", 1], noted["predicted+sampled", 0])
    assert bool((noted["predicted", 1] > noted["predicted", 0]).all())


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WIDE, NARROW | {"calibrate_every": 1}])
def test_what_decode_leaves_in_a_history_is_what_a_prompt_of_the_same_tokens_leaves(settings: dict[str, Any]) -> None:
    """Where all of a context is read, wherever it lies; a code of eight an octave may round the other way."""
    twins = PredictedTwins(settings)
    twins.prefill_down(0, PROMPT)
    tokens = list(PROMPT)
    for _ in range(12):
        tokens.append(int(twins.exact._last_tokens[0]))
        check_steps(twins, [0], 1)
    fresh = PredictedTwins(settings)
    fresh.prefill([np.array(tokens, np.int32)])
    got, wanted = (one.side.blocks.history[:, :NUM_KV_HEADS].int() for one in (twins, fresh))
    used = [cell % twins.side.settings.num_rows for cell in range(len(tokens) - 8, len(tokens))]
    apart = (got - wanted)[:, :, used].abs()
    assert int(wanted[:, :, used].max()) > 200
    assert int((wanted[:, :, used] > 0).sum()) == 2 * NUM_KV_HEADS * 8 * (len(tokens) // BLOCK)
    assert float((apart <= 1).float().mean()) > 0.999


def test_a_history_is_of_what_was_read_exactly_whatever_the_host_says_of_the_rest() -> None:
    """The rule without which a sample's mass is biased: the host's answers are made a thousand times as heavy."""
    histories = []
    for weight in (0.0, 7.0):
        twins = PredictedTwins(NARROW, "predicted+sampled")
        twins.prefill_down(0, PROMPT)
        answer = type(twins.offloading.decode_steps.host_reader.exchanges[0]).answer

        def heavier(self, num_rows, answer=answer, weight=weight):
            partial = answer(self, num_rows)
            partial.lse.add_(weight)
            return partial

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpu.exchange.device_slots.SlotExchange.answer", heavier)
            twins.step([0])
        histories.append(twins.side.blocks.history[0, :NUM_KV_HEADS].clone())
        assert not torch.equal(*twins.logits(0)) or weight == 0
    assert torch.equal(*histories), "of the first layer, whose queries are the same"


def test_a_ring_that_comes_to_another_slot_is_empty_and_a_fork_has_its_front() -> None:
    twins = PredictedTwins(WIDE)
    twins.prefill_down(0, PROMPT)
    check_steps(twins, [0], 3)
    rows = twins.side.blocks.history[:, :NUM_KV_HEADS].clone()
    twins.assign(1, 1, RingCopy(0, len(PROMPT) - 2, len(PROMPT) + 3))
    copied = twins.side.blocks.history[:, NUM_KV_HEADS : 2 * NUM_KV_HEADS]
    num_rows = twins.side.settings.num_rows
    kept = {cell % num_rows for cell in range(len(PROMPT) + 3 - num_rows, len(PROMPT) - 2)}
    for row in range(num_rows):
        wanted = rows[:, :, row] if row in kept else torch.zeros_like(rows[:, :, row])
        assert torch.equal(copied[:, :, row], wanted)
    assert (twins.ids(1) == EMPTY).all()
    twins.offloading.launch(StepPlan(released_slots=[0], closed_contexts=[100])).collect()
    assert not twins.side.has_ring(0)
    twins.assign(4, 0)
    assert (twins.ids(0) == EMPTY).all()
    assert not twins.side.blocks.history[:, :NUM_KV_HEADS].any()
    assert twins.side.ring_of_slot.tolist() == [-1, 1, -1, -1, 0, -1]


def test_what_is_lent_ends_with_its_step() -> None:
    twins = PredictedTwins(NARROW)
    twins.prefill_down(0, PROMPT)
    for number in range(1, 4):
        twins.step([0])
        assert len(twins.tier.loans) == number
        assert all(loan.ended is not None for loan in twins.tier.loans)


def test_addresses_that_no_load_takes_are_refused() -> None:
    side = PredictedTwins(NARROW).side
    table = np.zeros((len(side._layers), COLUMNS, 1), np.int64)
    table[:, KEY_SCALE] = 4
    side._place(0, table.copy())
    table[-1, VALUE_ROW_BYTES] = 24
    with pytest.raises(AssertionError, match="addresses that 16 does not divide"):
        side._place(0, table)


class _MeanwhileMode(TorchDispatchMode):
    """Has something happen behind the `nth` operation, as another stream of the device would."""

    def __init__(self, nth: int, happens: Callable[[], object]) -> None:
        super().__init__()
        self.left, self.happens = nth, happens

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0:
            self.happens()
        return result


def test_asks_have_the_words_of_exclusion_that_are_planned_where_a_method_needs_them() -> None:
    for twins, excludes in ((PredictedTwins(NARROW), True), (Twins(), False)):
        runner = twins.offloading
        slots = [exchange.slot for exchange in runner.decode_steps.host_reader.exchanges]
        words = sum(0 if slot.excluded is None else slot.excluded.nbytes for slot in slots)
        shape = replace(runner.architecture, max_context_tokens=runner.limits.max_context_tokens)
        kept = Kept(PAGE, PAGE, (0,))
        with_words, without = (
            HostDemand(
                shape, HostConfig(), kept, PAGE, dtype_bytes=4, max_running=runner.limits.max_running, excludes=one
            )
            for one in (excludes, False)
        )
        assert words == with_words.exchange_bytes - without.exchange_bytes
        assert (words > 0) == excludes


def test_a_ring_that_is_assigned_while_others_choose_is_known_as_new() -> None:
    """In the other lane: whenever it comes between a choice's operations, scores of the last holder are not kept."""
    side = PredictedTwins(NARROW, ringed=(0, 1)).side
    cells, limits = torch.tensor([90, -1, -1]), torch.tensor([3, 0, 0])
    left = nth = 0
    while left <= 0:
        nth += 1
        side.turns.last_cells[:2] = torch.tensor([89, 41])
        with _MeanwhileMode(nth, lambda: side.turns.last_cells[1].fill_(NEVER)) as mode:
            side.turns.choices(cells, limits)
        left = mode.left
        if left <= 0:
            assert side.turns.last_cells[:2].tolist() == [90, NEVER], f"behind operation {nth}"
    assert nth > 10


@pytest.mark.parametrize("every", [1, 4, 16])
def test_scores_are_kept_where_they_see_what_they_saw_at_the_turn_before(every: int) -> None:
    """A block's score sees two blocks on either side, of those that its head has. Three rings: one goes on, one leaves
    out steps of the batch, and one is assigned anew, asks nothing for a step, and steps again from where it was. Each
    turn of a layer has scores of its own, and what is chosen before a step leaves none to be kept.
    """
    side = PredictedTwins(NARROW | {"predict_every": every, "history": 20}, ringed=(0, 1, 2)).side
    steps = {0: list(range(40, 200)), 1: [cell for cell in range(70, 150) for _ in range(2)], 2: []}
    steps[2] = [*range(60, 90), *range(91, 120), 119, *range(300, 390)]
    begins: dict[int, tuple[int, int]] = {}  # by ring: of the cells that followed one another, and the last of them
    last: dict[tuple[int, int], tuple[int, int]] = {}  # by ring and turn
    num_kept = num_grown = 0
    for number in range(160):
        cells = [own[number] if number < len(own) else -1 for own in steps.values()]
        cells[1] = cells[1] if number % 2 else -1  # in every other step
        if number == 70:
            side.assign(RingWrite(2, "", 2, Reading.BLOCKS, None))
            begins.pop(2, None)
        if number == 140:
            side._choose = lambda *_: None  # its blocks lie nowhere
            side._choose_now({0: (cells[0] - 1, 99)})
            begins[0] = cells[0], cells[0] - 1
        choices = side.turns.choices(torch.tensor(cells), torch.full((3,), 99))
        assert len(choices) == every
        for ring, cell in enumerate(cells):
            place = ring * NUM_KV_HEADS
            assert sum(bool(choice.is_in[place]) for choice in choices) == (cell >= 0), "each is once some layer's turn"
            if cell < 0:
                assert all(int(choice.widths[place]) == -1 for choice in choices)
                continue
            begin, before = begins.get(ring, (cell, NEVER))
            begins[ring] = (begin if before == cell - 1 else cell), cell
            for turn, choice in enumerate(choices):
                if not choice.is_in[place]:
                    assert int(choice.widths[place]) == -1
                    continue
                width, got = int(choice.widths[place]), int(choice.stale[place])
                at_turn, old = last.get((ring, turn), (NEVER, 0))
                goes_on = at_turn == cell - every and begins[ring][0] <= at_turn
                stale = [at for at in range(width) if not goes_on or min(at + 3, old) != min(at + 3, width)]
                assert min(got, width) == min([*stale, width]), f"ring {ring}, cell {cell}"
                num_kept += got > 0
                num_grown += goes_on and old != width and got > 0
                last[ring, turn] = cell, width
    assert num_kept > 250 - 10 * every
    assert num_grown >= (10 if every == 1 else 1)
