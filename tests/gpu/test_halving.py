"""How a batch that asks the host is cut: in two where the host takes longer than the device reads the weights."""

from types import SimpleNamespace

import pytest

from gpu.batching.halving import Halving, cut, most_rows_of_parts, step_seconds
from gpu.step import HostRead


def halving_of(reread_share: float, always: int | None = None) -> Halving:
    """reread_share: of all that a batch reads, what halves read again."""
    return Halving(SimpleNamespace(reread_share=lambda cells, asks: reread_share), always)


def run(halving: Halving, rows: int, device_s: float, host_s: float, steps: int) -> list[int]:
    """Steps of so many seconds; how many parts each had. Two parts leave the host little to wait for."""
    chosen = []
    for _ in range(steps):
        parts = halving.choose([9] * rows, [None] * rows)
        halving.observe(rows, parts, device_s if parts == 1 else max(2 * device_s - host_s, 0.0), host_s)
        chosen.append(parts)
    return chosen


def test_a_batch_is_cut_in_the_middle_and_a_row_is_not() -> None:
    assert cut(1, 1) == [slice(0, 1)]
    assert cut(5, 1) == [slice(0, 5)]
    assert cut(2, 2) == [slice(0, 1), slice(1, 2)]
    assert cut(5, 2) == [slice(0, 3), slice(3, 5)]
    for most in (1, 2, 5, 8):
        room = most_rows_of_parts(most)
        for rows in range(1, most + 1):
            for parts in (1, 2) if rows > 1 else (1,):
                assert all(part.stop - part.start <= have for part, have in zip(cut(rows, parts), room, strict=False))


def test_two_halves_go_where_the_host_takes_longer_than_the_device() -> None:
    assert run(halving_of(1.0), 4, device_s=0.005, host_s=0.018, steps=20) == [1] + [2] * 19
    assert run(halving_of(1.0), 4, device_s=0.005, host_s=0.003, steps=20) == [1] * 20


@pytest.mark.parametrize(("reread_share", "parts"), [(0.5, 2), (0.7, 1)])
def test_halves_pay_where_the_host_takes_longer_than_weights_are_read_again(reread_share: float, parts: int) -> None:
    """Though it does not take as long as the device, most of whose time may be of contexts."""
    assert run(halving_of(reread_share), 4, device_s=0.016, host_s=0.010, steps=20)[-1] == parts


def test_a_step_waits_for_the_host_and_the_device_in_one_part_and_for_the_slower_one_in_two() -> None:
    assert step_seconds(1, 3.0, 2.0, 4.0) == 7.0
    assert step_seconds(2, 3.0, 2.0, 4.0) == 5.0
    assert step_seconds(2, 3.0, 2.0, 9.0) == 9.0


def test_longer_contexts_turn_a_whole_batch_into_halves_and_back() -> None:
    halving = halving_of(1.0)
    run(halving, 4, 0.005, 0.003, 50)
    assert run(halving, 4, 0.005, 0.018, 10)[-1] == 2
    assert run(halving, 4, 0.005, 0.003, 10)[-1] == 1


def test_a_device_that_has_got_slower_is_seen_although_halves_hide_it() -> None:
    halving = halving_of(1.0)
    assert run(halving, 4, 0.005, 0.010, 100)[-1] == 2
    assert run(halving, 4, 0.020, 0.010, 400)[-1] == 1


def test_sizes_are_learnt_apart_and_a_row_is_never_halved() -> None:
    halving = halving_of(1.0)
    assert run(halving, 2, 0.010, 0.003, 100)[-1] == 1
    assert run(halving, 8, 0.010, 0.030, 100)[-1] == 2
    assert run(halving, 1, 0.001, 0.030, 3) == [1, 1, 1]


def test_it_can_be_told_to_do_it_always_or_never() -> None:
    for parts in (1, 2):
        assert run(halving_of(1.0, parts), 4, 1.0, 1.0, 20) == [parts] * 20


def test_rows_that_read_the_same_of_a_context_go_whole() -> None:
    """The host reads it once for all of them; halves would read it twice."""
    halving = halving_of(0.1)
    run(halving, 4, 0.005, 0.018, 20)
    own, other = HostRead(1, 16, 160), HostRead(2, 16, 160)
    assert halving.choose([9] * 4, [own, other, None, None]) == 2
    assert halving.choose([9] * 4, [own, other, other, None]) == 1
