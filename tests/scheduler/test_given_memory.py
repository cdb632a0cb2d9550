"""A host that gives memory as it is asked, and refuses some: who it is short for waits, or is told to come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.kv.commitment import SPARE_BYTES
from gpu.step import StepPlan
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.messages import Delta
from scheduler.steps.scheduler import NO_MEMORY
from tests.scheduler.engines import PAGE, answer, check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.page_runner import PageRunner
from tests.scheduler.test_memory import DEPLOYMENT, plan_on


class Host:
    """Gives so many pages, or windows, and no more; `there`: were given; `least_rows`: asked for at once."""

    def __init__(self, most: int, block_rows: int = 1) -> None:
        self.most, self.least_rows, self.there, self.num_asked = most, block_rows, 0, 0

    def commit(self, begin: int, end: int) -> bool:
        assert begin == self.there, "rows come in order"
        self.num_asked += 1
        if end > self.most:
            return False
        self.there = end
        return True


class WatchedRunner(PageRunner):
    """Checks that no plan names a page or a window that is not there."""

    host: Host
    windows_host: Host | None = None

    def launch(self, plan: StepPlan):
        for write in plan.page_writes:
            assert all(page < self.host.there for page in write.page_ids)
        for window in plan.window_writes:
            assert self.windows_host is None or window.window < self.windows_host.there
        return super().launch(plan)


def make(host: Host, windows: Host | None = None, **settings) -> Engine:
    runner = WatchedRunner(4, PAGE)
    runner.host, runner.windows_host = host, windows
    num_windows = 0 if windows is None else 6
    engine, _ = make_engine(
        runner=runner, is_pipelined=False, page_memory=host, window_memory=windows, num_windows=num_windows, **settings
    )
    return engine


def assert_refused(deltas: list[Delta]) -> None:
    assert (deltas[-1].finish_reason, deltas[-1].error, deltas[-1].may_retry) == ("error", NO_MEMORY, True)
    assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_memory_comes_with_requests_and_is_used_again() -> None:
    host = Host(64)
    engine = make(host, prefix_cache=False)
    assert host.there == 0
    for salt in range(3):
        request = make_request("a", prompt_of(5 * PAGE, salt))
        answer(engine, [request])
        assert 6 <= host.there <= 8


def test_who_finds_no_memory_waits_until_another_ends() -> None:
    host = Host(10)
    engine = make(host, prefix_cache=False)
    first, second = (make_request(name, prompt_of(6 * PAGE, salt), 20) for salt, name in enumerate("ab"))
    engine.submit([first])
    engine.step()
    engine.submit([second])
    deltas = drain(engine)
    check_output(first, deltas["a"])
    check_output(second, deltas["b"])
    assert host.there <= 10


@pytest.mark.parametrize("block_rows", [1, 7])
def test_who_could_never_have_it_is_refused_and_the_next_one_is_served(block_rows: int) -> None:
    host = Host(10, block_rows)
    engine = make(host)
    large, small = make_request("large", prompt_of(11 * PAGE)), make_request("small", prompt_of(5 * PAGE, 1))
    engine.submit([large])
    engine.submit([small])
    deltas = drain(engine)
    assert_refused(deltas["large"])
    check_output(small, deltas["small"])
    host.most = 64
    engine.submit([again := make_request("again", prompt_of(11 * PAGE))])
    check_output(again, drain(engine)["again"])


def test_an_answer_that_outgrows_memory_alone_is_refused_with_what_it_has() -> None:
    engine = make(Host(4))
    engine.submit([make_request("a", prompt_of(3 * PAGE), 100)])
    deltas = drain(engine)["a"]
    assert_refused(deltas)
    assert sum(len(delta.token_ids) for delta in deltas) >= PAGE
    assert engine.scheduler.pages.num_held == 0


def test_a_known_prefix_is_kept_while_there_is_memory_and_evicted_where_it_is_refused() -> None:
    host = Host(12)
    engine = make(host)
    for salt, name in enumerate("ab"):
        engine.submit([make_request(name, prompt_of(5 * PAGE, salt), 1)])
        drain(engine)
    assert engine.scheduler.pages.num_idle == 10
    engine.submit([request := make_request("c", prompt_of(5 * PAGE, 2), 1)])
    check_output(request, drain(engine)["c"])
    assert (host.there, engine.scheduler.pages.num_idle) == (10, 10), "five of the ten are of others now"


def test_without_memory_for_a_window_a_request_waits_or_is_refused() -> None:
    engine = make(Host(64), Host(1), prefix_cache=False)
    requests = [make_request(name, prompt_of(5 * PAGE, salt)) for salt, name in enumerate("abc")]
    answer(engine, requests)
    engine = make(Host(64), Host(0))
    engine.submit([make_request("a", prompt_of(5))])
    assert_refused(drain(engine)["a"])


@given(
    most=st.integers(0, 24), block_rows=st.integers(1, 9), num_windows=st.sampled_from([None, 0]),
    sizes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=8),
)  # fmt: skip
def test_everybody_is_served_whole_or_told_to_come_again(
    most: int, block_rows: int, num_windows: int | None, sizes: list[tuple[int, int, int]]
) -> None:
    check_everybody(most, block_rows, num_windows, sizes)


def test_a_branch_keeps_its_window_where_windows_are_refused() -> None:
    check_everybody(6, 1, 3, [(16, 3, 2), (1, 2, 0), (1, 1, 0), (17, 1, 2)])


def check_everybody(most: int, block_rows: int, num_windows: int | None, sizes: list[tuple[int, int, int]]) -> None:
    host, windows = Host(most, block_rows), None if num_windows is None else Host(num_windows)
    engine = make(host, windows)
    requests = [make_request(f"r{i}", prompt_of(n, salt), m) for i, (n, m, salt) in enumerate(sizes)]
    deltas: dict[str, list[Delta]] = {}
    for request in requests:
        engine.submit([request])
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    for name, told in drain(engine).items():
        deltas.setdefault(name, []).extend(told)
    for request in requests:
        told = deltas[request.request_id]
        if told[-1].finish_reason == "error":
            assert_refused(told)
            too_little = (request.num_prompt_tokens + request.max_tokens) > most * PAGE
            assert too_little or num_windows == 0, "alone it would have fitted"
        else:
            check_output(request, told)
    assert engine.scheduler.pages.num_held == 0


def test_an_engine_on_the_cpu_lives_through_memory_that_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven pages at most: the one that wants ten is told so, and of two that want four each the second waits."""
    engine, _ = load_engine(DEPLOYMENT, plan_on("laptop"), lambda *_: None)
    pages, memory = engine.scheduler.pages, engine._runner.page_memory
    assert memory is not None
    pool = engine._runner.pool
    page_bytes = sum(arena.nbytes for arena in pool.arenas) // pool.num_pages
    monkeypatch.setattr(memory, "_available", lambda: SPARE_BYTES + (7 - pages.num_committed) * page_bytes)
    requests = [make_request(name, prompt_of(length, salt), 12) for name, length, salt in
                (("large", 150, 0), ("first", 45, 1), ("second", 45, 2))]  # fmt: skip
    engine.submit(requests)
    deltas = drain(engine)
    engine.submit([again := make_request("again", prompt_of(45, 1), 12)])
    deltas |= drain(engine)
    assert_refused(deltas["large"])
    for name in ("first", "second", again.request_id):
        assert deltas[name][-1].finish_reason == "length"
        assert sum(len(delta.token_ids) for delta in deltas[name]) == 12
    assert [delta.token_ids for delta in deltas["first"]] == [delta.token_ids for delta in deltas["again"]]
    assert pages.num_committed == 7
    engine.shutdown()
