"""Steps with host reads are launched behind one another: the same logits, and what fails is what must, whoever is in
flight.

On the CPU a thread stands in for the device that replays a graph, and a launch ends with its step; on CUDA two steps
are in flight.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from unittest.mock import MagicMock

import pytest
import torch

from gpu.decode.answering import Answering
from gpu.in_flight import InFlight
from gpu.runner import Runner
from gpu.step import DecodeGroup, PageWrite, PrefillJob, StepPlan
from tests.gpu.reference_model import document_prompt, layer_units, prefill_prompts
from tests.gpu.test_host_read_graphs import fake_graphs
from tests.gpu.test_host_read_steps import batch_of, host_reader_of
from tests.gpu.test_host_read_steps_on_cpu_tier import ALL, twins_on_cpu_tier
from tests.gpu.twin_runners import NUM_LAYERS, Twins, check_steps
from tests.reference_tier import ReferenceAttention
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.exchange import ExchangeError
from transfer.host_tier import Answered, ContextLostError
from transfer.reading import Reading

PROMPTS = [document_prompt(length, length) for length in (300, 190, 411, 257, 130)]
SHORT = document_prompt(20, 3)
PATIENCE_S = 15
COMES_FIRST_S = 0.3  # so the device comes to its wait before the answer does
LATE = "exchange: layer 1: row 0 of 2 has stamp 3 after 20 s, wanted 4; the device is behind or has failed"


def captured_twins(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = (2, 5)) -> Twins:
    twins = Twins()
    fake_graphs(monkeypatch)
    with torch.inference_mode():
        twins.offloading.decode_steps.capture(sizes, lambda part: None)
    return twins


def launch_next(twins: Twins, slots: list[int], **changes: object) -> InFlight:
    """The next step of the runner that offloads, launched and not collected; the oracle takes none."""
    twins.offloading._last_tokens.copy_(twins.exact._last_tokens)
    step = twins.offloading.launch(replace(twins.plan(slots, []), **changes))
    for slot in slots:
        twins.sequences[slot].num_tokens += 1
    return step


def warm_up(twins: Twins, slots: list[int]) -> None:
    """As many steps in flight as there will be, so that none has to allocate or to load while its device waits."""
    for step in [launch_next(twins, slots) for _ in range(3)]:
        assert not step.collect().failures


def failing(twins: Twins, nth: int, error: Exception) -> Callable[..., Answered]:
    """The tier's `answer`, but the `nth` call's answers fail."""
    answer, calls = twins.tier.answer, []

    def answer_or_fail(parts: list) -> Answered:
        calls.append(parts)
        if len(calls) - 1 == nth:
            raise error
        return answer(parts)

    return answer_or_fail


def tokens_of(step: InFlight) -> tuple[dict[int, str], dict[int, int]]:
    """Failures, and tokens by slot: one each."""
    result = step.collect()
    tokens = {token.slot: token.token_id for token in result.tokens}
    assert len(tokens) == len(result.tokens)
    return result.failures, tokens


def test_a_late_answer_fails_its_rows_and_those_of_the_same_sequences_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that joins behind it goes on, and so does a sequence that takes a slot of a failed one."""
    twins = captured_twins(monkeypatch)
    twins.prefill(PROMPTS[:3])
    check_steps(twins, [0, 1, 2], 1)
    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "answer", failing(twins, 0, ExchangeError(LATE)))
        first = launch_next(twins, [0, 1])
        second = launch_next(twins, [0, 1, 2])
        again = launch_next(twins, [2], released_slots=[1])
    failures, tokens = tokens_of(first)
    assert failures == {0: LATE, 1: LATE}
    assert tokens == {0: -1, 1: -1}
    failures, tokens = tokens_of(second)
    assert failures == {0: LATE, 1: LATE}
    assert (tokens[0], tokens[1]) == (-1, -1)
    assert tokens[2] >= 0
    failures, tokens = tokens_of(again)
    assert failures == {}
    assert tokens[2] >= 0
    assert twins.offloading._failures == {0: LATE}
    twins.sequences[2].num_tokens -= 2  # drawn from the same tokens twice: the oracle has not moved
    check_steps(twins, [2], 3)
    twins.offloading.launch(StepPlan(released_slots=[0])).collect()
    assert twins.offloading._failures == {}


