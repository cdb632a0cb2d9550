"""A host request of the CPU as it stands in a slot, and on a GPU the whole hop, a thousand times in CUDA graphs:
launched when the answer is there, and launched ahead of it.
"""

import time

import numpy as np
import pytest
import torch

from gpu.operations.exchange.await_answer import await_answer
from gpu.operations.exchange.exchange_pack import catch_up, exchange_pack, new_counters
from tests.gpu.kernel_oracles import DEVICES, DTYPES, random
from transfer.allocation import dtype_name
from transfer.exchange import LAST_STAMP, ExchangeSlot, new_slot, wait
from transfer.merge import NO_MASS, merge_outputs
from transfer.slot_shape import SlotShape

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]
WAIT_S = 5.0
HOPS = 1000


def poisoned_slot(max_rows: int, heads: int, dim: int, tables: int, dtype: torch.dtype, device: str) -> ExchangeSlot:
    slot = new_slot(max_rows, SlotShape(heads, dim, tables, dtype_name(dtype)), torch.device(device))
    for tensor in (slot.queries, slot.out, slot.lse):
        tensor.fill_(float("nan"))
    if slot.codes is not None:
        slot.codes.view(torch.int16).fill_(-1)
    return slot


def make_ask(generator, shape, tables, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries whose rows are strided, as rows of QKV are, and codes up to 65,535."""
    rows, heads, dim = shape
    queries = random(generator, (rows, heads + 2, dim), dtype, device)[:, :heads]
    codes = generator.integers(0, 2**16, (rows, heads, tables)).astype(np.uint16)
    return queries, torch.from_numpy(codes).to(device)


@pytest.mark.parametrize(("heads", "dim", "tables"), [(32, 128, 150), (3, 64, 7), (8, 64, 0)])
def test_rows_codes_and_flags_of_each_ask_stand_in_the_slot(heads, dim, tables, dtype, device):
    generator = np.random.default_rng(heads)
    slot = poisoned_slot(6, heads, dim, tables, dtype, device)
    counters = new_counters(slot, torch.device(device))
    for stamp, rows in enumerate((4, 1, 5), start=1):
        queries, codes = make_ask(generator, (rows, heads, dim), tables, dtype, device)
        before = slot.queries.clone()
        exchange_pack(queries, codes if tables else None, counters, slot)
        slot.advance(rows)
        wait(slot, 0, WAIT_S)
        assert slot.stamp == stamp
        assert slot.flags[:rows].tolist() == [stamp] * rows
        assert torch.equal(slot.queries[:rows], queries.cpu())
        torch.testing.assert_close(slot.queries[rows:], before[rows:], rtol=0, atol=0, equal_nan=True)
        if slot.codes is not None:
            np.testing.assert_array_equal(slot.codes[:rows].numpy(), codes.cpu().numpy())
    assert counters.tolist() == [3] * 6
    assert int(slot.flags[5]) == 0


def test_stamps_begin_anew_on_both_sides_after_the_last(dtype, device):
    slot = poisoned_slot(2, 4, 64, 0, dtype, device)
    slot.stamp = LAST_STAMP - 1
    counters = new_counters(slot, torch.device(device))
    queries = torch.zeros(2, 4, 64, dtype=dtype, device=device)
    for stamp in (LAST_STAMP, 0, 1):
        exchange_pack(queries, None, counters, slot)
        slot.advance(2)
        assert slot.stamp == stamp
        wait(slot, 0, WAIT_S)


def test_no_flag_of_a_warm_up_is_taken_for_an_asks(dtype, device):
    slot = poisoned_slot(2, 4, 64, 0, dtype, device)
    counters = new_counters(slot, torch.device(device))
    queries = torch.zeros(2, 4, 64, dtype=dtype, device=device)
    for _ in range(3):
        exchange_pack(queries, None, counters, slot)
    catch_up(counters, slot)
    assert slot.stamp == int(slot.answered) == 3
    for _ in range(4):
        slot.advance(2)
        assert not (slot.flags == slot.stamp).any()
        exchange_pack(queries, None, counters, slot)
        wait(slot, 0, WAIT_S)


def test_an_ask_that_does_not_fit_the_slot_is_named(dtype, device):
    slot = new_slot(2, SlotShape(4, 64, 5, dtype_name(dtype)), torch.device(device))
    counters = new_counters(slot, torch.device(device))
    queries = torch.zeros(3, 4, 64, dtype=dtype, device=device)
    codes = torch.zeros(3, 4, 5, dtype=torch.uint16, device=device)
    with pytest.raises(ValueError, match="exchange_pack: got 3 rows, codes True; slot has 2 rows, codes True"):
        exchange_pack(queries, codes, counters, slot)
    with pytest.raises(ValueError, match="exchange_pack: got 2 rows, codes False; slot has 2 rows, codes True"):
        exchange_pack(queries[:2], None, counters, slot)
    with pytest.raises(ValueError, match=r"exchange_pack: slot.queries is \(2, 4, 64\)"):
        exchange_pack(queries[:2, :3], codes[:2, :3], counters, slot)


def test_an_ask_says_which_heads_and_blocks_it_wants(dtype, device):
    """Those of the request before it are not kept: without a mask all heads are wanted, and nothing is excluded."""
    generator = np.random.default_rng(4)
    slot = new_slot(5, SlotShape(6, 64, 0, dtype_name(dtype), kv_heads=2, exclusion_blocks=320), torch.device(device))
    counters = new_counters(slot, torch.device(device))
    queries = torch.zeros(3, 6, 64, dtype=dtype, device=device)
    masks = torch.from_numpy(generator.integers(0, 2, (3, 6)).astype(np.uint8))
    words = torch.from_numpy(generator.integers(-(2**31), 2**31, (3, 2, 10)).astype(np.int32))
    for wanted, excluded in ((masks, words), (None, words), (masks, None), (None, None)):
        on_device = [None if one is None else one.to(device) for one in (wanted, excluded)]
        exchange_pack(queries, None, counters, slot, *on_device)
        slot.advance(3)
        wait(slot, 0, WAIT_S)
        assert torch.equal(slot.wanted[:3], torch.ones_like(masks) if wanted is None else masks)
        assert torch.equal(slot.excluded[:3], torch.zeros_like(words) if excluded is None else words)
    assert slot.wanted[3:].all()
    assert not slot.excluded[3:].any()
    with pytest.raises(ValueError, match=r"exchange_pack: wanted is \(3, 5\)"):
        exchange_pack(queries, None, counters, slot, torch.ones(3, 5, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match=r"exchange_pack: excluded is \(3, 2, 9\)"):
        exchange_pack(queries, None, counters, slot, None, words[:, :, :9].contiguous().to(device))


class Hop:
    """A segment's ends: merge the answer, make the next host request of it, pack it. The codes are the device's own
    count.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: str) -> None:
        self.slot = poisoned_slot(rows + 2, 8, 64, 30, dtype, device)
        self.slot.out[:rows], self.slot.lse[:rows] = 0.0, 0.0
        self.counters = new_counters(self.slot, torch.device(device))
        self.rows = rows
        self.query = torch.zeros(rows, 8, 64, dtype=dtype, device=device)
        self.codes = torch.zeros(rows, 8, 30, dtype=torch.uint16, device=device)
        self.empty = torch.zeros(rows, 8, 64, device=device), torch.full((rows, 8), NO_MASS, device=device)

    def compute(self) -> None:
        await_answer(self.counters, self.slot)
        out, _ = merge_outputs([self.empty[0], self.slot.out[: self.rows]], [self.empty[1], self.slot.lse[: self.rows]])
        self.query.copy_(out)
        self.codes.view(torch.int16).copy_(self.counters[: self.rows, None, None].expand(-1, 8, 30))
        exchange_pack(self.query, self.codes, self.counters, self.slot)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.slot.release()
        self.compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.compute()
        catch_up(self.counters, self.slot)
        return graph


