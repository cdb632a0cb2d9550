"""The host's side of an exchange slot: shapes, stamps, and a wait that sees rows as they come or says which did not."""

import threading
import time

import pytest
import torch

from transfer.exchange import LAST_STAMP, ExchangeError, new_slot, wait
from transfer.slot_shape import SlotShape

CPU = torch.device("cpu")
LIMIT_S = 0.05


def test_a_slot_has_room_for_every_row_and_codes_only_where_asked() -> None:
    slot = new_slot(5, SlotShape(8, 64, 150, "float32"), CPU)
    assert (slot.queries.shape, slot.codes.shape) == ((5, 8, 64), (5, 8, 150))
    assert (slot.out.shape, slot.lse.shape, slot.flags.shape) == ((5, 8, 64), (5, 8), (5,))
    assert (slot.codes.dtype, slot.out.dtype, slot.flags.dtype) == (torch.uint16, torch.float32, torch.int32)
    assert new_slot(5, SlotShape(8, 64, 0, "bfloat16"), CPU).codes is None


def test_a_slot_asks_for_every_head_and_block_until_the_device_says_otherwise() -> None:
    slot = new_slot(5, SlotShape(8, 64, 0, "float32"), CPU)
    assert (slot.wanted.shape, slot.wanted.dtype) == ((5, 8), torch.uint8)
    assert slot.wanted.all()
    assert slot.excluded is None
    assert slot.covered is None
    for blocks, words in ((1, 1), (32, 1), (33, 2), (6144, 192)):
        slot = new_slot(5, SlotShape(8, 64, 0, "float32", kv_heads=2, exclusion_blocks=blocks, is_counted=True), CPU)
        assert (slot.excluded.shape, slot.excluded.dtype) == ((5, 2, words), torch.int32)
        assert not slot.excluded.any()
        assert (slot.covered.shape, slot.covered.dtype) == ((5, 8), torch.int32)
    with pytest.raises(AssertionError, match="by KV head"):
        new_slot(5, SlotShape(8, 64, 0, "float32", exclusion_blocks=1), CPU)


def test_stamps_count_asks_and_stay_int32() -> None:
    slot = new_slot(5, SlotShape(2, 64, 0, "float32"), CPU)
    slot.advance(3)
    assert (slot.stamp, slot.rows) == (1, 3)
    slot.stamp = LAST_STAMP
    slot.advance(5)
    assert (slot.stamp, slot.rows) == (0, 5)
    with pytest.raises(AssertionError, match="asked 6 rows, have 5"):
        slot.advance(6)


def test_wait_returns_when_all_rows_in_use_have_the_stamp() -> None:
    slot = new_slot(5, SlotShape(2, 64, 0, "float32"), CPU)
    slot.advance(3)
    slot.flags[:3] = 1
    wait(slot, 0, LIMIT_S)


def test_wait_sees_flags_that_another_thread_writes_one_by_one() -> None:
    slot = new_slot(4, SlotShape(2, 64, 0, "float32"), CPU)
    wait_first = threading.Event()

    def answer() -> None:
        wait_first.wait()
        for row in (3, 0, 2, 1):
            time.sleep(LIMIT_S)
            slot.flags[row] = 1

    thread = threading.Thread(target=answer)
    thread.start()
    slot.advance(4)
    wait_first.set()
    wait(slot, 0, 100 * LIMIT_S)
    assert slot.flags.tolist() == [1, 1, 1, 1]
    thread.join()


def test_wait_names_the_layer_the_row_and_the_stamps_when_time_is_up() -> None:
    slot = new_slot(4, SlotShape(2, 64, 0, "float32"), CPU)
    slot.advance(2)
    slot.advance(2)
    slot.flags[0], slot.flags[1] = 2, 1
    with pytest.raises(ExchangeError, match=r"layer 7: row 1 of 2 has stamp 1 after 0.05 s, wanted 2"):
        wait(slot, 7, LIMIT_S)
