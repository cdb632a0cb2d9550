"""The thread that answers: in order, behind launches, without the interpreter; no failure leaves a device waiting.

Slots are real, and what stands in for the device is a thread or nobody.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch

from cpu import decode_step
from gpu.decode.answering import Answering, Answers, SlotRequests
from tests.cpu.tier_model import DIM, HEADS, LAYERS, Device, new_tier, tier_shape
from transfer.exchange import ExchangeError, ExchangeSlot, new_slot
from transfer.host_tier import Answered, ContextRead
from transfer.reading import Reading
from transfer.simd.memory import load_acquire_int32, store_release_int32
from transfer.simd.team import now_ns, spin_or_yield
from transfer.slot_shape import SlotShape

CPU = torch.device("cpu")
PATIENCE_S = 20
HANDOVER_S = 0.05  # of the interpreter, from a thread that would go on: much longer than a step, or a turn of the core
STEPS = 8


class FakeExchange:
    """A slot, and what the device's side is told."""

    def __init__(self, slot: ExchangeSlot | None = None) -> None:
        self.slot = slot or new_slot(2, SlotShape(HEADS, DIM, 0, "float32"), CPU)
        self.forgotten = 0

    def forget_requests(self) -> None:
        self.forgotten += 1
        self.slot.give_answer()


class FakeTier:
    """Answers when it is let; `fails`: raised instead of the answers of these steps."""

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        self.may_answer, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.fails = fails or {}
        self.stamps: list[list[int]] = []

    def answer(self, parts: list) -> Answered:
        self.begun.release()
        assert self.may_answer.acquire(timeout=PATIENCE_S)
        self.stamps.append([slot.stamp for _, slot in parts])
        error = self.fails.get(len(self.stamps) - 1)
        if error is not None:
            raise error
        for _, slot in parts:
            slot.advance(slot.rows)
            slot.give_answer()
        return Answered(1.0, float(len(self.stamps)))


class FakeAttention:
    def __init__(self) -> None:
        self.given_up = 0

    def give_up(self) -> None:
        self.given_up += 1


class Fixture:
    """Two slots, as of half batches."""

    def __init__(self, **fails: dict[int, Exception]) -> None:
        self.exchanges = [FakeExchange(), FakeExchange()]
        self.told: list[tuple[int, int, Answered, float]] = []
        self.tier = FakeTier(**fails)
        self.answering = Answering(self.exchanges, lambda *what: self.told.append(what))
        self.attentions: list[FakeAttention] = []

    def launch(self, num_parts: int) -> Answers:
        parts = [SlotRequests(exchange, FakeAttention(), 2 - place) for place, exchange in enumerate(self.exchanges)]
        self.attentions += [part.requests for part in parts[:num_parts]]
        return self.answering.hand_over(self.tier, parts[:num_parts])

    @property
    def released(self) -> list[bool]:
        return [exchange.slot.is_released for exchange in self.exchanges]


def test_a_launch_disturbs_no_step_before_it_and_stamps_are_counted_in_the_order_of_launches() -> None:
    fixture = Fixture()
    steps = [fixture.launch(parts) for parts in (1, 2, 1)]
    assert fixture.tier.begun.acquire(timeout=PATIENCE_S)
    assert [exchange.slot.stamp for exchange in fixture.exchanges] == [1, 0]
    assert [exchange.slot.rows for exchange in fixture.exchanges] == [2, 0]
    for step in steps:
        fixture.tier.may_answer.release()
        assert step.wait() is None
    assert fixture.tier.stamps == [[1], [3, 1], [5]]
    assert [told[:3] for told in fixture.told] == [
        (rows, parts, Answered(1.0, number)) for rows, parts, number in ((2, 1, 1.0), (3, 2, 2.0), (2, 1, 3.0))
    ]
    assert fixture.released == [False, False]
    fixture.answering.stop()


