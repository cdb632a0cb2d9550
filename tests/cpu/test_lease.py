"""What a step in flight reads stays where it is, whatever becomes of the contexts; then its memory comes back."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import numpy as np
import pytest

from tests.cpu.tier_model import LAYERS, Device, new_tier, tier_shape
from transfer import places
from transfer.host_memory import TAIL_TOKENS
from transfer.host_tier import ContextRead, HostMemoryError
from transfer.reading import Reading

NOT_YET_S = 0.2


def answers_of(device: Device, attention, num_rows: int) -> np.ndarray:
    """Of an attention that was made before: out `[layers, rows, heads, dim]`; queries are always the same."""
    slot, queries, out = device._new_slot(), device._queries(num_rows), []
    for layer in range(LAYERS):
        slot.advance(num_rows)
        device._put(slot, queries[layer])
        slot.flags[:num_rows] = slot.stamp
        attention.run(layer, slot)
        out.append(slot.out[:num_rows].numpy().copy())
    return np.stack(out)


@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_closed_contexts_are_read_until_the_last_answer_and_count_as_used_until_then(reading: Reading) -> None:
    """Two steps in flight read the same, and one reads more; memory that was given back would be poisoned anew."""
    tier = new_tier(tier_shape())
    with Device(tier, 1) as device:
        device.open(1, reading, 3000, 200)
        wanted, _, _ = device.attend([1])
        attentions = [
            tier.attention([ContextRead(1, 3200)]),
            tier.attention([ContextRead(1, 3200)]),
            tier.attention([ContextRead(1, 3100)]),
        ]
        used = tier.stats().bytes_in_use
        assert tier.stats().leases == len(attentions)
        device.close(1)
        assert tier.stats().contexts == 0
        for attention in attentions[:2]:
            assert tier.stats().bytes_in_use == used
            np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
        assert tier.stats().bytes_in_use == used
        attentions[2].give_up()
        attentions[2].give_up()
        tier._store.wait_for_doomed()
        assert (tier.stats().bytes_in_use, tier.stats().leases) == (0, 0)
    tier.shutdown()
    assert tier.stats().bytes_held == 0


def test_an_offload_waits_for_memory_that_a_step_in_flight_still_reads() -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 2) as device, ThreadPoolExecutor(1) as launches:
        device.open(1, Reading.WHOLE, 3000)
        wanted, _, _ = device.attend([1])
        attention = tier.attention([ContextRead(1, 3000)])
        tier._pool.limit_bytes = tier.stats().bytes_in_use * 3 // 2
        device.open(2, Reading.WHOLE)
        with pytest.raises(HostMemoryError, match="asked"):  # of memory that is not closed
            device.offload(2, 3000)
        device.close(1)
        offload = launches.submit(device.offload, 2, 3000)
        assert not wait([offload], NOT_YET_S).done
        np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
        offload.result(20)
        assert device.tokens(2) == 3000
    tier.shutdown()


def test_a_tail_that_grows_is_forked_and_merged_is_read_as_it_was() -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 3) as device:
        device.open(1, Reading.SAMPLE, 3000, 100)
        wanted, _, _ = device.attend([1])
        attention = tier.attention([ContextRead(1, 3100)])
        merges = tier._growth.merges
        device.fork(1, 2, 3050, Reading.SAMPLE)
        device.offload(2, 300)
        while tier._growth.merges == merges:
            device.offload(1, TAIL_TOKENS // 4)
        device.close(2)
        np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
    tier._store.wait_for_doomed()
    assert tier.stats().bytes_in_use == 0
    tier.shutdown()


class Passing:
    """A point of a device's work, which tests pass."""

    def __init__(self) -> None:
        self._passed = Event()

    def synchronize(self) -> None:
        assert self._passed.wait(20)

    def query(self) -> bool:
        return self._passed.is_set()

    def pass_by(self) -> None:
        self._passed.set()


def test_what_is_lent_to_the_device_stays_until_it_has_passed_whoever_has_answered_and_closed() -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 1) as device:
        device.open(1, Reading.WHOLE, 3000)
        device.attend([1])
        first, second = (tier.attention([ContextRead(1, 3000)]) for _ in range(2))
        loans, points = [first.lend(), second.lend()], [Passing(), Passing()]
        answers_of(device, first, 1)
        second.give_up()
        device.close(1)
        used = tier.stats().bytes_in_use
        for loan, point in zip(loans, points, strict=True):
            loan.end(point)
            time.sleep(NOT_YET_S / 4)
            assert tier.stats().bytes_in_use == used > 0
        for point in points:
            point.pass_by()
        tier._store.wait_for_doomed()
        assert tier.stats().bytes_in_use == 0
    tier.shutdown()


def test_places_name_the_rows_that_are_asked_for_over_segments_of_other_centres() -> None:
    """What stands at the addresses is what `rows` gives, of a run of several segments whose last one is cut."""
    tier = new_tier(tier_shape())
    with Device(tier, 3) as device:
        device.open(1, Reading.WHOLE)
        for tokens in (2100, 128, 2200, 256):
            device.offload(1, tokens)
        asked = 2100 + 128 + 2200 + 16
        attention = tier.attention([ContextRead(None, 0), ContextRead(1, asked)])
        table = attention.places(1)
        assert attention.places(0).shape == (LAYERS, places.COLUMNS, 0)
        aligned = [*range(places.KEYS, places.CENTRE + 1), places.VALUE_SCALE]
        assert not (table[:, aligned] % places.ALIGN_BYTES).any()
        for layer in range(LAYERS):
            begin = 0
            for place, rows in zip(table[layer].T.tolist(), tier.rows(1, layer, asked), strict=True):
                end = begin + rows.keys.shape[1]
                assert place[places.RUN_BEGIN : places.RUN_END + 1] == [begin, end]
                assert place[places.KEYS] == rows.keys.data_ptr()
                assert place[places.VALUES] == rows.values.data_ptr()
                assert place[places.CENTRE] == rows.centre.data_ptr()
                for head, row in ((places.KEY_HEAD_BYTES, rows.keys), (places.VALUE_HEAD_BYTES, rows.values)):
                    assert place[head : head + 2] == [row.stride(axis) * row.element_size() for axis in (0, 1)]
                begin = end
            assert begin == asked
        attention.give_up()
    tier.shutdown()
