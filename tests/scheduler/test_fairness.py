"""Who waits for whom: the oldest prefill gets its share, short ones wait for two units, and prefixes are worth it.

Time is simulated: a unit takes what the fake runner says, and what the cost model thinks is learnt from that.
"""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.step import PrefillUnit
from scheduler.engine.engine import Engine
from tests.scheduler.engines import PAGE, SHAPE, check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.page_runner import PageRunner
from tests.tolerances import PREFILL_SHARE

UNIT_SECONDS = 20e-6  # a token-layer
CHUNK = 256
LONG = 4000


def engine_of(share: float, **settings: int) -> tuple[Engine, PageRunner]:
    """An engine that has seen a few units, so that it knows what they take."""
    runner = PageRunner(SHAPE.num_layers, PAGE, unit_seconds=UNIT_SECONDS, decode_seconds=2e-3)
    engine, _ = make_engine(
        num_pages=3000, chunk_tokens=CHUNK, max_hidden_tokens=30_000, oldest_share=share, runner=runner, **settings
    )
    engine.submit([make_request("first", prompt_of(2000, salt=90), max_tokens=1)])
    drain(engine)
    return engine, runner


class Clients:
    """Each asks again as soon as it is answered."""

    def __init__(self, engine: Engine, count: int, num_tokens: int, max_tokens: int) -> None:
        self._engine, self._num_tokens, self._max_tokens = engine, num_tokens, max_tokens
        self._salts = itertools.count(100)
        self.ask(count)

    def ask(self, count: int) -> None:
        for salt in itertools.islice(self._salts, count):
            prompt = [salt % 50, salt // 50 % 50, *prompt_of(self._num_tokens - 2, salt)]
            self._engine.submit([make_request(f"short{salt}", prompt, max_tokens=self._max_tokens)])

    def step(self) -> set[str]:
        """A step of the engine; the names of those that ended in it."""
        ended = {delta.request_id for delta in self._engine.step() if delta.finish_reason is not None}
        self.ask(sum(name.startswith("short") for name in ended))
        return ended


def job_of(runner: PageRunner, prompt: list[int]) -> int:
    jobs = [job for plan in runner.plans for job in plan.new_jobs]
    return next(job.job_id for job in jobs if job.prompts[0].token_ids.tolist() == prompt)


def units_of(runner: PageRunner, begin: int, end: int) -> list[PrefillUnit]:
    return [unit for plan in runner.plans[begin:end] for unit in plan.units]


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    share=st.sampled_from([0.1, 1 / 3, 0.5]),
    num_clients=st.integers(2, 6),
    short_tokens=st.integers(40, 600),
    max_tokens=st.sampled_from([1, 6]),
)
def test_the_oldest_prefill_gets_its_share_of_the_time_whatever_passes_it(
    share: float, num_clients: int, short_tokens: int, max_tokens: int
) -> None:
    """From its first unit to its last, and short ones get all the rest where there are enough of them."""
    engine, runner = engine_of(share, max_running=12, max_jobs=12)
    clients = Clients(engine, num_clients, short_tokens, max_tokens)
    for _ in range(5):
        clients.step()
    long = prompt_of(LONG, salt=1)
    engine.submit([make_request("long", long, max_tokens=1)])
    before = len(runner.plans)
    while "long" not in clients.step():
        assert len(runner.plans) - before < 6000, "the long prompt starves"
    job_id = job_of(runner, long)
    units = units_of(runner, before, len(runner.plans))
    own = [i for i, unit in enumerate(units) if unit.job_id == job_id]
    while_it_ran = units[own[0] : own[-1] + 1]
    seconds = sum(runner._seconds(unit) for unit in while_it_ran)
    its_seconds = sum(runner._seconds(unit) for unit in while_it_ran if unit.job_id == job_id)
    assert its_seconds / seconds >= share - PREFILL_SHARE


