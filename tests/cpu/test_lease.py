"""What a step in flight reads stays where it is, whatever becomes of the contexts; then its memory comes back."""

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from tests.cpu.tier_model import LAYERS, Device, new_tier, tier_shape
from transfer.host_memory import TAIL_TOKENS
from transfer.tier import Ask, HostMemoryError

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


@pytest.mark.parametrize("is_sampled", [False, True])
def test_closed_contexts_are_read_until_the_last_answer_and_count_as_used_until_then(is_sampled: bool) -> None:
    """Two steps in flight read the same, and one reads more; memory that was given back would be poisoned anew."""
    tier = new_tier(tier_shape())
    with Device(tier, 1) as device:
        device.open(1, is_sampled)
        device.deposit(1, 3000)
        device.deposit(1, 200)
        wanted, _, _ = device.attend([1])
        attentions = [tier.attention([Ask(1, 3200)]), tier.attention([Ask(1, 3200)]), tier.attention([Ask(1, 3100)])]
        used = tier.stats().bytes_in_use
        device.close(1)
        assert tier.stats().contexts == 0
        for attention in attentions[:2]:
            assert tier.stats().bytes_in_use == used
            np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
        assert tier.stats().bytes_in_use == used
        attentions[2].give_up()
        attentions[2].give_up()
        tier._store.wait_for_doomed()
        assert tier.stats().bytes_in_use == 0
    tier.shutdown()
    assert tier.stats().bytes_held == 0


def test_a_deposit_waits_for_memory_that_a_step_in_flight_still_reads() -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 2) as device, ThreadPoolExecutor(1) as launches:
        device.open(1, False)
        device.deposit(1, 3000)
        wanted, _, _ = device.attend([1])
        attention = tier.attention([Ask(1, 3000)])
        tier._pool.limit_bytes = tier.stats().bytes_in_use * 3 // 2
        device.open(2, False)
        with pytest.raises(HostMemoryError, match="asked"):  # of memory that is not closed
            device.deposit(2, 3000)
        device.close(1)
        deposit = launches.submit(device.deposit, 2, 3000)
        assert not wait([deposit], NOT_YET_S).done
        np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
        deposit.result(20)
        assert device.tokens(2) == 3000
    tier.shutdown()


def test_a_tail_that_grows_is_forked_and_merged_is_read_as_it_was() -> None:
    tier = new_tier(tier_shape())
    with Device(tier, 3) as device:
        device.open(1, True)
        device.deposit(1, 3000)
        device.deposit(1, 100)
        wanted, _, _ = device.attend([1])
        attention = tier.attention([Ask(1, 3100)])
        merges = tier._growth.merges
        device.fork(1, 2, 3050, True)
        device.deposit(2, 300)
        while tier._growth.merges == merges:
            device.deposit(1, TAIL_TOKENS // 4)
        device.close(2)
        np.testing.assert_array_equal(answers_of(device, attention, 1), wanted)
    tier._store.wait_for_doomed()
    assert tier.stats().bytes_in_use == 0
    tier.shutdown()
