"""Kernels that keep predicted blocks, against numpy from their definitions: which are read, noted, kept and fetched."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.attention.step_rows import StepRows
from gpu.methods.predicted.block_choice import choose_blocks, choose_blocks_reference, pack_bits
from gpu.methods.predicted.fetching import BLOCKS_AT_ONCE, CHUNK, PROGRAMS, Lateness, fetch_blocks, look_at_blocks
from gpu.methods.predicted.held_blocks import Blocks
from gpu.methods.predicted.listing import FETCHED, LATE, LOOKED, NUM_COUNTS, READ, SKIP, list_blocks
from gpu.methods.predicted.noting import Fetched, HistoryRows, note_step
from gpu.methods.predicted.settings import PredictedSettings
from gpu.methods.predicted.turns import Turns, find_rings
from gpu.step import HostRead
from tests.gpu.kernel_oracles import DEVICES
from tests.tolerances import HISTORY_CODE
from transfer import places

KV_HEADS, GROUP, DIM = 2, 3, 96
SLOTS, WORDS, BLOCKS = 6, 2, 40  # the slots are no power of two
RINGS = 3


def numbers(device: str) -> torch.Tensor:
    return torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)


def bits_of(ids: np.ndarray) -> np.ndarray:
    flags = np.zeros((len(ids), WORDS * 32), np.uint64)
    for place, own in enumerate(ids):
        flags[place, own[own >= 0]] = 1
    words = (flags.reshape(len(ids), WORDS, 32) << np.arange(32, dtype=np.uint64)).sum(-1)
    return words.astype(np.uint32).view(np.int32).reshape(len(ids), WORDS)


def draw_ids(draw: np.random.Generator, highest: int) -> np.ndarray:
    """int32 `[places, slots]`, each block once, some slots empty."""
    ids = np.stack([draw.permutation(highest)[:SLOTS] for _ in range(RINGS * KV_HEADS)]).astype(np.int32)
    ids[draw.random(ids.shape) < 0.25] = -1
    return ids


def code(attended: float) -> int:
    return 0 if attended <= 0 else int(min(max(round(255 + 8 * math.log2(attended)), 0), 255))


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_listed_is_what_stands_in_a_slot_and_lies_in_the_rows_skipped_range(device: str) -> None:
    draw = np.random.default_rng(1)
    ids, rings = draw_ids(draw, BLOCKS), [2, -1, 0]
    skips = np.array([[16, 0, 32], [16 + 16 * 25, 0, 32], [16 + 16 * 25, 0, 32]], np.int32)
    counts = numbers(device)
    listed = list_blocks(
        torch.tensor(ids, device=device), torch.tensor(bits_of(ids), device=device),
        torch.tensor(rings, dtype=torch.int32, device=device), torch.tensor(skips, device=device), KV_HEADS, counts,
    )  # fmt: skip
    read = 0
    for row, ring in enumerate(rings):
        for kv_head in range(KV_HEADS):
            item, place = row * KV_HEADS + kv_head, ring * KV_HEADS + kv_head
            limit = (skips[1, row] - skips[0, row]) // 16
            wanted = {} if ring < 0 else {int(n): s for s, n in enumerate(ids[place]) if 0 <= n < limit}
            count = int(listed.tokens[item]) // 16
            assert int(listed.rows[item]) == (item if ring >= 0 else -1)
            assert count == len(wanted)
            got = dict(zip(listed.ids[item, :count].tolist(), listed.pages[item, :count].tolist(), strict=True))
            assert got == {block: place * SLOTS + slot for block, slot in wanted.items()}
            own = bits_of(ids)[place] if ring >= 0 else np.zeros(WORDS, np.int32)
            assert listed.excluded[row, kv_head].tolist() == own.tolist()
            read += 16 * count
    assert counts.tolist()[SKIP : READ + 1] == [KV_HEADS * 16 * 25, read]


# --- histories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_fetched", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_noted_row_is_the_groups_largest_share_of_blocks_that_were_read_and_else_the_row_before(
    device: str, has_fetched: bool
) -> None:
    draw = np.random.default_rng(2)
    rings, cells, first_block, known, steps = [1, -1, 0], [16 * 30 + 5, 3, 16 * 9 + 15], 2, 44, 5
    heads = KV_HEADS * GROUP
    maxima = draw.normal(size=(3, heads, known)).astype(np.float32) * 3
    maxima[draw.random(maxima.shape) < 0.5] = -np.inf
    lse = (draw.normal(size=(3, heads)) + 5).astype(np.float32)
    maxima[:, :, first_block : first_block + 7] = -np.inf  # the skipped range
    ids = draw_ids(draw, 7)
    before = draw.integers(0, 256, (RINGS * KV_HEADS, steps, BLOCKS)).astype(np.uint8)
    history = torch.tensor(before, device=device)
    on_device = [torch.tensor(rings, dtype=torch.int32, device=device), torch.tensor(cells, device=device)]
    skips = torch.tensor([[32] * 3, [32 + 16 * 7] * 3, [32 + 16 * 7] * 3], dtype=torch.int32, device=device)
    listed = fetched = None
    whole = lse
    if has_fetched:
        store = torch.tensor(ids, device=device), torch.tensor(bits_of(ids), device=device)
        listed = list_blocks(*store, on_device[0], skips, KV_HEADS, numbers(device))
        own = draw.normal(size=(3 * KV_HEADS, GROUP, SLOTS)).astype(np.float32) + 2
        beside = (draw.normal(size=lse.shape) + 5).astype(np.float32)
        fetched = Fetched(torch.tensor(own, device=device), listed, torch.tensor(beside, device=device))
        whole = np.log(np.exp(lse.astype(np.float64)) + np.exp(beside.astype(np.float64)))
    told = note_step(
        history, torch.tensor(maxima, device=device), torch.tensor(lse, device=device), fetched,
        HistoryRows(*on_device, skips), first_block, KV_HEADS,
    )  # fmt: skip
    np.testing.assert_allclose(told.cpu().numpy()[[0, 2]], whole[[0, 2]], rtol=1e-6)
    touched, furthest = np.zeros((RINGS * KV_HEADS, steps), bool), 0
    for row, ring in enumerate(rings):
        for kv_head in range(KV_HEADS if ring >= 0 else 0):
            place, group = ring * KV_HEADS + kv_head, slice(kv_head * GROUP, (kv_head + 1) * GROUP)
            width = cells[row] // 16 + 1 - first_block
            tops = maxima[row, group, first_block : first_block + width].astype(np.float64)
            if listed is not None:
                item = row * KV_HEADS + kv_head
                for at in range(int(listed.tokens[item]) // 16):
                    tops[:, int(listed.ids[item, at])] = own[item, :, at]
            row_before = before[place, (cells[row] - 1) % steps]
            is_read = (tops > -np.inf).any(0)
            assert has_fetched or not is_read[3]
            noted = [code(float(np.exp(column - whole[row, group]).max())) for column in tops.T]
            wanted = [int(own if read else last) for own, read, last in zip(noted, is_read, row_before, strict=False)]
            got = history[place, cells[row] % steps].tolist()
            furthest = max(furthest, *(abs(a - b) for a, b in zip(got, wanted, strict=False)))
            assert got[width:] == before[place, cells[row] % steps, width:].tolist()
            assert len(set(wanted)) > 3
            touched[place, cells[row] % steps] = True
    assert furthest <= HISTORY_CODE
    assert (history.cpu().numpy()[~touched] == before[~touched]).all()


# --- turns ---


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_whose_turn_it_is_is_told_by_one_launch_as_by_many_operations(device: str, every: int) -> None:
    settings = PredictedSettings(weights=Path("unread"), history=7, predict_every=every, local_tokens=20)
    own, alike = (Turns(settings, RINGS, KV_HEADS, 2, 40, torch.device(at)) for at in (device, "cpu"))
    ring_of_slot = torch.tensor([-1, 2, 0, 1, -1], dtype=torch.int32)
    samples, draw, kept = torch.zeros(1, dtype=torch.bool), np.random.default_rng(every), 0
    cells = {1: 15, 2: 200, 3: 620}  # by slot: before the sink's end, and beyond what there is room for
    for number in range(60):
        slots = [slot for slot in cells if draw.random() < 0.95] + [0, -1]
        for slot in slots[:-2]:
            cells[slot] += 1 + (draw.random() < 0.02)
        places = [cells.get(slot, 7) for slot in slots]
        asks = [HostRead(0, 32, 32 + 16 * int(draw.integers(0, 9))) for _ in slots]
        packed = StepRows.pack(slots, slots, places, asks, len(slots), 0)
        samples.fill_(number % 2)
        rows = StepRows(torch.from_numpy(packed), len(slots))
        there = StepRows(torch.from_numpy(packed).to(device), len(slots))
        rings, choices = own.of_rows(there, ring_of_slot.to(device), samples.to(device), KV_HEADS * GROUP)
        wanted = find_rings(rows, ring_of_slot, samples, KV_HEADS * GROUP)
        assert rings.rings.tolist() == wanted.rings.tolist()
        assert rings.wanted.tolist() == wanted.wanted.tolist()
        for choice, like in zip(choices, alike.choices(*alike._by_ring(rows, wanted.rings)), strict=True):
            for name in ("is_in", "stale", "widths", "oldest", "limits"):
                assert getattr(choice, name).tolist() == getattr(like, name).tolist(), f"{name} of step {number}"
            kept += int(choice.stale.max()) > 0
        for name in ("last_cells", "begins"):
            assert getattr(own, name)[:RINGS].tolist() == getattr(alike, name)[:RINGS].tolist()
    assert kept > 20


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_stay_keep_their_slots_and_only_the_difference_comes(device: str) -> None:
    for seed in range(8):
        draw = np.random.default_rng(seed)
        ids, wanted = draw_ids(draw, 9), draw_ids(draw, 9)
        is_in = draw.random(len(ids)) < 0.7
        got, counts = torch.tensor(ids, device=device), numbers(device)
        bits = torch.tensor(bits_of(ids), device=device)
        scores, limits = scores_of(wanted, 32 * bits.shape[1], device)
        fresh = choose_blocks(scores, limits, got, bits, torch.tensor(is_in, device=device), counts)
        after, came = got.cpu().numpy(), fresh.cpu().numpy().astype(bool)
        assert np.array_equal(bits.cpu().numpy(), bits_of(after))
        assert int(counts[FETCHED]) == came.sum()
        for place in range(len(ids)):
            if not is_in[place]:
                assert np.array_equal(after[place], ids[place])
                assert not came[place].any()
                continue
            asked, had = set(wanted[place]) - {-1}, set(ids[place]) - {-1}
            assert sorted(after[place][after[place] >= 0]) == sorted(asked)
            assert set(after[place][came[place]]) == asked - had
            stays = [slot for slot, block in enumerate(ids[place]) if block in asked]
            assert all(after[place][slot] == ids[place][slot] and not came[place][slot] for slot in stays)


def scores_of(wanted: np.ndarray, blocks: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By which exactly these are chosen, and no limits."""
    scores = np.full((len(wanted), blocks), -np.inf, np.float32)
    for place, asked in enumerate(wanted):
        scores[place, asked[asked >= 0]] = 1.0
    return torch.tensor(scores, device=device), torch.full((len(wanted),), blocks, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("slots", "blocks"), [(1, 40), (96, 3000), (256, 3000), (64, 50), (40, 20_000)])
