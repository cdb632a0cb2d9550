"""The tier says of an ask whether it would be waited for, and never waits to say so."""

import pytest

from tests.cpu.tier_model import Device, new_tier, tier_shape
from transfer.host_tier import ContextRead
from transfer.reading import Reading

PATIENCE_S = 20.0


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("the link is gone")


def settle(tier, tokens: int = 2400) -> None:
    with tier._store.changed:
        assert tier._store.changed.wait_for(lambda: tier.is_ready(ContextRead(1, tokens)), PATIENCE_S)


def test_rows_are_asked_for_without_a_wait_once_they_have_landed() -> None:
    tier = new_tier(tier_shape(bits=7, tables=20))
    with Device(tier, 0) as device:
        assert not tier.is_ready(ContextRead(1, 5)), "there is no such context yet"
        assert tier.is_ready(ContextRead(None, 0))
        device.open(1, Reading.WHOLE, 2300)
        lates = device.offload_late(1, 100)
        settle(tier, 2300)  # what lies behind is not waited for
        assert not tier.is_ready(ContextRead(1, 2301))
        assert not tier.is_ready(ContextRead(1, 2401)), "it has not so many tokens"
        for late in lates:
            assert not tier.is_ready(ContextRead(1, 2400))
            late.arrive()
        settle(tier)
        tier.attention([ContextRead(1, 2400)]).give_up()
        assert tier.is_ready(ContextRead(1, 2400))
    tier.shutdown()


@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_sampled_rows_wait_for_their_tables(reading: Reading) -> None:
    tier = new_tier(tier_shape(bits=7, tables=20))
    with Device(tier, 0) as device:
        tier._builder.pause()
        device.open(1, reading, 2400)
        (segment,) = tier._store._alive()
        with tier._store.changed:
            assert tier._store.changed.wait_for(lambda: not any(segment.fills), PATIENCE_S)
        assert tier.is_ready(ContextRead(1, 2400)) != reading.has_tables
        tier._builder.go_on()
        settle(tier)
    tier.shutdown()


def test_rows_that_cannot_come_are_not_waited_for() -> None:
    tier = new_tier(tier_shape(bits=7, tables=20))
    with Device(tier, 0) as device:
        device.open(1, Reading.SAMPLE)
        device.offload_late(1, 2400, Broken())
        settle(tier)
        with pytest.raises(RuntimeError, match="the link is gone"):
            tier.attention([ContextRead(1, 2400)])
    tier.shutdown()
