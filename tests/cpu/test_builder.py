"""Background jobs: the most urgent first, none while decode holds the gate, and a failure ends its own job alone."""

import threading
import time
from contextlib import contextmanager

import pytest

from cpu.builder import Builder, BuildJob
from cpu.decode_step import Attend
from tests.cpu.tier_model import new_tier, tier_shape


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
                urgency, name, work(), is_wanted, lambda: self._end(name, "done"), lambda _: self._end(name, "failed")
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
    builder = Builder(1)
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

    builder.submit(BuildJob((5,), "slow", slow(), lambda: True, log.over.release, lambda _: None))
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


def test_with_a_core_of_its_own_one_thread_works_while_decode_holds_the_gate():
    builder = Builder(2, has_own_core=True)
    log = Log(builder)
    with paused(builder):
        assert not builder.is_busy
        for name in "ab":
            log.submit(name, (0,), 5)
        assert builder.is_busy
        log.wait(2)
        while builder.is_busy:
            time.sleep(0.001)
    builder.shutdown()


def test_attention_leaves_a_core_to_what_is_built_where_there_are_many():
    for threads, has_own_core in [(8, True), (4, False)]:
        builder = Builder(1, has_own_core)
        attend = Attend(None, threads, builder, None, None)
        log, may_go_on = Log(builder), threading.Event()

        def work(may_go_on=may_go_on):
            assert may_go_on.wait(20)
            yield

        assert attend.num_threads == threads
        builder.submit(BuildJob((0,), "held", work(), lambda: True, log.over.release, lambda _: None))
        assert attend.num_threads == threads - has_own_core
        may_go_on.set()
        log.wait(1)
        builder.shutdown()


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
    builder = Builder(2)
    log = Log(builder)
    for name in "abc":
        log.submit(name, (0,), 10**9)
    began = time.monotonic()
    with paused(builder):
        builder.shutdown()
    assert time.monotonic() - began < 5


def test_attention_leaves_a_core_to_launches_beside_it_where_there_are_many(monkeypatch):
    monkeypatch.setattr("cpu.tier.HostAttention", lambda **named: None)
    for threads, left in [(8, 1), (4, 0)]:
        tier = new_tier(tier_shape(), threads=threads)
        tier.leave_core(True)
        assert tier._attend.num_threads == threads - left
        tier.leave_core(False)
        assert tier._attend.num_threads == threads
        tier.shutdown()
