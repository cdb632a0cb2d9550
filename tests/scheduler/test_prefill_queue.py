"""Which prefill unit runs next: of the job with the least left a prompt, or the oldest's where its share is due."""

from collections.abc import Sequence as Many
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.model.architecture import NAMED_SHAPES
from gpu.sampling_params import SamplingParams
from gpu.step import DENSE, PrefillJob, PrefillPrompt
from scheduler.engine_config import PrefillConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.prefill.prefill_queue import LEAST_UNIT_TOKENS, PrefillQueue

SHAPE = NAMED_SHAPES["tiny"]
LAYERS = SHAPE.num_layers
CHUNK = 64


def make_queue(oldest_share: float = 1 / 3, chunk_tokens: int = CHUNK) -> PrefillQueue:
    config = PrefillConfig(chunk_tokens=chunk_tokens, oldest_share=oldest_share)
    return PrefillQueue(config, LAYERS, CostModel(SHAPE))


def make_job(job_id: int, *prompts: tuple[int, int]) -> JobInProgress:
    """Of prompts `(begin, tokens)`: so many tokens, the first of which are cached."""
    listed = [
        PrefillPrompt(slot, np.zeros(tokens, np.int32), begin, tokens, SamplingParams(), "exact")
        for slot, (begin, tokens) in enumerate(prompts)
    ]
    return JobInProgress(PrefillJob(job_id, listed), [], DENSE, 1, LAYERS)