def test_the_best_are_chosen_as_the_reference_chooses_them(device: str, slots: int, blocks: int) -> None:
    """Of scores with many alike, of both signs, with limits within, and some that are never chosen, in turn."""
    draw = np.random.default_rng(slots)
    words = -(-blocks // 32) + 1
    is_in, limits = np.array([True] * 5 + [False]), np.array([blocks, 0, blocks // 2, 1, blocks - 1, blocks], np.int32)
    sides = []
    for function, where in ((choose_blocks_reference, "cpu"), (choose_blocks, device)):
        ids = torch.full((6, slots), -1, dtype=torch.int32, device=where)
        bits = torch.zeros(6, words, dtype=torch.int32, device=where)
        sides.append((function, where, ids, bits, numbers(where)))
    for step in range(4):
        scores = draw.normal(size=(6, blocks)).astype(np.float32)
        if step % 2:
            scores = np.round(scores)  # few values, and zeros of both signs
        scores[:, draw.random(blocks) < 0.2 * step] = -np.inf
        told = []
        for function, where, ids, bits, counts in sides:
            given = [torch.tensor(one, device=where) for one in (scores, limits)]
            fresh = function(*given, ids, bits, torch.tensor(is_in, device=where), counts)
            told.append([one.cpu() for one in (ids, bits, fresh, counts)])
        for reference, ours in zip(*told, strict=True):
            assert torch.equal(reference, ours), step
        ids, bits = told[0][:2]
        assert torch.equal(bits, torch.stack([pack_bits(own[own >= 0], words) for own in ids]))
        own = ids[0][ids[0] >= 0].long().numpy()
        assert len(own) == min(slots, int(np.isfinite(scores[0]).sum()))
        assert scores[0][own].min() >= np.sort(scores[0])[-len(own)]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"scores": torch.zeros(2, 64, dtype=torch.float64)}, "choose_blocks: scores"),
        ({"limits": torch.zeros(3, dtype=torch.int32)}, "choose_blocks: limits"),
        ({"bits": torch.zeros(2, 1, dtype=torch.int32)}, "bits of 32 blocks; wanted of 64 or more"),
    ],
)
def test_what_cannot_be_chosen_from_is_named(change: dict[str, torch.Tensor], wanted: str) -> None:
    ids = torch.full((2, 4), -1, dtype=torch.int32)
    given = {"scores": torch.zeros(2, 64), "limits": torch.full((2,), 64, dtype=torch.int32), "ids": ids,
             "bits": torch.zeros(2, 2, dtype=torch.int32), "is_in": torch.ones(2, dtype=torch.bool),
             "counts": numbers("cpu")}  # fmt: skip
    with pytest.raises(ValueError, match=wanted):
        choose_blocks(**{**given, **change})