@pytest.mark.parametrize("rows", [1, 7])
def test_every_hop_brings_this_asks_row_and_the_next_one_reads_its_answer(rows, dtype, device):
    hop = Hop(rows, dtype, device)
    run = hop.compute
    if device == "cuda":
        run = hop.capture().replay
    wanted = torch.zeros(rows, 8, 64, dtype=dtype)
    asks = range(hop.slot.stamp, hop.slot.stamp + (HOPS if device == "cuda" else 3))
    for number in asks:
        run()
        hop.slot.advance(rows)
        wait(hop.slot, number, WAIT_S)
        assert torch.equal(hop.slot.queries[:rows], wanted), f"hop {number}"
        assert (hop.slot.codes[:rows].numpy() == number).all(), f"hop {number}"
        wanted = torch.full_like(wanted, number % 251) + torch.arange(64, dtype=dtype) % 3
        hop.slot.out[:rows] = wanted
        hop.slot.lse[:rows] = float(number % 7)
        hop.slot.give_answer()


@pytest.mark.gpu
def test_what_is_launched_ahead_waits_for_the_answer_to_its_ask(dtype, device):
    """A stamp that is written before its answer, or waited for in vain, would bring the answer before it."""
    if device == "cpu":
        pytest.skip("the CPU is not launched ahead")
    hop = Hop(3, dtype, device)
    graph = hop.capture()
    graph.replay()
    for number in range(HOPS):
        hop.slot.advance(3)
        graph.replay()
        wait(hop.slot, number, WAIT_S)
        if number % 100 == 1:
            time.sleep(0.01)  # long enough for a device that does not wait
            assert (hop.slot.flags[:3] == hop.slot.stamp).all()
        if number:
            assert (hop.slot.queries[:3] == (number - 1) % 251).all(), f"hop {number}"
        hop.slot.out[:3] = float(number % 251)
        hop.slot.lse[:3] = 0.0
        hop.slot.give_answer()
    hop.slot.release()
    torch.cuda.synchronize()


def test_an_answer_to_another_ask_is_not_taken_on_the_cpu(dtype, device):
    if device == "cuda":
        pytest.skip("a device would wait")
    hop = Hop(1, dtype, device)
    hop.compute()
    with pytest.raises(AssertionError, match="request 1 has the answer to request 0"):
        hop.compute()
    hop.slot.release()
    hop.compute()
