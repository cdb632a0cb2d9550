"""Background jobs: the most urgent first, none while decode holds the gate, and a failure ends its own job alone."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cpu.builder import LONG_PIECE_TOKENS, PIECE_TOKENS, Builder, BuildJob, Pace
from cpu.cores import share_cores
from cpu.decode_step import Attend
from tests.cpu.tier_model import new_tier, tier_shape

PACE = Pace(0)  # of jobs whose pieces are as they come


class Log:
    """Jobs that write down what they do, one entry a piece."""

    def __init__(self, builder):
        self.builder, self.entries = builder, []
        self.over = threading.Semaphore(0)

    def submit(self, name, urgency, pieces, is_wanted=lambda: True):
        def work():
            for number in range(pieces):
                self.entries.append((name, number))
                if pieces == 13:
                    raise RuntimeError("a bad number of pieces")
                yield

        self.builder.submit(
            BuildJob(
                urgency,
                name,
                work(),
                PACE,
                is_wanted,
                lambda: self._end(name, "done"),
                lambda _: self._end(name, "failed"),
            )
        )

    def wait(self, jobs):
        for _ in range(jobs):
            assert self.over.acquire(timeout=20)

    def _end(self, name, how):
        self.entries.append((name, how))
        self.over.release()


@contextmanager
def paused(builder):
    builder.pause()
    yield
    builder.go_on()


@pytest.fixture
def builder():
    builder = Builder(1, 0)
    yield builder
    builder.shutdown()


def test_the_most_urgent_job_goes_first_and_equals_in_order(builder):
    log = Log(builder)
    with paused(builder):
        log.submit("plug", (0, 0), 1)
        time.sleep(0.05)
        for name, urgency in [("late", (1, 5)), ("second", (0, 9)), ("third", (0, 9)), ("first", (0, 2))]:
            log.submit(name, urgency, 2)
        assert log.entries == []
    log.wait(5)
    ended = [name for name, what in log.entries if what == "done"]
    assert ended == ["plug", "first", "second", "third", "late"]


def test_a_more_urgent_job_overtakes_between_two_pieces(builder):
    log = Log(builder)
    started = threading.Event()

    def slow():
        started.set()
        for number in range(50):
            log.entries.append(("slow", number))
            time.sleep(0.002)
            yield

    builder.submit(BuildJob((5,), "slow", slow(), PACE, lambda: True, log.over.release, lambda _: None))
    assert started.wait(20)
    log.submit("urgent", (0,), 1)
    log.wait(2)
    assert log.entries.index(("urgent", "done")) < log.entries.index(("slow", 49))


def test_no_piece_begins_while_decode_holds_the_gate(builder):
    log = Log(builder)
    log.submit("long", (0,), 100_000)
    for _ in range(20):
        with paused(builder):
            time.sleep(0.003)
            before = len(log.entries)
            time.sleep(0.01)
            assert len(log.entries) <= before + 1  # on a busy machine, the one that was under way
        time.sleep(0.001)
    assert len(log.entries) > 20


@pytest.mark.parametrize("num_cores", [1, 2])
def test_with_cores_of_their_own_threads_work_while_decode_holds_the_gate(num_cores):
    builder = Builder(3, num_cores)
    log = Log(builder)
    with paused(builder):
        assert builder.num_busy_cores == 0
        for name in "ab":
            log.submit(name, (0,), 5)
        assert 0 < builder.num_busy_cores <= num_cores
        log.wait(2)
        while builder.num_busy_cores:
            time.sleep(0.001)
    builder.shutdown()


@pytest.mark.parametrize(("threads", "cores"), [(16, 2), (15, 1), (8, 1), (7, 0)])
def test_attention_leaves_cores_to_what_is_built_where_there_are_many_and_to_no_more_than_are_at_work(threads, cores):
    assert share_cores(threads).building == cores
    builder = Builder(2, cores)
    attend = Attend(None, threads, builder, None, None)
    log, may_go_on = Log(builder), threading.Event()

    def work():
        assert may_go_on.wait(20)
        yield

    assert attend.num_threads == threads
    for number in (1, 2):
        builder.submit(BuildJob((0,), "held", work(), PACE, lambda: True, log.over.release, lambda _: None))
        assert attend.num_threads == threads - min(cores, number)
    may_go_on.set()
    log.wait(2)
    builder.shutdown()


def test_a_job_counts_once_when_it_is_put_back_for_its_next_piece(monkeypatch):
    builder, counts, over = Builder(1, 1), [], threading.Event()
    push = Builder._push

    def pushed(self, job):
        push(self, job)
        counts.append(len(self._jobs) + self._num_under_way)

    monkeypatch.setattr(Builder, "_push", pushed)
    builder.submit(BuildJob((0,), "job", iter([None] * 5), PACE, lambda: True, over.set, lambda _: None))
    assert over.wait(20)
    builder.shutdown()
    assert counts == [1] * 6


def test_pieces_are_long_on_cores_of_their_own_and_short_between_two_steps():
    """A piece that a step's threads would wait for is of a millisecond; one that they do not is not cut for them."""
    seen = {}
    for num_cores in (0, 1):
        builder, pace, over = Builder(1, num_cores), Pace(0), threading.Event()

        def work(pace=pace, num_cores=num_cores):
            seen[num_cores] = pace.piece_tokens
            yield

        builder.submit(BuildJob((0,), "job", work(), pace, lambda: True, over.set, lambda _: None))
        assert over.wait(20)
        builder.shutdown()
    assert seen == {0: PIECE_TOKENS, 1: LONG_PIECE_TOKENS}


def test_pauses_of_two_half_batches_add_up(builder):
    log = Log(builder)
    builder.pause()
    with paused(builder):
        log.submit("job", (0,), 1)
    time.sleep(0.01)
    assert not log.entries
    builder.go_on()
    log.wait(1)


def test_a_job_that_raises_fails_alone(builder, caplog):
    log = Log(builder)
    log.submit("bad", (0,), 13)
    log.submit("good", (1,), 3)
    log.wait(2)
    assert ("bad", "failed") in log.entries
    assert ("good", "done") in log.entries
    assert "background_job_failed job=bad" in caplog.text


def test_a_job_that_nobody_wants_ends_without_its_turn(builder):
    log = Log(builder)
    with paused(builder):
        log.submit("plug", (0,), 1)
        time.sleep(0.05)
        log.submit("unwanted", (1,), 5, is_wanted=lambda: False)
        builder.drop_unwanted()
        assert log.entries == [("unwanted", "done")]
    log.wait(2)
    assert ("unwanted", 0) not in log.entries


def test_shutdown_does_not_wait_for_jobs_nor_for_the_gate():
    builder = Builder(2, 0)
    log = Log(builder)
    for name in "abc":
        log.submit(name, (0,), 10**9)
    began = time.monotonic()
    with paused(builder):
        builder.shutdown()
    assert time.monotonic() - began < 5


def test_attention_leaves_a_core_to_launches_beside_it_where_there_are_many(monkeypatch):
    monkeypatch.setattr("cpu.cpu_tier.HostAttention", lambda *_, **named: SimpleNamespace(most_sharing=1))
    for threads, left in [(16, 1), (8, 1), (4, 0)]:
        tier = new_tier(tier_shape(), threads=threads)
        tier.leave_core(True)
        assert tier._attend.num_threads == threads - left
        tier.leave_core(False)
        assert tier._attend.num_threads == threads
        tier.shutdown()
