"""Rows that leave a decode group take their position, their draw and their ask with them, and no other's."""

from gpu.runner import _rows_of, without_slots
from gpu.step import DecodeGroup, HostRead
from transfer.tier import ContextLostError

ASKS = [HostRead(100, 16, 32), HostRead(200, 16, 48), HostRead(100, 16, 64)]
GROUP = DecodeGroup([4, 2, 7], [40, 20, 70], [3, 1, 6], ASKS, [39, 19, 69])


def test_the_other_rows_keep_what_is_theirs() -> None:
    left = without_slots(GROUP, {2})
    assert left == DecodeGroup([4, 7], [40, 70], [3, 6], [ASKS[0], ASKS[2]], [39, 69])
    assert without_slots(GROUP, {4, 2, 7}).slots == []


def test_a_group_without_asks_has_none_after() -> None:
    on_device = DecodeGroup([4, 2], [40, 20], [3, 1])
    assert without_slots(on_device, {4}) == DecodeGroup([2], [20], [1])


def test_a_group_that_loses_nobody_is_itself() -> None:
    assert without_slots(GROUP, {1, 3}) is GROUP


def test_a_lost_context_takes_every_row_that_reads_it() -> None:
    lost = ContextLostError(100, "gone")
    assert _rows_of(GROUP, lost) == {4: str(lost), 7: str(lost)}
