"""Idle contexts are evicted first when pages or host memory are short; then the youngest request is preempted."""

from scheduler.engine.engine import Engine
from scheduler.messages import EngineRequest
from tests.scheduler.engines import PAGE, SHAPE, check_output, drain, prompt_of
from tests.scheduler.host_engines import RESIDENT, ask, check_idle, make_engine
from tests.scheduler.page_runner import PageRunner


def run(engine: Engine, requests: list[EngineRequest]) -> list[str]:
    """The order in which they end."""
    engine.submit(requests)
    deltas: dict[str, list] = {}
    ended = []
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
            ended += [delta.request_id] if delta.finish_reason else []
    for request in requests:
        check_output(request, deltas[request.request_id])
    return ended


def start(engine: Engine, request: EngineRequest) -> None:
    engine.submit([request])
    while request.request_id not in {sequence.request_id for sequence in engine.scheduler.roster.running}:
        engine.step()


def leave_idle(engine: Engine, count: int) -> list[EngineRequest]:
    """Conversations that have ended, whose contexts hold a page of the device each."""
    requests = [ask(f"idle{salt}", prompt_of(300, salt=100 + salt)) for salt in range(count)]
    for request in requests:
        run(engine, [request])
    assert len(engine.scheduler.residence.contexts) == engine.scheduler.pages.num_held == count
    return requests


def cached_tokens(engine: Engine, prompt: list[int]) -> int:
    """Where a request with this prompt begins."""
    engine.submit([ask("probe", prompt, max_tokens=1)])
    return drain(engine)["probe"][0].num_cached_tokens


def num_prefills(runner: PageRunner, request: EngineRequest) -> int:
    prompts = [prompt.token_ids.tolist() for plan in runner.plans for job in plan.new_jobs for prompt in job.prompts]
    return sum(tokens[: len(request.prompt_token_ids)] == request.prompt_token_ids for tokens in prompts)


def test_idle_contexts_give_their_pages_before_a_running_request_is_preempted() -> None:
    engine, runner = make_engine(num_pages=32, dense_layers=0)
    idle = leave_idle(engine, 6)
    growing = [ask(f"r{salt}", prompt_of(20, salt=salt), max_tokens=200, profile="exact") for salt in range(2)]
    run(engine, growing)
    assert engine.stats().preemptions == 0
    begins = [cached_tokens(engine, request.prompt_token_ids) for request in idle]
    assert begins == [0, 0, 256, 256, 256, 256], "28 of 32 pages were needed: two of the six go"
    check_idle(engine, runner)


def test_an_idle_context_whose_pages_others_hold_does_not_go_in_vain() -> None:
    engine, runner = make_engine(num_pages=32, dense_layers=0)
    (parent,) = leave_idle(engine, 1)
    sibling = parent.prompt_token_ids + prompt_of(200, salt=1)
    run(engine, [ask("sibling", sibling)])
    other = prompt_of(300, salt=2)
    run(engine, [ask("other", other)])
    start(engine, ask("fork", parent.prompt_token_ids + prompt_of(150, salt=3), max_tokens=410))
    run(engine, [ask("growing", prompt_of(20), max_tokens=380, profile="exact")])
    assert engine.stats().preemptions == 0
    assert cached_tokens(engine, other) == 0
    assert cached_tokens(engine, sibling) == 464
    check_idle(engine, runner)


def test_a_prompt_that_waits_beside_a_running_request_gets_the_pages_of_idle_contexts() -> None:
    engine, runner = make_engine(num_pages=32, dense_layers=0)
    idle = leave_idle(engine, 10)
    running = ask("runs", prompt_of(20), max_tokens=100, profile="exact")
    waiting = ask("waits", prompt_of(20 * PAGE, salt=1), max_tokens=2, profile="exact")
    assert run(engine, [running, waiting]) == ["waits", "runs"]
    assert cached_tokens(engine, idle[0].prompt_token_ids) == 0
    assert cached_tokens(engine, idle[-1].prompt_token_ids) == 256
    check_idle(engine, runner)


def test_an_older_request_keeps_its_context_when_a_younger_one_outgrows_the_device() -> None:
    engine, runner = make_engine(limit_blocks=44, num_pages=200)
    older = ask("older", prompt_of(500), max_tokens=130)
    younger = ask("younger", prompt_of(RESIDENT, salt=1), max_tokens=100)
    run(engine, [older, younger])
    assert (num_prefills(runner, older), num_prefills(runner, younger)) == (1, 2)
    check_idle(engine, runner)


def test_a_prompt_under_way_keeps_the_pages_that_it_will_need() -> None:
    engine, runner = make_engine(num_pages=12, dense_layers=0, chunk_tokens=300)
    long = ask("long", prompt_of(300), max_tokens=120)
    engine.submit([long])
    for _ in range(SHAPE.num_layers - 1):
        engine.step()
    assert engine.stats().num_prefilling == 1
    assert run(engine, [ask("short", prompt_of(7 * PAGE, salt=1), max_tokens=9, profile="exact")]) == ["long", "short"]
    assert engine.stats().preemptions == 0
    check_idle(engine, runner)
