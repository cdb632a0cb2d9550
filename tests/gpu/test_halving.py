"""How a batch that asks the host is cut: two halves at first, then the way that has been faster."""

from gpu.decode.halving import Halving, cut, most_rows_of_parts


def run(halving: Halving, rows: int, seconds: dict[int, float], steps: int) -> list[int]:
    """Steps of `seconds` by number of parts; how many parts each had."""
    chosen = []
    for _ in range(steps):
        parts = halving.choose(rows)
        halving.observe(rows, parts, seconds[parts])
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


def test_the_way_that_has_been_faster_is_taken_and_the_other_tried_again_now_and_then() -> None:
    for seconds in ({1: 0.02, 2: 0.03}, {1: 0.03, 2: 0.02}):
        faster = min(seconds, key=seconds.__getitem__)
        halving = Halving()
        assert sorted(run(halving, 4, seconds, 6)) == [1, 1, 1, 2, 2, 2]
        later = run(halving, 4, seconds, 500)
        assert 3 <= sum(parts != faster for parts in later) <= 4
        assert later[-1] == faster


def test_what_was_faster_may_change_with_the_contexts() -> None:
    halving = Halving()
    assert run(halving, 4, {1: 0.02, 2: 0.03}, 120)[-1] == 1
    assert run(halving, 4, {1: 0.06, 2: 0.04}, 1200)[-1] == 2


def test_sizes_are_learnt_apart_and_a_row_is_never_halved() -> None:
    halving = Halving()
    assert run(halving, 2, {1: 0.01, 2: 0.03}, 100)[-1] == 1
    assert run(halving, 8, {1: 0.05, 2: 0.03}, 100)[-1] == 2
    assert run(halving, 1, {1: 0.01}, 3) == [1, 1, 1]


def test_it_can_be_told_to_do_it_always_or_never() -> None:
    for parts in (1, 2):
        assert run(Halving(always=parts), 4, {1: 1.0, 2: 1.0}, 20) == [parts] * 20