def run_steps(queue: PrefillQueue, num_steps: int) -> list[tuple[bool, float]]:
    """Of each unit, whether it is the first job's, and what it takes; a shorter job arrives before every step."""
    costs, ran = CostModel(SHAPE), []
    for step in range(num_steps):
        queue.jobs.append(make_job(1 + step, (0, CHUNK // LAYERS)))
        entries = {entry.job.job_id: entry for entry in queue.jobs}
        for unit in queue.next_units(None)[0]:
            cost = costs.unit_seconds(unit.end - unit.begin, entries[unit.job_id].context_at(unit.end), DENSE)
            ran.append((unit.job_id == 0, cost))
    return ran


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.5])
def test_the_oldest_job_gets_its_share_of_the_time_and_never_before_it_is_due(share: float) -> None:
    queue = make_queue(oldest_share=share)
    queue.jobs.append(make_job(0, (0, 100 * CHUNK)))
    whole = CostModel(SHAPE).unit_seconds(CHUNK, 50 * CHUNK, DENSE)
    total = own = 0.0
    ran = run_steps(queue, 100)
    for is_oldest, cost in ran:
        total, own = total + cost, own + cost * is_oldest
        assert share * total - 2 * whole <= own <= share * total + 1e-12
    assert sum(is_oldest for is_oldest, _ in ran) > 5


def test_a_background_job_in_front_takes_no_share_from_the_oldest_that_is_waited_for() -> None:
    """Nor does what is owed to the oldest go to the one behind it, once it is done."""
    queue = make_queue()
    stored, waited = make_job(-1, (0, 10 * CHUNK)), make_job(0, (0, 100 * CHUNK))
    stored.is_background = True
    queue.jobs += [stored, waited]
    ran = run_steps(queue, 100)
    assert sum(is_oldest for is_oldest, _ in ran) > 5
    assert (stored.begin, stored.layer) == (0, 0)
    queue.jobs.remove(waited)
    assert not queue._is_oldest_due(queue._eligible_jobs(None, False), None)


def test_the_seconds_of_the_next_prompt_are_of_one_that_may_go_on() -> None:
    """Not of a short one whose layer is on its way, nor of any while the oldest is due."""
    queue = make_queue(oldest_share=0.5)
    queue.jobs += [make_job(0, (0, 100 * CHUNK)), make_job(1, (0, CHUNK))]
    short = queue.prompt_seconds(0, CHUNK, DENSE)
    assert queue.seconds_each() == pytest.approx(short)
    queue.is_loaded = lambda job_id, layer: job_id == 0
    assert queue.seconds_each() > 50 * short
    queue.is_loaded = lambda job_id, layer: True
    queue._owed_seconds = 10 * short
    assert queue.seconds_each() > 50 * short


def test_the_oldest_job_without_a_share_waits_for_the_others() -> None:
    queue = make_queue(oldest_share=0.0)
    queue.jobs.append(make_job(0, (0, 100 * CHUNK)))
    assert not any(is_oldest for is_oldest, _ in run_steps(queue, 60))


def test_what_the_oldest_job_was_owed_goes_with_it() -> None:
    """The next oldest begins with nothing due: a shorter job that arrives goes first."""
    queue = make_queue(oldest_share=0.5)
    queue.jobs += [make_job(0, (0, 100 * CHUNK)), make_job(1000, (0, 100 * CHUNK))]
    run_steps(queue, 2)
    queue.jobs.remove(queue.jobs[0])
    queue.jobs.append(make_job(2000, (0, CHUNK // LAYERS)))
    assert {unit.job_id for unit in queue.next_units(None)[0]} == {2000}


def test_the_job_with_the_least_left_runs_first_though_its_prompt_is_the_longer_one() -> None:
    queue = make_queue()
    queue.jobs.append(make_job(0, (0, 2 * CHUNK)))
    for _ in range(2 * LAYERS - 1):
        queue.next_units(None)
    assert queue.jobs[0].remaining() == CHUNK
    queue.jobs.append(make_job(1, (0, CHUNK)))
    assert [unit.job_id for unit in queue.next_units(None)[0]] == [0]


def test_prompts_that_share_a_job_are_passed_by_a_shorter_prompt_and_not_by_one_that_is_no_shorter() -> None:
    queue = make_queue()
    queue.jobs += [make_job(0, (0, 40), (0, 40)), make_job(1, (0, 40))]
    assert [unit.job_id for unit in queue.next_units(None)[0]] == [0]
    queue.jobs.append(make_job(2, (0, 30)))
    assert {unit.job_id for unit in queue.next_units(None)[0]} == {2}


def mean_wait(jobs: Many[JobInProgress]) -> float:
    """Return the token-layers until a prompt is done, in the mean, if jobs are computed in this order."""
    ends, waits = 0, []
    for entry in jobs:
        ends += LAYERS * entry.job.num_tokens
        waits += [ends] * len(entry.job.prompts)
    return sum(waits) / len(waits)


@given(jobs=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=2, max_size=5))
def test_no_other_order_lets_prompts_wait_less_in_the_mean(jobs: list[list[int]]) -> None:
    """Of those that are there at once, and whose oldest has no share."""
    queue = make_queue(oldest_share=0.0)
    queue.jobs += [make_job(number, *((0, tokens) for tokens in job)) for number, job in enumerate(jobs)]
    best = min(mean_wait(order) for order in permutations(queue.jobs))
    done: list[JobInProgress] = []
    while queue.jobs:
        done += queue.next_units(None)[1]
    assert mean_wait(done) == pytest.approx(best)


def test_the_seconds_of_the_next_prompt_are_a_part_of_its_job_and_of_what_is_left_of_that() -> None:
    queue = make_queue(chunk_tokens=1024)
    assert queue.seconds_each() is None
    queue.jobs += [make_job(0, (0, 400), (0, 400)), make_job(1, (0, 1000))]
    whole = queue.prompt_seconds(0, 400, DENSE)
    assert queue.seconds_each() == pytest.approx(whole)
    queue.next_units(None)
    assert queue.seconds_each() == pytest.approx((1 - 1 / LAYERS) * whole)
    del queue.jobs[0]
    assert queue.seconds_each() == pytest.approx(queue.prompt_seconds(0, 1000, DENSE))
    queue.jobs[0].is_background = True
    assert queue.seconds_each() is None, "nobody waits for it"


def test_without_streams_every_layer_is_cut_at_the_same_places() -> None:
    """The rest of a layer takes no step of its own: a whole chunk of the next one follows."""
    queue = make_queue()
    queue.jobs.append(make_job(0, (0, CHUNK + 24)))
    steps = [[(unit.layer, unit.begin, unit.end) for unit in queue.next_units(None)[0]] for _ in range(LAYERS + 1)]
    assert steps[0] == [(0, 0, CHUNK)]
    for layer, step in enumerate(steps[1:-1]):
        assert step == [(layer, CHUNK, CHUNK + 24), (layer + 1, 0, CHUNK)]
    assert steps[-1] == [(LAYERS - 1, CHUNK, CHUNK + 24)]


def test_a_step_without_streams_takes_as_many_whole_layers_of_short_jobs_as_are_no_more_than_a_chunk() -> None:
    """A third of 24 tokens would be cut in two, and launched twice."""
    queue = make_queue()
    queue.jobs += [make_job(job_id, (0, 24)) for job_id in range(4)]
    units, finished = queue.next_units(None)
    assert 2 * 24 <= CHUNK < 3 * 24
    assert [(unit.layer, unit.begin, unit.end) for unit in units] == [(0, 0, 24), (1, 0, 24)]
    assert not finished


def test_units_of_a_job_come_whole_in_order_and_end_it_once() -> None:
    queue = make_queue()
    queue.jobs.append(make_job(7, (0, 100)))
    units, finished = [], []
    while queue.jobs:
        new, done = queue.next_units(None)
        units, finished = units + new, finished + done
    assert [entry.job.job_id for entry in finished] == [7]
    for layer in range(LAYERS):
        borders = [(unit.begin, unit.end) for unit in units if unit.layer == layer]
        assert borders[0][0] == 0
        assert borders[-1][1] == 100
        assert all(end == begin for (_, end), (begin, _) in pairwise(borders))


def test_a_packed_token_attends_to_its_own_prompt_and_what_was_cached_of_it() -> None:
    entry = make_job(0, (16, 20), (0, 8), (32, 40))
    assert [entry.context_at(token) for token in (1, 4, 5, 12, 13, 20)] == [17, 20, 1, 8, 33, 40]
    with pytest.raises(AssertionError, match="past the end"):
        entry.context_at(21)


def test_at_least_one_small_unit_comes_however_little_time_there_is() -> None:
    queue = make_queue(chunk_tokens=1024)
    queue.jobs.append(make_job(0, (0, 1000)))
    units, _ = queue.next_units(-1.0)
    assert [(unit.begin, unit.end) for unit in units] == [(0, LEAST_UNIT_TOKENS)]


def test_a_step_that_nobody_waits_for_takes_chunks_for_so_long_up_to_the_end_of_a_job() -> None:
    """As without it, unit by unit, but in fewer steps; none is estimated to take longer."""
    costs = CostModel(SHAPE)
    one = costs.unit_seconds(CHUNK, 10 * CHUNK, DENSE)
    apart, together = make_queue(), make_queue()
    for queue in (apart, together):
        queue.jobs += [make_job(0, (0, 10 * CHUNK)), make_job(1, (0, 10 * CHUNK))]
    wanted = []
    while apart.jobs:
        wanted += apart.next_units(None)[0]
    made, ends = [], []
    while together.jobs:
        units, finished = together.next_units(None, 4 * one)
        assert len(finished) < 2
        spent = sum(costs.unit_seconds(unit.end - unit.begin, unit.end, DENSE) for unit in units)
        assert len(units) <= 2 or spent <= 5 * one  # the last one may have a longer past than the one before
        made += units
        ends.append(len(units))
    assert made == wanted
    assert max(ends) >= 4
    assert len(ends) < len(wanted) / 3


@pytest.mark.parametrize("share", [1 / 3, 0.5])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_the_oldest_job_gets_its_share_however_many_chunks_a_step_has(share: float, chunks: int) -> None:
    queue, costs = make_queue(oldest_share=share), CostModel(SHAPE)
    queue.jobs += [make_job(0, (0, 400 * CHUNK)), make_job(1, (0, 200 * CHUNK))]
    whole = costs.unit_seconds(CHUNK, CHUNK, DENSE)
    seconds = [0.0, 0.0]
    for _ in range(160 // chunks):
        for unit in queue.next_units(None, chunks * whole)[0]:
            seconds[unit.job_id] += costs.unit_seconds(unit.end - unit.begin, unit.end, DENSE)
    longest = costs.unit_seconds(CHUNK, 160 * CHUNK, DENSE)
    assert seconds[0] == pytest.approx(share * sum(seconds), abs=3 * longest)


def test_a_step_of_many_chunks_has_units_of_one_kind_and_waits_for_no_layer() -> None:
    queue = make_queue()
    job = make_job(0, (0, 4 * CHUNK))
    queue.jobs.append(job)
    queue.is_loaded = lambda job_id, layer: layer == 0
    units, _ = queue.next_units(None, 1e3)
    assert [unit.layer for unit in units] == [0] * 4
    bounded = make_queue()
    bounded.jobs.append(make_job(0, (0, 4 * CHUNK)))
    assert sum(unit.end - unit.begin for unit in bounded.next_units(1e-9, 1e3)[0]) <= CHUNK
