"""Steps in two lanes: side by side on a device, each with the logits that it has alone, and a fence holds one back."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from unittest.mock import MagicMock

import pytest
import torch

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.decode.answering import Answers
from gpu.in_flight import Awaited, InFlight, Timer, is_decoded
from gpu.lanes import LaneStreams, StepBuffers
from gpu.prefill.dense import Dense
from gpu.runner import Runner
from gpu.step import DecodeGroup, HostRead, Lane, PageWrite, PrefillJob, StepPlan
from tests.gpu.reference_model import document_prompt, layer_units, prefill_prompts
from tests.gpu.test_host_read_steps_on_cpu_tier import ALL, twins_on_cpu_tier
from tests.gpu.test_host_reads_ahead import (
    PATIENCE_S,
    PROMPTS,
    SHORT,
    keep_on_the_device,
    launch_next,
    tokens_of,
    warm_up,
)
from tests.gpu.twin_runners import NUM_LAYERS, Twins, check_steps
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.reading import Reading

NUM_STEPS = 24
LATE_S, LATE_CYCLES = 0.01, 20_000_000  # seconds, and cycles of the device, that take about as long
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_on_the_cpu_a_lane_is_a_name() -> None:
    lanes = LaneStreams(torch.device("cpu"))
    for lane in Lane:
        assert lanes.stream(lane) is None
        with lanes.enter(lane, is_fenced=True):
            lanes.keep([torch.zeros(1)])


def test_a_lane_is_busy_until_the_device_has_passed_what_it_was_given() -> None:
    lanes, is_passed = LaneStreams(torch.device("cpu")), [False]
    assert not lanes.is_busy(Lane.DEVICE)
    lanes._ends[Lane.DEVICE] = MagicMock(query=lambda: is_passed[0])
    assert lanes.is_busy(Lane.DEVICE)
    assert not lanes.is_busy(Lane.HOST)
    is_passed[0] = True
    assert not lanes.is_busy(Lane.DEVICE)


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_host_leaves_a_core_to_launches_while_the_other_lane_has_work(is_busy: bool) -> None:
    runner = MagicMock()
    runner._lanes.is_busy = lambda lane: is_busy and lane is Lane.DEVICE
    for lane in Lane:
        Runner.launch(runner, StepPlan(lane))
    runner._offloader.tier.leave_core.assert_called_once_with(is_busy)


def group(*asks: bool) -> list[DecodeGroup]:
    count = len(asks)
    return [DecodeGroup([0] * count, [9] * count, [1] * count, [HostRead(0, 2, 4) if one else None for one in asks])]


def test_a_lane_has_steps_buffers_behind_those_who_had_them_last() -> None:
    """Whatever a fenced plan has itself, what follows it in its lane is behind all that was launched before it."""
    buffers, over = StepBuffers(), [False] * 6

    def launch(number: int, plan: StepPlan) -> None:
        buffers.check(plan)
        buffers.note(plan, lambda: over[number])

    launch(0, StepPlan(Lane.HOST, decode=group(True, False)))
    launch(1, StepPlan(Lane.DEVICE, decode=group(False)))
    for lane, asks, words in (
        (Lane.DEVICE, True, "that read the host in lane device"),
        (Lane.HOST, False, "read the device alone in lane h"),
    ):
        with pytest.raises(AssertionError, match=words):
            buffers.check(StepPlan(lane, decode=group(asks)))
        buffers.check(StepPlan(lane, is_fenced=True, decode=group(asks)))
        buffers.check(StepPlan(lane, decode=group(not asks)))
    launch(2, StepPlan(Lane.DEVICE, is_fenced=True))  # behind 0 and 1
    launch(3, StepPlan(Lane.HOST, decode=group(True)))
    with pytest.raises(AssertionError, match="that read the host in lane device"):
        buffers.check(StepPlan(Lane.DEVICE, decode=group(True)))  # 3 was launched behind the fence
    launch(4, StepPlan(Lane.HOST, is_fenced=True))
    launch(5, StepPlan(Lane.HOST, decode=group(False)))
    with pytest.raises(AssertionError, match="read the device alone in lane device"):
        buffers.check(StepPlan(Lane.DEVICE, decode=group(False)))
    over[5] = True
    buffers.check(StepPlan(Lane.DEVICE, decode=group(False)))


def test_a_step_that_is_over_keeps_none_of_those_behind_it() -> None:
    """Rows with host reads may come once a day, and each step knows the next one."""
    twins = Twins()
    twins.prefill([PROMPTS[0], SHORT])
    for slot in range(2):
        check_steps(twins, [slot], 1)
    keep_on_the_device(twins.offloading)
    assert not launch_next(twins, [0]).collect().failures
    before = count_steps()
    for _ in range(6):
        assert not launch_next(twins, [1]).collect().failures
    assert count_steps() <= before
    assert list(twins.offloading._buffers._uses) == [False]


def count_steps() -> int:
    gc.collect()
    return sum(type(one) is InFlight for one in gc.get_objects())


def test_rows_are_computed_where_their_answers_are_in_and_the_device_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether they are drawn or not."""
    answers = Answers(MagicMock(), [])
    awaited, decode = [Awaited(answers, [0])], Timer(torch.device("cpu"))
    assert not is_decoded(awaited, decode)
    answers.end(None)
    assert is_decoded(awaited, decode)
    assert is_decoded([], None)
    monkeypatch.setattr(Timer, "is_over", False)
    assert not is_decoded(awaited, decode)


