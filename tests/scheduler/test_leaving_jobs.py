"""A prompt that leaves a packed prefill job, cancelled or preempted, takes nothing from the others in it."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.step import PrefillJob, PrefillPrompt
from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest
from tests.scheduler.engines import SHAPE, check_empty, check_output, make_engine, make_request, prompt_of
from tests.scheduler.page_runner import PageRunner

SHORT = 12  # tokens: three of these and more share a job, which takes several steps
LENGTHS = (40, 24, 40)  # of three in a job: beside streams a unit has 64 at first


def jobs_of(runner: PageRunner) -> list[PrefillJob]:
    return [job for plan in runner.plans for job in plan.new_jobs]


def num_starts(runner: PageRunner) -> Counter[tuple[int, ...]]:
    """How often each prompt's prefill began, by its first two tokens."""

    def name(prompt: PrefillPrompt) -> tuple[int, ...]:
        return tuple(prompt.token_ids[:2].tolist())

    return Counter(name(prompt) for job in jobs_of(runner) for prompt in job.prompts)


def unique_request(
    number: int, length: int, max_tokens: int = 4, num_prompt_logprobs: int | None = None
) -> EngineRequest:
    """Its first two tokens are no other's."""
    tokens = [number % 50, number // 50, *prompt_of(length - 2, salt=number)]
    return make_request(f"r{number}", tokens, max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs)


class Told:
    """Steps an engine and keeps what requests are told."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.deltas: dict[str, list[Delta]] = {}
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < 2000, "a request never ends"
        for delta in self.engine.step():
            self.deltas.setdefault(delta.request_id, []).append(delta)


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[EngineRequest, int, int | None]]:
    """Requests with the step at which each comes and, for some, after how many more it is cancelled."""
    return [
        (
            unique_request(
                number,
                draw(st.integers(2, 90)),
                draw(st.integers(1, 40)),
                draw(st.sampled_from([None, None, 0])),
            ),
            draw(st.integers(0, 20)),
            draw(st.none() | st.integers(1, 12)),
        )
        for number in range(draw(st.integers(2, 16)))
    ]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=loads(),
    num_pages=st.integers(9, 50),
    chunk_tokens=st.sampled_from([24, 64, 300]),
    is_pipelined=st.booleans(),
    num_windows=st.sampled_from([0, 0, 8]),
)
def test_nothing_that_is_computed_for_one_is_computed_again_when_others_leave(
    load: list[tuple[EngineRequest, int, int | None]],
    num_pages: int,
    chunk_tokens: int,
    is_pipelined: bool,
    num_windows: int,
) -> None:
    """A prefill begins once, and once more each time that its own request is preempted; the runner sees to the rows."""
    engine, runner = make_engine(
        num_pages=num_pages, chunk_tokens=chunk_tokens, is_pipelined=is_pipelined, num_windows=num_windows
    )
    told = Told(engine)
    cancelled: set[str] = set()
    while engine.has_work or told.num_steps <= 20:
        step = told.num_steps
        engine.submit([request for request, comes, _ in load if comes == step])
        for request, comes, stays in load:
            is_over = any(delta.finish_reason for delta in told.deltas.get(request.request_id, ()))
            if stays is not None and step == comes + stays and not is_over:
                cancelled.add(request.request_id)
                engine.cancel([request.request_id])
        told.step()
    starts = num_starts(runner)
    assert starts.total() - len(starts) <= engine.stats().preemptions
    for request, _, _ in load:
        if request.request_id not in cancelled:
            check_output(request, told.deltas[request.request_id])
    check_empty(engine)


def steps_to_first_token(engine: Engine, name: str, *, has_client: bool, is_packed: bool) -> int:
    """Beside a client that submits a prompt of the kind in each step, and is gone in the next one."""
    request = make_request(name, prompt_of(SHORT if is_packed else 5 * SHORT), max_tokens=1)
    engine.submit([request])
    for number in range(200):
        if has_client:
            engine.submit([unique_request(number, SHORT)])
        told = engine.step()
        if has_client:
            engine.cancel([f"r{number}"])
        if any(delta.request_id == name for delta in told):
            return number
    raise AssertionError(f"{name} got no token in 200 steps")


@pytest.mark.parametrize(("is_packed", "most_times"), [(True, 1), (False, 3)])
def test_a_client_that_submits_and_disconnects_in_each_step_starves_nobody(is_packed: bool, most_times: int) -> None:
    """A prompt of a chunk gets its token as soon as without; one of more, as soon as a third of the time allows. Alone
    it may have two chunks a step, beside others one.
    """
    alone, beside = (
        steps_to_first_token(make_engine(chunk_tokens=SHORT * 3)[0], "short", has_client=has, is_packed=is_packed)
        for has in (False, True)
    )
    num_chunks = SHAPE.num_layers * (1 if is_packed else 5) / 3
    assert beside <= most_times * max(alone, num_chunks) + 1


@pytest.mark.parametrize("num_steps", range(1, 10))
@pytest.mark.parametrize("leaving", [0, 1, 2])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_wherever_its_job_stands_the_others_of_a_cancelled_prompt_go_on(
    leaving: int, num_steps: int, logprobs: int | None
) -> None:
    """Beside a stream, so that units end within layers; also where only the cancelled one's rows were left, of the last
    layer or to be scored.
    """
    engine, runner = make_engine(chunk_tokens=sum(LENGTHS), is_pipelined=False)
    stream = unique_request(9, SHORT, max_tokens=60)
    scored = [logprobs if number == leaving else None for number in range(3)]
    requests = [
        unique_request(number, LENGTHS[number], num_prompt_logprobs=asked) for number, asked in enumerate(scored)
    ]
    told = Told(engine)
    engine.submit([stream])
    while not told.deltas:
        told.step()
    engine.submit(requests)
    for _ in range(num_steps):
        told.step()
    assert [len(job.prompts) for job in jobs_of(runner)] == [1, 3]
    engine.cancel([f"r{leaving}"])
    while engine.has_work:
        told.step()
    for request in (stream, *requests[:leaving], *requests[leaving + 1 :]):
        check_output(request, told.deltas[request.request_id])
    assert len(jobs_of(runner)) == 2
    assert any(0 < unit.end < sum(LENGTHS) for plan in runner.plans for unit in plan.units if unit.job_id == 1)
    check_empty(engine)


def test_a_preempted_prompt_gives_its_pages_and_the_others_in_its_job_keep_theirs() -> None:
    """A long answer outgrows the pages while three prompts are computed together: the youngest of these makes room."""
    engine, runner = make_engine(num_pages=7, chunk_tokens=3 * SHORT, is_pipelined=False)
    growing = unique_request(9, 14, max_tokens=60)
    engine.submit([growing])
    told = Told(engine)
    while not told.deltas:
        told.step()
    requests = [unique_request(number, 2 * SHORT // 3, max_tokens=1, num_prompt_logprobs=0) for number in range(3)]
    engine.submit(requests)
    told.step()
    assert [len(entry.sequences) for entry in engine.scheduler._prefill.jobs] == [3]
    engine.scheduler.roster.preempt_last(list(engine.scheduler.roster.holding()))
    assert [len(entry.sequences) for entry in engine.scheduler._prefill.jobs] == [2]
    while engine.has_work:
        told.step()
    for request in (growing, *requests):
        check_output(request, told.deltas[request.request_id])
    assert num_starts(runner) == {(9, 0): 1, (0, 0): 1, (1, 0): 1, (2, 0): 2}
    check_empty(engine)