def test_a_failed_step_fails_those_launched_behind_it_and_none_after_that_is_known() -> None:
    """Also one that asks in a slot that the failed one did not use: its device waits there."""
    fixture = Fixture(fails={1: ExchangeError("row 0 of 2 has stamp 3 after 20 s")})
    steps = [fixture.launch(parts) for parts in (1, 1, 2)]
    for _ in range(2):
        fixture.tier.may_answer.release()
    assert steps[0].wait() is None
    assert steps[1].wait() == "row 0 of 2 has stamp 3 after 20 s"
    assert steps[2].wait() == "exchange: an earlier step failed: row 0 of 2 has stamp 3 after 20 s"
    assert len(fixture.tier.stamps) == 2
    assert fixture.released == [True, True]
    assert [attention.given_up for attention in fixture.attentions] == [0, 1, 1, 1]
    fixture.answering.recover()
    assert [exchange.forgotten for exchange in fixture.exchanges] == [1, 1]
    after = fixture.launch(2)
    fixture.tier.may_answer.release()
    assert after.wait() is None
    fixture.answering.recover()
    assert [exchange.forgotten for exchange in fixture.exchanges] == [1, 1]
    fixture.answering.stop()


def test_a_stopped_thread_leaves_no_device_waiting_and_says_so() -> None:
    fixture = Fixture()
    steps = [fixture.launch(parts) for parts in (1, 2)]
    assert fixture.tier.begun.acquire(timeout=PATIENCE_S)
    stopping = threading.Thread(target=fixture.answering.stop)
    stopping.start()
    time.sleep(0.05)
    fixture.tier.may_answer.release()
    stopping.join(PATIENCE_S)
    assert steps[0].wait() is None
    assert "was stopped" in steps[1].wait()
    fixture.answering.recover()
    late = fixture.launch(2)
    assert "was stopped" in late.wait()
    assert fixture.released == [True, True]
    assert [attention.given_up for attention in fixture.attentions] == [0, 1, 1, 1, 1]


def test_what_is_no_fault_of_the_devices_is_raised_where_the_step_is_collected() -> None:
    fixture = Fixture(fails={0: ValueError("pieces: got requests")})
    step = fixture.launch(1)
    fixture.tier.may_answer.release()
    with pytest.raises(ValueError, match="got requests"):
        step.wait()
    assert fixture.released == [True, False]
    fixture.answering.stop()


def test_a_listener_that_fails_ends_its_step_and_the_thread_goes_on() -> None:
    """Whatever raises once the answers are given, `wait` returns; the steps behind fail until that is known."""
    fixture = Fixture()

    def refuse(*what: object) -> None:
        raise ValueError("rates: got no rows")

    fixture.answering._on_answered = refuse
    steps = [fixture.launch(1) for _ in range(2)]
    fixture.tier.may_answer.release()
    with pytest.raises(ValueError, match="got no rows"):
        wait(steps[0])
    assert wait(steps[1]) == "exchange: an earlier step failed: rates: got no rows"
    fixture.answering.recover()
    fixture.answering._on_answered = lambda *what: None
    after = fixture.launch(1)
    fixture.tier.may_answer.release()
    assert wait(after) is None
    fixture.answering.stop()


def test_a_step_whose_asks_cannot_be_given_up_ends_all_the_same() -> None:
    """Those of its other part are: what they read of the host would be held for ever."""
    fixture = Fixture(fails={0: ExchangeError("row 0 of 2 has stamp 3 after 20 s")})
    step = fixture.launch(2)

    def fail() -> None:
        raise ValueError("lease: ended twice")

    fixture.attentions[0].give_up = fail
    fixture.tier.may_answer.release()
    with pytest.raises(ValueError, match="ended twice"):
        wait(step)
    assert fixture.attentions[1].given_up == 1
    fixture.answering.recover()
    after = fixture.launch(1)
    fixture.tier.may_answer.release()
    assert wait(after) is None
    fixture.answering.stop()


def wait(step: Answers) -> str | None:
    """What `wait` says; it does not wait for ever."""
    assert step._is_over.wait(PATIENCE_S), "nobody ended the step"
    return step.wait()


@contextmanager
def tier_with_a_context(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, ExchangeSlot]]:
    monkeypatch.setattr(decode_step, "HOST_REQUEST_LIMIT_S", limit_s)
    tier = new_tier(tier_shape())
    with Device(tier, 1) as device:
        device.open(1, Reading.WHOLE, 300)
        yield device, device._new_slot()
    tier.shutdown()
    assert tier.stats().bytes_held == 0


def test_a_device_that_comes_late_fails_its_step_and_leases_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_with_a_context(0.1, monkeypatch) as (device, slot):
        tier, exchange = device.tier, FakeExchange(slot)
        answering = Answering([exchange], lambda *_: None)
        steps = [
            answering.hand_over(tier, [SlotRequests(exchange, tier.attention([ContextRead(1, 300 - cut)]), 1)])
            for cut in range(2)
        ]
        assert "layer 0: row 0 of 1 has stamp 0 after 0.1 s, wanted 1" in steps[0].wait()
        assert "an earlier step failed" in steps[1].wait()
        assert slot.is_released
        assert tier._builder.gate[0] == 0
        device.close(1)
        assert tier.stats().bytes_in_use == 0
        answering.stop()