def until(condition: Callable[[], bool]) -> bool:
    patience = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > patience:
            return False
        time.sleep(1e-3)
    return True


def held_back(twins: Twins) -> Event:
    """Answers are given once this is set."""
    answer, may_answer = twins.tier.answer, Event()

    def wait_and_answer(parts: list) -> object:
        assert may_answer.wait(PATIENCE_S)
        return answer(parts)

    twins.tier.answer = wait_and_answer
    return may_answer


@pytest.mark.gpu
def test_on_cuda_what_needs_the_device_alone_goes_on_while_rows_wait_for_the_host() -> None:
    """A step and a prefill are told of while an answer is held back; a fenced step is not."""
    twins = Twins(device="cuda", graph_batch_sizes=(1, 2))
    twins.prefill([*PROMPTS[:2], SHORT])
    check_steps(twins, [0, 1], 1)
    keep_on_the_device(twins.offloading)
    job = PrefillJob(9, [replace(*prefill_prompts([SHORT]), slot=3)])
    prefill = StepPlan(new_jobs=[job], units=layer_units(job, 512, NUM_LAYERS))
    pages = [PageWrite(3, 0, [twins._free.pop() for _ in range(2)])]
    twins.offloading.launch(replace(prefill, page_writes=pages)).collect()
    for _ in range(2):  # no launch below has to allocate
        warm_up(twins, [0, 1])
        warm_up(twins, [2])
        for step in (launch_next(twins, [0, 1], lane=Lane.HOST), launch_next(twins, [2])):
            step.collect()
        twins.offloading.launch(prefill).collect()
    may_answer = held_back(twins)
    waiting = launch_next(twins, [0, 1], lane=Lane.HOST)
    for _ in range(3):
        failures, tokens = tokens_of(launch_next(twins, [2]))
        assert failures == {}
        assert tokens[2] >= 0
    assert twins.offloading.launch(prefill).collect().tokens[0].token_id >= 0
    fenced = launch_next(twins, [2], is_fenced=True)
    time.sleep(0.3)
    assert not waiting.is_over
    assert not fenced.is_over
    may_answer.set()
    assert until(lambda: waiting.is_over and fenced.is_over)
    for step in (waiting, fenced):
        assert tokens_of(step)[0] == {}
    twins.offloading.shutdown()


def test_units_attend_as_their_plan_says_that_they_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, seen, attend = Twins(), [], Dense.attend

    def watched(dense: Dense, query: PrefillQuery) -> Attended:
        seen.append(dense.limits_prefill_blocks)
        return attend(dense, query)

    monkeypatch.setattr(Dense, "attend", watched)
    for slot, limits_prefill_blocks in enumerate((True, False)):
        job = PrefillJob(slot, [replace(*prefill_prompts([SHORT]), slot=slot)])
        pages = [PageWrite(slot, 0, [twins._free.pop() for _ in range(2)])]
        units = layer_units(job, 512, NUM_LAYERS)
        twins.offloading.launch(
            StepPlan(page_writes=pages, new_jobs=[job], units=units, limits_prefill_blocks=limits_prefill_blocks)
        ).collect()
    assert seen == [True] * NUM_LAYERS + [False] * NUM_LAYERS