class Rows:
    """Runs of several pieces in pinned memory, as a tier hands them out: other centres, and strides of their own."""

    def __init__(self, kind: str, device: str) -> None:
        draw, self.is_int8, self.kept = np.random.default_rng(5), kind == "int8", []
        self.runs = []  # by ring: keys and values `[kv_heads, tokens, dim]` restored, float64
        table = np.zeros((RINGS, places.COLUMNS, 4), np.int64)
        for ring in range(RINGS):
            keys, values, begin = [], [], 0
            for piece, tokens in enumerate((64, 32, 128)):
                rows = [self._pinned(self._draw(draw, tokens + 16), device) for _ in range(2)]
                centre, key_scale, value_scale = (
                    self._pinned(torch.tensor(draw.random(size), dtype=torch.float32), device)
                    for size in ((KV_HEADS, DIM), (KV_HEADS,), (KV_HEADS, DIM))
                )
                scales = [key_scale, value_scale] if self.is_int8 else []
                size = rows[0].element_size()
                strides = [(tokens + 16) * DIM * size, DIM * size]
                addresses = [rows[0].data_ptr(), *strides, rows[1].data_ptr(), *strides, centre.data_ptr()]
                addresses += [scale.data_ptr() for scale in scales]
                column = [begin, begin + tokens, *addresses]
                table[ring, : len(column), piece] = column
                own = [one[:, :tokens].double() for one in rows]
                if self.is_int8:
                    own = [own[0] * key_scale[:, None, None].double(), own[1] * value_scale[:, None].double()]
                keys.append(own[0] + centre[:, None].double())
                values.append(own[1])
                begin += tokens
            self.runs.append((torch.cat(keys, 1), torch.cat(values, 1)))
        self.lies = torch.tensor(table, device=device)

    def _draw(self, draw: np.random.Generator, tokens: int) -> torch.Tensor:
        size = (KV_HEADS, tokens, DIM)
        if self.is_int8:
            return torch.tensor(draw.integers(-127, 128, size), dtype=torch.int8)
        return torch.tensor(draw.normal(size=size), dtype=torch.bfloat16)

    def _pinned(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        self.kept.append(tensor.pin_memory() if device == "cuda" else tensor)
        return self.kept[-1]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fetched_block_is_its_run_restored_and_other_slots_stay(device: str, kind: str) -> None:
    rows, draw = Rows(kind, device), np.random.default_rng(6)
    ids = draw_ids(draw, 14)
    fresh = ((draw.random(ids.shape) < 0.6) & (ids >= 0)).astype(np.uint8)
    keys, values = (torch.full((ids.size, 1, 16, DIM), torch.nan, device=device) for _ in range(2))
    fetch_blocks(
        torch.tensor(ids, device=device), torch.tensor(fresh, device=device), rows.lies, keys, values, KV_HEADS,
        rows.is_int8, None,
    )  # fmt: skip
    assert fresh.any()
    for place, slot in np.ndindex(*ids.shape):
        got = [one[place * SLOTS + slot, 0].cpu() for one in (keys, values)]
        if not fresh[place, slot]:
            assert all(one.isnan().all() for one in got)
            continue
        ring, kv_head = divmod(place, KV_HEADS)
        for one, run in zip(got, rows.runs[ring], strict=True):
            wanted = run[kv_head, 16 * ids[place, slot] :][:16].float()
            torch.testing.assert_close(one, wanted, rtol=2.0**-22, atol=2.0**-20)


@pytest.mark.parametrize("open_parts", [0, 1])
@pytest.mark.parametrize("share", [0.002, 0.08])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_many_slots_are_each_fetched_or_left_out_once(device: str, share: float, open_parts: int) -> None:
    """More slots than a program looks through at once, and fewer blocks than programs, or several rounds of them."""
    rows, draw, slots = Rows("bfloat16", device), np.random.default_rng(9), 431
    ids = draw.integers(0, 14, (RINGS * KV_HEADS, slots)).astype(np.int32)
    fresh = (draw.random(ids.shape) < share).astype(np.uint8)
    fresh[-1, -1] = 1
    assert ids.size > CHUNK
    assert fresh.sum() < PROGRAMS if share < 0.01 else fresh.sum() > 2 * BLOCKS_AT_ONCE * PROGRAMS
    keys, values = (torch.full((ids.size, 1, 16, DIM), torch.nan, device=device) for _ in range(2))
    own, bits, counts = torch.tensor(ids, device=device), torch.tensor(bits_of(ids), device=device), numbers(device)
    late = Lateness(torch.tensor([open_parts], dtype=torch.int32, device=device), bits, counts)
    fetch_blocks(own, torch.tensor(fresh, device=device), rows.lies, keys, values, KV_HEADS, rows.is_int8, late)
    np.testing.assert_array_equal(own.cpu().numpy(), ids if open_parts else np.where(fresh == 1, -1, ids))
    assert int(counts[LATE]) == -int(counts[FETCHED]) == (0 if open_parts else fresh.sum())
    for one, run in ((keys, 0), (values, 1)):
        got = one.view(*ids.shape, 16, DIM).cpu()
        assert got[torch.tensor(fresh == 0)].isnan().all()
        for place, slot in np.argwhere(fresh) if open_parts else ():
            ring, kv_head = divmod(int(place), KV_HEADS)
            wanted = rows.runs[ring][run][kv_head, 16 * ids[place, slot] :][:16].float()
            torch.testing.assert_close(got[place, slot], wanted, rtol=2.0**-22, atol=2.0**-20)


@pytest.mark.parametrize("open_parts", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_are_late_stand_in_no_slot_and_in_no_bit(device: str, open_parts: int) -> None:
    rows, draw = Rows("bfloat16", device), np.random.default_rng(8)
    ids = draw_ids(draw, 14)
    fresh = ((draw.random(ids.shape) < 0.5) & (ids >= 0)).astype(np.uint8)
    keys, values = (torch.full((ids.size, 1, 16, DIM), torch.nan, device=device) for _ in range(2))
    own, bits, counts = torch.tensor(ids, device=device), torch.tensor(bits_of(ids), device=device), numbers(device)
    counts[FETCHED] = 100
    late = Lateness(torch.tensor([open_parts], dtype=torch.int32, device=device), bits, counts)
    fetch_blocks(own, torch.tensor(fresh, device=device), rows.lies, keys, values, KV_HEADS, rows.is_int8, late)
    there = ids if open_parts else np.where(fresh == 1, -1, ids)
    assert 0 < fresh.sum() < (ids >= 0).sum()
    np.testing.assert_array_equal(own.cpu().numpy(), there)
    np.testing.assert_array_equal(bits.cpu().numpy(), bits_of(there))
    left = 0 if open_parts else int(fresh.sum())
    assert (int(counts[LATE]), int(counts[FETCHED])) == (left, 100 - left)
    came = ~keys.isnan().all((1, 2, 3)).cpu().numpy().reshape(ids.shape)
    np.testing.assert_array_equal(came, (fresh == 1) & bool(open_parts))


@pytest.mark.parametrize(("blocks", "every", "rings"), [
    (BLOCKS, 3, [2, -1, 0]), (1200, 3, [2, -1, 0]), (BLOCKS, 1, [2, -1, 0]), (BLOCKS, 1, [-1, -1, -1]),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_so_many_blocks_are_looked_at_but_those_that_stand_in_slots(
    device: str, kind: str, blocks: int, every: int, rings: list[int]
) -> None:
    """blocks: of the longest context, of which a program looks through so many at once."""
    rows, draw, steps = Rows(kind, device), np.random.default_rng(7), 4
    assert (3 * KV_HEADS * blocks // every > CHUNK) == (blocks > BLOCKS)
    ids, cells = draw_ids(draw, 14), [401, 7, 330]
    skips = np.array([[16, 0, 32], [16 + 16 * 13, 0, 32 + 16 * 4], [0, 0, 0]], np.int32)
    query = torch.tensor(
        draw.normal(size=(3, KV_HEADS * GROUP, DIM)) / (30 if rows.is_int8 else 1), dtype=torch.float32
    )
    lse = torch.tensor(draw.random((3, KV_HEADS * GROUP)) + (4 if rows.is_int8 else 3), dtype=torch.float32)
    history = torch.full((RINGS * KV_HEADS, steps, blocks), 77, dtype=torch.uint8, device=device)
    counts, unread = numbers(device), torch.empty(0, device=device)
    store = Blocks(history, unread, unread, torch.tensor(bits_of(ids), device=device), unread, unread, rows.lies)
    own = HistoryRows(
        torch.tensor(rings, dtype=torch.int32, device=device), torch.tensor(cells, device=device),
        torch.tensor(skips, device=device),
    )  # fmt: skip
    look_at_blocks(store, query.to(device), lse.to(device), own, every, DIM**-0.5, rows.is_int8, counts)
    wanted, looked = np.full(history.shape, 77), 0
    for row, ring in enumerate(rings):
        for kv_head in range(KV_HEADS if ring >= 0 else 0):
            place, group = ring * KV_HEADS + kv_head, slice(kv_head * GROUP, (kv_head + 1) * GROUP)
            for block in range(int(skips[1, row] - skips[0, row]) // 16):
                if block % every != cells[row] % every or block in ids[place]:
                    continue
                keys = rows.runs[ring][0][kv_head, 16 * block : 16 * block + 16]
                tops = (query[row, group].double() @ keys.T).amax(1) * DIM**-0.5
                wanted[place, cells[row] % steps, block] = code(float((tops - lse[row, group].double()).exp().max()))
                looked += 1
    assert int(counts[LOOKED]) == looked
    assert np.abs(history.cpu().numpy().astype(int) - wanted).max() <= HISTORY_CODE
    assert (looked > 5 and len(np.unique(wanted)) > 4) or max(rings) < 0
