"""Which prefill unit runs next: the shortest remaining job's, and the oldest's after a bounded number of others."""

from itertools import pairwise

import numpy as np
import pytest

from gpu.architecture import NAMED_SHAPES
from gpu.sampling_params import SamplingParams
from gpu.step import PrefillJob, PrefillPrompt
from scheduler.config import PrefillConfig
from scheduler.cost_model import CostModel
from scheduler.prefill_queue import LEAST_UNIT_TOKENS, JobInProgress, PrefillQueue

SHAPE = NAMED_SHAPES["tiny"]
LAYERS = SHAPE.num_layers
CHUNK = 64


def make_queue(bypass_units: int = 64, chunk_tokens: int = CHUNK) -> PrefillQueue:
    config = PrefillConfig(chunk_tokens=chunk_tokens, bypass_units=bypass_units)
    return PrefillQueue(config, LAYERS, CostModel(SHAPE))


def make_job(job_id: int, *prompts: tuple[int, int]) -> JobInProgress:
    """Of prompts `(begin, tokens)`: so many tokens, the first of which are cached."""
    listed = [
        PrefillPrompt(slot, np.zeros(tokens, np.int32), begin, tokens, SamplingParams(), "exact")
        for slot, (begin, tokens) in enumerate(prompts)
    ]
    return JobInProgress(PrefillJob(job_id, listed), [])


def run_steps(queue: PrefillQueue, num_steps: int) -> list[int]:
    """The job of each unit, a shorter job than the first arriving before every step."""
    ran = []
    for step in range(num_steps):
        queue.jobs.append(make_job(1 + step, (0, CHUNK // LAYERS)))
        ran += [unit.job_id for unit in queue.next_units(None)[0]]
    return ran


def test_the_oldest_job_runs_after_as_many_units_of_shorter_ones_as_are_allowed_and_no_sooner() -> None:
    queue = make_queue(bypass_units=8)
    queue.jobs.append(make_job(0, (0, 100 * CHUNK)))
    ran = run_steps(queue, 60)
    turns = [place for place, job_id in enumerate(ran) if job_id == 0]
    assert len(turns) > 10
    assert turns == list(range(8, len(ran), 9)), "eight units of others, then one of the oldest, again and again"


def test_the_job_with_the_least_left_runs_first_though_its_prompt_is_the_longer_one() -> None:
    queue = make_queue()
    queue.jobs.append(make_job(0, (0, 2 * CHUNK)))
    for _ in range(2 * LAYERS - 1):
        queue.next_units(None)
    assert queue.jobs[0].remaining(LAYERS) == CHUNK
    queue.jobs.append(make_job(1, (0, CHUNK)))
    assert [unit.job_id for unit in queue.next_units(None)[0]] == [0]


def test_a_step_without_streams_takes_one_chunk_of_work() -> None:
    queue = make_queue()
    queue.jobs += [make_job(job_id, (0, 24)) for job_id in range(4)]
    units, finished = queue.next_units(None)
    assert sum(unit.end - unit.begin for unit in units) == CHUNK
    assert [(unit.layer, unit.begin, unit.end) for unit in units] == [(0, 0, 24), (1, 0, 24), (2, 0, 16)]
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