@pytest.mark.parametrize("device", DEVICES)
def test_steps_with_the_same_buffers_are_not_launched_side_by_side(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with host reads in both lanes would read and write each other's: the second step fills its rows while the
    first goes by them. On CUDA the first one's answer is held back.
    """
    twins = Twins(device=device, graph_batch_sizes=(1,) if device == "cuda" else ())
    twins.prefill([*PROMPTS[:2], SHORT, SHORT])
    for slot in range(4):
        check_steps(twins, [slot], 1)
    keep_on_the_device(twins.offloading)
    if device == "cuda":  # no launch below has to allocate
        for slots in ([0], [1], [2], [3]):
            warm_up(twins, slots)
            for lane in Lane:
                launch_next(twins, slots, lane=lane).collect()
    may_answer = held_back(twins) if device == "cuda" else Event()
    if device == "cpu":
        monkeypatch.setattr(Timer, "is_over", False)
    steps = [launch_next(twins, [0], lane=Lane.HOST)]
    assert tokens_of(launch_next(twins, [2], lane=Lane.DEVICE))[0] == {}
    beside = {"rows that read the host in lane device": (Lane.DEVICE, 1)}
    if device == "cpu":  # on CUDA the second one is over, and told of
        beside["rows that read the device alone in lane host"] = Lane.HOST, 3
    for words, (lane, slot) in beside.items():
        with pytest.raises(AssertionError, match=words):
            launch_next(twins, [slot], lane=lane)
    steps += [launch_next(twins, [1], lane=Lane.DEVICE, is_fenced=True)]
    steps += [launch_next(twins, [3], lane=Lane.HOST, is_fenced=True)]
    may_answer.set()
    for step in steps:
        assert tokens_of(step)[0] == {}
    twins.offloading.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["at once", "late steps", "late answers"])
def test_on_cuda_rows_in_two_lanes_have_the_logits_of_the_exact_profile(how: str) -> None:
    """Rows with host reads beside some that do not, of which one joins them behind a fence and leaves them behind one.
    Those that ask may step long after they are launched, or get answers late, so that the others step before or
    meanwhile.
    """
    with twins_on_cpu_tier("cuda", Reading.WHOLE, ALL, (1, 2, 3)) as twins:
        twins.prefill([document_prompt(length, length) for length in (2600, 2300, 90, 75)])
        for slots in ([0, 1], [2, 3]):
            check_steps(twins, slots, 2)
        assert twins.plan([2, 3], []).decode[0].host_reads == (None, None)
        kept = [keep_on_the_device(runner) for runner in (twins.offloading, twins.exact)]
        if how == "late answers":
            answer = twins.tier.answer
            twins.tier.answer = lambda parts: (time.sleep(LATE_S), answer(parts))[1]
        for number in range(NUM_STEPS):
            is_joint = number % 6 == 5
            launched = []
            for lane, slots in ((Lane.HOST, [0, 1]), (Lane.DEVICE, [2, 3])):
                if is_joint:
                    slots = [0, 1, 2] if lane is Lane.HOST else [3]
                is_fenced = number % 6 in (0, 5)  # where slot 2 comes and goes
                if how == "late steps" and lane is Lane.HOST:
                    with torch.cuda.stream(twins.offloading._lanes.stream(lane)):
                        torch.cuda._sleep(LATE_CYCLES)
                launched.append(both(twins, slots, lane=lane, is_fenced=is_fenced))
            for got, wanted in launched:
                result = got.collect()
                assert result.failures == {}
                assert [one.token_id for one in result.tokens] == [one.token_id for one in wanted.collect().tokens]
        for got, wanted in zip(*kept, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=HOP_LOGITS_FLOAT32)
        twins.offloading.shutdown()


def both(twins: Twins, slots: list[int], **changes: object) -> tuple[InFlight, InFlight]:
    """A step of both runners, which go on from their own draws; nothing more is offloaded."""
    plan = twins.plan(slots, [])
    launched = twins.offloading.launch(replace(plan, **changes)), twins.exact.launch(twins.exact_plan(plan))
    for slot in slots:
        twins.sequences[slot].num_tokens += 1
    return launched