@numba.njit(nogil=True)
def run_device(flags, answered, steps, layers, gap_ns, waited_ns):
    """Ask for layer after layer of step after step, a gap before each step; what each answer took."""
    stamp = 0
    for step in range(steps):
        began_ns, looks = now_ns(), 1 << 20
        while now_ns() - began_ns < gap_ns:
            looks = spin_or_yield(looks)
        for layer in range(layers):
            stamp += 1
            asked_ns = now_ns()
            store_release_int32(flags, stamp)
            while load_acquire_int32(answered) != stamp:
                looks = spin_or_yield(looks)
            waited_ns[step, layer] = now_ns() - asked_ns


def test_a_closed_context_is_free_once_its_step_has_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_with_a_context(PATIENCE_S, monkeypatch) as (device, slot):
        tier, exchange = device.tier, FakeExchange(slot)
        answering = Answering([exchange], lambda *_: None)
        step = answering.hand_over(tier, [SlotRequests(exchange, tier.attention([ContextRead(1, 300)]), 1)])
        device.close(1)
        assert tier.stats().bytes_in_use > 0
        run_device(slot.flags.data_ptr(), slot.answered.data_ptr(), 1, LAYERS, 0, np.zeros((1, LAYERS), np.int64))
        assert step.wait() is None
        assert tier.stats().bytes_in_use == 0
        answering.stop()


@contextmanager
def burning_python() -> Iterator[None]:
    """Beside a thread that lets nobody have the interpreter before it must, and then only for a moment."""
    interval, is_over = sys.getswitchinterval(), threading.Event()

    def burn() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(1000):
                number = (number * 7 + 1) % 1_000_003

    thread = threading.Thread(target=burn)
    sys.setswitchinterval(HANDOVER_S)
    thread.start()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


def waits_beside_python(monkeypatch: pytest.MonkeyPatch, gap_s: float, answer: Callable | None = None) -> np.ndarray:
    """Seconds that a device waits for answers, `[steps, layers]`, all steps launched ahead. answer: in place of the
    tier's.
    """
    with tier_with_a_context(PATIENCE_S, monkeypatch) as (device, slot):
        tier, exchange = device.tier, FakeExchange(slot)
        answering = Answering([exchange], lambda *_: None)
        answers = SimpleNamespace(answer=answer or tier.answer)
        waited_ns = np.zeros((STEPS, LAYERS), np.int64)
        places = slot.flags.data_ptr(), slot.answered.data_ptr()
        run_device(*places, 0, LAYERS, 0, waited_ns)  # compiled
        ahead = [SlotRequests(exchange, tier.attention([ContextRead(1, 300)]), 1) for _ in range(STEPS)]
        asking = threading.Thread(target=run_device, args=(*places, STEPS, LAYERS, int(1e9 * gap_s), waited_ns))
        with burning_python():
            steps = [answering.hand_over(answers, [part]) for part in ahead]
            asking.start()
            assert [step.wait() for step in steps] == [None] * STEPS
            asking.join()
        answering.stop()
        return waited_ns / 1e9


def test_no_answer_waits_for_the_interpreter_and_a_step_begins_after_one_handover_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the device gives it that long between two steps, nobody waits; where it gives nothing, the first layer."""
    waits = waits_beside_python(monkeypatch, 2 * HANDOVER_S)
    assert np.median(waits, axis=0).max() < HANDOVER_S / 2
    waits = waits_beside_python(monkeypatch, 0.0)
    assert np.median(waits[:, 0]) < 1.7 * HANDOVER_S
    assert np.median(waits[:, 1:], axis=0).max() < HANDOVER_S / 2


def test_that_comparison_sees_a_line_of_python_between_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer_by_layer(parts: list) -> Answered:
        ((attention, slot),) = parts
        for layer in range(LAYERS):
            attention.run(layer, slot)
            if layer + 1 < LAYERS:
                slot.advance(1)
        return Answered(0.0, 0.0)

    waits = waits_beside_python(monkeypatch, 2 * HANDOVER_S, layer_by_layer)
    assert np.median(waits[:, 1:], axis=0).min() > HANDOVER_S / 2