def test_a_prompt_that_took_a_failed_rows_slot_meanwhile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = captured_twins(monkeypatch)
    twins.prefill(PROMPTS[:2])
    check_steps(twins, [0, 1], 1)
    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "answer", failing(twins, 0, ExchangeError(LATE)))
        first = launch_next(twins, [0, 1])
    (prompt,) = prefill_prompts([SHORT])
    job = PrefillJob(9, [replace(prompt, slot=1)])
    pages = [PageWrite(1, 0, [twins._free.pop() for _ in range(2)])]
    plan = StepPlan(
        released_slots=[1], page_writes=pages, new_jobs=[job], units=layer_units(job, 512, NUM_LAYERS),
        decode=twins.plan([0], []).decode,
    )  # fmt: skip
    second = twins.offloading.launch(plan)
    third = twins.offloading.launch(StepPlan(decode=[DecodeGroup([1], [len(SHORT)], [1])]))
    assert sorted(tokens_of(first)[0]) == [0, 1]
    failures, tokens = tokens_of(second)
    assert list(failures) == [0]
    assert tokens[1] >= 0
    failures, tokens = tokens_of(third)
    assert failures == {}
    assert tokens[1] >= 0
    twins.offloading.shutdown()


def test_a_lost_context_fails_its_own_rows_whoever_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = captured_twins(monkeypatch)
    twins.prefill(PROMPTS[:3])
    check_steps(twins, [0, 1, 2], 1)
    attention = twins.tier.attention

    def lose(asks: list) -> object:
        if any(ask.context_id == 101 for ask in asks):
            raise ContextLostError(101, "rows cannot come")
        return attention(asks)

    first = launch_next(twins, [0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "attention", lose)
        second = launch_next(twins, [0, 1, 2])
    failures, tokens = tokens_of(first)
    assert failures == {}
    assert min(tokens.values()) >= 0
    failures, tokens = tokens_of(second)
    assert failures == {1: "rows cannot come"}
    assert {slot: token >= 0 for slot, token in tokens.items()} == {0: True, 1: False, 2: True}
    for slot in (0, 2):
        twins.sequences[slot].num_tokens -= 2
    check_steps(twins, [0, 2], 3)


def test_rows_that_are_left_of_a_step_that_asks_keep_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the one that asked fails now or has failed: its plan was beside a step in the others' buffers."""
    twins = captured_twins(monkeypatch)
    twins.prefill([PROMPTS[0], SHORT])
    check_steps(twins, [0, 1], 1)
    attention, seen = twins.tier.attention, []

    def lose(asks: list) -> object:
        seen.append([ask.context_id for ask in asks])
        if any(ask.context_id is not None for ask in asks):
            raise ContextLostError(100, "rows cannot come")
        return attention(asks)

    monkeypatch.setattr(twins.tier, "attention", lose)
    for step in [launch_next(twins, [0, 1]) for _ in range(2)]:
        failures, tokens = tokens_of(step)
        assert failures == {0: "rows cannot come"}
        assert tokens[1] >= 0
    assert seen == [[100, None], [None], [None]]
    twins.sequences[1].num_tokens -= 2
    check_steps(twins, [1], 3)
    assert len(seen) == 3
    twins.offloading.shutdown()


def test_rows_that_ask_nothing_go_on_where_the_thread_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = captured_twins(monkeypatch)
    twins.prefill([PROMPTS[0], SHORT])
    check_steps(twins, [0, 1], 1)
    twins.offloading.shutdown()
    failures, tokens = tokens_of(launch_next(twins, [0]))
    assert tokens == {0: -1}
    assert "was stopped" in failures[0]
    check_steps(twins, [1], 3)


def test_a_step_too_large_for_a_graph_goes_behind_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = captured_twins(monkeypatch, (2,))
    twins.prefill(PROMPTS[:3])
    drained: list[int] = []
    drain = Answering.drain
    monkeypatch.setattr(Answering, "drain", lambda self: (drained.append(1), drain(self))[1])
    for slots in ([0, 1], [0, 1, 2], [2], [0, 1, 2], [1, 2]):
        check_steps(twins, slots, 1)
    assert len(drained) == 2


def test_a_captured_step_waits_for_its_first_answer_after_an_eager_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed one has released the slot, and its device has gone on."""
    twins = captured_twins(monkeypatch, (2,))
    twins.prefill(PROMPTS[:3])
    check_steps(twins, [0, 1, 2], 1)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceAttention, "run", MagicMock(side_effect=ExchangeError(LATE)))
        with torch.inference_mode(), pytest.raises(ExchangeError):
            twins.offloading.decode_steps.run(batch_of(twins, [0, 1, 2]))
    slot = host_reader_of(twins).exchanges[0].slot
    assert slot.is_released
    slot.out.fill_(torch.nan)
    answer = twins.tier.answer
    monkeypatch.setattr(twins.tier, "answer", lambda parts: (time.sleep(COMES_FIRST_S), answer(parts))[1])
    check_steps(twins, [0, 1], 1)


# --- on CUDA ----------------------------------------------------------------------------------------------------------


def keep_on_the_device(runner: Runner) -> list[torch.Tensor]:
    """Logits of each step, copied in stream order: to look at them makes nobody wait."""
    kept: list[torch.Tensor] = []
    sample = type(runner._sampler).sample.__get__(runner._sampler)

    def recording(logits: torch.Tensor, slots: list[int], samples: list[int]) -> object:
        kept.append(logits.clone())
        return sample(logits, slots, samples)

    runner._sampler.sample = recording
    return kept


def step_ahead(twins: Twins, slots: list[int], num_steps: int) -> None:
    """As Twins.step, but a step is collected when the next one is launched; both runners go on from own draws."""
    before: tuple[InFlight, InFlight] | None = None
    for _ in range(num_steps):
        due = [offload for slot in slots for offload in twins._due(twins.sequences[slot])]
        plan = twins.plan(slots, due)
        step = twins.offloading.launch(plan)
        for offload in due:
            twins.sequences[offload.slot].run_end = offload.end
        for release in plan.evictions:
            twins._settle(release)
        exact = twins.exact.launch(twins.exact_plan(plan))
        if before is not None:
            collect_both(*before)
        before = step, exact
        for slot in slots:
            twins.sequences[slot].num_tokens += 1
    assert before is not None
    collect_both(*before)


def collect_both(step: InFlight, exact: InFlight) -> None:
    got, wanted = step.collect(), exact.collect()
    assert got.failures == {}
    assert [token.token_id for token in got.tokens] == [token.token_id for token in wanted.tokens]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5])
def test_on_cuda_steps_launched_ahead_equal_the_exact_profile_offloads_and_merges_included(num_rows: int) -> None:
    with twins_on_cpu_tier("cuda", Reading.WHOLE, ALL, (1, 4, 5)) as twins:
        twins.prefill([document_prompt(length, length) for length in (2600, 300, 2300, 190, 2450)[:num_rows]])
        kept = [keep_on_the_device(runner) for runner in (twins.offloading, twins.exact)]
        step_ahead(twins, list(range(num_rows)), 70)
        for got, wanted in zip(*kept, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=HOP_LOGITS_FLOAT32)
        twins.offloading.shutdown()


@pytest.mark.gpu
def test_on_cuda_the_next_step_is_launched_before_an_answer_is_given() -> None:
    twins = Twins(device="cuda", graph_batch_sizes=(2,))
    twins.prefill(PROMPTS[:2])
    check_steps(twins, [0, 1], 1)
    keep_on_the_device(twins.offloading)
    warm_up(twins, [0, 1])
    answer, both_are_launched = twins.tier.answer, Event()

    def wait_and_answer(parts: list) -> Answered:
        assert both_are_launched.wait(PATIENCE_S), "a launch waits for answers"
        return answer(parts)

    twins.tier.answer = wait_and_answer
    steps = [launch_next(twins, [0, 1]) for _ in range(2)]
    both_are_launched.set()
    for step in steps:
        failures, tokens = tokens_of(step)
        assert failures == {}
        assert min(tokens.values()) >= 0
    twins.offloading.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["late", "stopped"])
def test_on_cuda_two_steps_in_flight_fail_and_the_device_goes_on(how: str) -> None:
    """A step is answered again once the failure is known; where the thread was stopped, other rows go on."""
    twins = Twins(device="cuda", graph_batch_sizes=(1, 2, 3))
    twins.prefill([*PROMPTS[:2], SHORT])
    check_steps(twins, [0, 1, 2], 1)
    answer, both_are_launched, is_begun = twins.tier.answer, Event(), Event()

    def fail(parts: list) -> None:
        is_begun.set()
        assert both_are_launched.wait(PATIENCE_S), "a launch waits for answers"
        raise ExchangeError(LATE)

    keep_on_the_device(twins.offloading)
    warm_up(twins, [0, 1])
    warm_up(twins, [0, 1, 2])
    twins.tier.answer = fail
    first = launch_next(twins, [0, 1])
    second = launch_next(twins, [0, 1, 2])
    stopping = Thread(target=twins.offloading.shutdown)
    assert is_begun.wait(PATIENCE_S)
    if how == "stopped":
        stopping.start()
        while not twins.offloading.decode_steps._answering._is_stopped:
            time.sleep(0.01)
    both_are_launched.set()
    assert tokens_of(first) == ({0: LATE, 1: LATE}, {0: -1, 1: -1})
    failures, tokens = tokens_of(second)
    assert tokens == {0: -1, 1: -1, 2: -1}
    assert failures[0] == failures[1] == LATE
    assert {"late": "an earlier step failed", "stopped": "was stopped"}[how] in failures[2]
    twins.tier.answer = answer
    twins.offloading.launch(StepPlan(released_slots=[0, 1, 2], closed_contexts=[100, 101])).collect()
    twins._record_logits(twins.offloading)
    twins.prefill(PROMPTS[:2] if how == "late" else [SHORT, SHORT])
    check_steps(twins, [0, 1], 3)
    if how == "stopped":
        stopping.join()
    twins.offloading.shutdown()
    torch.cuda.synchronize()
