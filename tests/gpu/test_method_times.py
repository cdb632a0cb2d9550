"""`resident: auto`: contexts on the device are read by an index in the steps where measured times say it is faster."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import method_times
from gpu.method_times import fill_pages, learn_times, time_steps
from gpu.methods.indexed import device
from gpu.methods.indexed.crossovers import PAYS, find_crossover, identify, pays, read_crossovers
from gpu.methods.method import Where
from tests.gpu.method_counts import counts_of
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_indexed_serving import ALL, PROMPT, IndexedTwins
from tests.gpu.twin_runners import check_steps
from transfer.measured import measured_path, read_measured

AUTO = ALL | {"resident": "auto"}
seconds = st.floats(1e-6, 1e-2)


@given(st.integers(1, 5000), st.integers(1, 100_000), st.tuples(*[seconds] * 4))
def test_an_index_pays_from_where_two_lines_cross(first: int, more: int, times: tuple[float, ...]) -> None:
    lengths, (full, full_more, own, own_more) = (first, first + more), times
    least = find_crossover(lengths, [(full, own), (full + full_more, own + own_more)])

    def gain(tokens: float) -> float:
        share = (tokens - first) / more
        return full + share * full_more - PAYS * (own + share * own_more)

    if least is None:
        assert gain(lengths[1]) < 0
        return
    assert first <= least <= lengths[1]
    assert gain(least + 1) >= -1e-9 or gain(lengths[1]) < gain(least)
    assert least == first or gain(least - 1) < 1e-9


def test_a_step_goes_by_the_largest_measured_one_that_has_no_more_rows() -> None:
    crossovers = {1: None, 4: 50_000, 8: 0}
    assert [pays(crossovers, rows, 60_000 * rows) for rows in (1, 3, 4, 6, 8)] == [False, False, True, True, True]
    assert not pays(crossovers, 4, 199_999)
    assert pays(crossovers, 4, 200_000)
    assert not pays({}, 4, 10**9)
    assert not pays(crossovers, 0, 0)


def test_steps_change_between_rows_and_index_and_each_is_exact_with_a_budget_of_everything() -> None:
    """Steps check their coverage. One row is read in full, two by index; then one that goes to host memory is there."""
    twins = IndexedTwins(AUTO, ringed=(0, 1), kept_tokens=1024)
    twins.prefill([PROMPT, document_prompt(280, 3)])
    side = twins.side

    def read(slots: Sequence[int], steps: int = 2) -> int:
        before = counts_of(side).offloaded_tokens
        check_steps(twins, list(slots), steps)
        return counts_of(side).offloaded_tokens - before

    assert read([0, 1]) == 0, "nothing was measured"
    side._crossovers = {1: None, 2: 250}
    assert read([0, 1]) > 0
    assert read([0]) == 0
    assert int(side.upkeep.in_pages[0]) > 0, "a step without the method leaves it be"
    assert read([0, 1]) > 0, "the index goes on where it was"
    side._crossovers = {1: None, 2: None}
    twins.evict(twins.sequences[1], 208)
    both = read([0, 1])
    assert int(side.upkeep.in_pages[0]) == 0 < both
    assert read([1]) == both, "the row beside it was read in full"


def test_times_are_of_whole_steps_in_full_and_by_index_and_nothing_is_left_behind() -> None:
    twins = IndexedTwins(AUTO, ringed=())
    taken: list[tuple[bool, int]] = []
    run = twins.offloading.decode_steps.run
    twins.offloading.decode_steps.run = lambda batch: taken.append((batch.reuses, len(batch))) or run(batch)  # type: ignore[method-assign,func-returns-value]
    fill_pages(twins.offloading)
    full, own = time_steps(twins.offloading, twins.part, twins.side, 2, 300)
    assert min(full, own) > 0
    num_each = len(taken) // 2
    assert taken == [(False, 2)] * num_each + [(True, 2)] * num_each
    twins.side.forget_counts()
    assert counts_of(twins.side).offloaded_tokens == 0
    assert twins.side.forced is None
    assert twins.side.held == {}
    twins.assign(0, 0)
    twins.prefill([PROMPT])
    twins.side._crossovers = {1: 0}
    check_steps(twins, [0], 2)
    assert counts_of(twins.side).offloaded_tokens > 0


def test_what_is_measured_is_kept_for_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    twins = IndexedTwins(AUTO, ringed=())
    monkeypatch.setattr(
        method_times, "time_steps", lambda runner, part, side, rows, tokens: (1e-8 * rows * tokens, 1e-4)
    )
    monkeypatch.setattr(device, "SPLIT_TOKENS", 32)
    side = twins.side
    side.num_rings = 64
    runner, parts = twins.offloading, {twins.part.id: twins.part}
    learn_times(runner, parts, (1, 2, 5, 64), "float32")
    where = Where("none", "float32", 2, runner.architecture)
    found = read_crossovers(read_measured(measured_path()), identify(where, side.settings))
    assert found == side._crossovers == {1: None, 2: None, 5: None}, "of rows as there may be, at 1,024 tokens"
    monkeypatch.setattr(
        method_times, "time_steps", lambda runner, part, side, rows, tokens: (1e-6 * rows * tokens, 1e-3)
    )
    learn_times(runner, parts, (1, 2, 5, 64), "float32")
    found = read_crossovers(read_measured(measured_path()), identify(where, side.settings))
    assert found == side._crossovers == {1: None, 2: 525, 5: 256}
    assert read_crossovers(read_measured(measured_path()), {"gpu": "another"}) is None
    assert twins.part.method.tell_measured(side.settings, None, []) is not None
    assert twins.part.method.tell_measured(side.settings.model_copy(update={"resident": "full"}), where, []) is None