def test_without_a_share_the_same_load_starves_a_long_prompt() -> None:
    """Power of the one above: 500-token prompts of four clients leave it next to nothing."""
    engine, runner = engine_of(0.0, max_running=12, max_jobs=12)
    clients = Clients(engine, 4, 500, 1)
    for _ in range(5):
        clients.step()
    long = prompt_of(LONG, salt=1)
    engine.submit([make_request("long", long, max_tokens=1)])
    before = len(runner.plans)
    for _ in range(600):
        assert "long" not in clients.step()
    job_id = job_of(runner, long)
    units = units_of(runner, before, len(runner.plans))
    own = sum(runner._seconds(unit) for unit in units if unit.job_id == job_id)
    assert own / sum(runner._seconds(unit) for unit in units) < 1 / 3 - PREFILL_SHARE


@pytest.mark.parametrize("share", [1 / 3, 0.5])
def test_two_whole_units_of_the_oldest_never_come_in_a_row_while_a_shorter_prompt_waits(share: float) -> None:
    engine, runner = engine_of(share, max_running=12, max_jobs=12)
    clients = Clients(engine, 4, 500, 1)
    long = prompt_of(LONG, salt=1)
    engine.submit([make_request("long", long, max_tokens=1)])
    before = len(runner.plans)
    shorter: list[bool] = []
    while "long" not in clients.step():
        left = {entry.job.job_id: entry.remaining() for entry in engine.scheduler._prefill.jobs}
        shorter.append(min(left.values()) < max(left.values()) > SHAPE.num_layers * 500)
    job_id = job_of(runner, long)
    wholes = [[unit.job_id for unit in plan.units if unit.end - unit.begin == CHUNK] for plan in runner.plans[before:]]
    assert sum(whole == [job_id] for whole in wholes) > 10
    for has_shorter, first, second in zip(shorter, wholes, wholes[1:], strict=False):
        assert not (has_shorter and first == second == [job_id])


def steps_until(engine: Engine, name: str) -> int:
    for step in range(3000):
        if any(delta.request_id == name for delta in engine.step()):
            return step
    raise AssertionError(f"{name} got no token")


def test_a_chat_that_shares_a_template_with_a_cold_long_prompt_does_not_wait_for_it() -> None:
    steps = []
    for num_shared in (0, PAGE):
        engine, runner = engine_of(1 / 3)
        long = prompt_of(LONG, salt=1)
        engine.submit([make_request("long", long, max_tokens=1)])
        for _ in range(3):
            engine.step()
        chat = make_request("chat", long[:num_shared] + prompt_of(40 - num_shared, salt=2), max_tokens=4)
        engine.submit([chat])
        steps.append(steps_until(engine, "chat"))
    assert steps[1] <= steps[0]
    assert runner.jobs, "the long one is still under way"
    drain(engine)


def test_a_prefix_is_waited_for_where_that_saves_more_than_is_left() -> None:
    """A question over the document that is being computed, and one over its front when most of the work is done."""
    document = prompt_of(4000, salt=1)
    for begins, shared in ((0, 4000), (3, 4000), (SHAPE.num_layers * 10, 1600)):
        engine, _ = engine_of(1 / 3)
        engine.submit([make_request("a", document, max_tokens=2)])
        for _ in range(begins):
            engine.step()
        question = make_request("b", document[:shared] + prompt_of(30, salt=2), max_tokens=4)
        engine.submit([question])
        deltas = drain(engine)["b"]
        check_output(question, deltas)
        assert deltas[0].num_cached_tokens == shared // PAGE * PAGE


def test_who_waits_for_a_prefix_counts_who_passes() -> None:
    engine, _ = engine_of(1 / 3)
    document = prompt_of(4000, salt=1)
    engine.submit([make_request("a", document, max_tokens=2), make_request("b", [*document, 1, 2], max_tokens=2)])
    engine.step()
    (waiting,) = engine.scheduler._admission.waiting
    assert waiting.num_bypassed == 0
    for salt in range(3):
        engine.submit([make_request(f"s{salt}", prompt_of(20, salt=5 + salt), max_tokens=1)])
        engine.step()
    assert waiting.num_bypassed == 3
    drain(engine)
