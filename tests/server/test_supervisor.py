"""A submission is the engine's whole or nobody's, and everyone whose engine is lost is told so once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpu.sampling_params import SamplingParams
from scheduler.messages import Cancel, Delta, EngineRequest, Outputs, Progress, Refused, Submit, pack_tokens
from server.api_error import ApiError
from server.engine.mailbox import EngineLost, Mailbox
from server.engine.prometheus import Metrics
from server.engine.supervisor import _DIED, Supervisor
from tests.server.live_server import make_deployment, plan_of
from tests.server.test_generation import LIMITS


class Sent:
    """Stand for an engine that is told things and says nothing."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.pid = 1

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def kill(self) -> None:
        self.messages.append("killed")


def make_request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt=pack_tokens([1]), sampling=SamplingParams(), max_tokens=1, stop_token_ids=(),
        attention_profile="exact", arrival_s=0.0,
    )  # fmt: skip


FORM = "structured_outputs.grammar"


@pytest.fixture
def supervisor() -> Supervisor:
    """Return a supervisor with an engine that is ready."""
    deployment = make_deployment(retry_after_seconds=7)
    made = Supervisor(deployment, plan_of(deployment), [], Metrics(), lambda _: None)
    made.state, made.limits = "ready", LIMITS
    made._engine = Sent()
    return made


async def submit(supervisor: Supervisor, *names: str) -> tuple["asyncio.Task[None]", Mailbox, str]:
    """Submit requests, and return what waits for the answer: its task, its mailbox and its id."""
    mailbox = Mailbox()
    task = asyncio.create_task(supervisor.submit([make_request(name) for name in names], mailbox, "prompt", FORM))
    await asyncio.sleep(0)
    message = supervisor._engine.messages[-1]
    assert isinstance(message, Submit)
    return task, mailbox, message.submit_id


@pytest.mark.parametrize(
    ("code", "status", "tells"), [("queue_full", 429, "queue_full"), ("too_large", 400, "context_length_exceeded")]
)
async def test_a_refusal_is_an_error_counted_once_a_choice_and_leaves_nothing(
    supervisor: Supervisor, code: str, status: int, tells: str
) -> None:
    task, mailbox, submit_id = await submit(supervisor, "a", "b")
    supervisor._answer(submit_id, Refused(submit_id, code, "words"))
    with pytest.raises(ApiError) as refused:
        await task
    assert (refused.value.status, refused.value.code) == (status, tells)
    assert refused.value.headers.get("retry-after") == ("7" if status == 429 else None)
    assert 'tandem_requests_finished_total{reason="refused"} 2.0' in supervisor._metrics.text().decode()
    supervisor._deliver(Outputs([Delta(request_id="a", token_ids=[1])], [], None))
    assert mailbox._mail == []


async def test_an_engine_that_cannot_compile_a_grammar_is_an_error_of_the_field_that_asks_for_it(
    supervisor: Supervisor,
) -> None:
    task, _, submit_id = await submit(supervisor, "a")
    supervisor._answer(submit_id, Refused(submit_id, "grammar", "grammar: unknown special token"))
    with pytest.raises(ApiError) as refused:
        await task
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, FORM, "unsupported_grammar")
    assert refused.value.message == f"{FORM}: unknown special token"


async def test_each_submission_gets_its_own_answer_and_its_own_mail(supervisor: Supervisor) -> None:
    first, first_mail, first_id = await submit(supervisor, "a")
    second, second_mail, second_id = await submit(supervisor, "b")
    supervisor._answer(second_id, None)
    await second
    assert not first.done()
    supervisor._answer(first_id, None)
    await first
    deltas = [Delta(request_id=name, token_ids=[1]) for name in ("b", "a", "unknown")]
    progress = [Progress(request_id="b", done_tokens=1, total_tokens=2, cached_tokens=0)]
    supervisor._deliver(Outputs(deltas, progress, None))
    assert await first_mail.take() == [deltas[1]]
    assert await second_mail.take() == [deltas[0], progress[0]]


async def test_what_is_forgotten_gets_no_mail_and_the_engine_hears_of_it_where_it_must(supervisor: Supervisor) -> None:
    task, mailbox, submit_id = await submit(supervisor, "a", "b")
    supervisor._answer(submit_id, None)
    await task
    supervisor.forget(["a"], cancel=False)
    supervisor.forget(["b"], cancel=True)
    supervisor._deliver(Outputs([Delta(request_id=name, token_ids=[1]) for name in "ab"], [], None))
    assert mailbox._mail == []
    cancelled = [message for message in supervisor._engine.messages if isinstance(message, Cancel)]
    assert cancelled == [Cancel(request_ids=["b"])]


async def test_everyone_is_told_once_that_the_engine_is_lost(supervisor: Supervisor) -> None:
    accepted, mailbox, submit_id = await submit(supervisor, "a", "b")
    supervisor._answer(submit_id, None)
    await accepted
    waiting, _, _ = await submit(supervisor, "c")
    supervisor._lose_everything()
    (lost,) = await mailbox.take()
    assert isinstance(lost, EngineLost)
    assert lost.code == "engine_dead"
    async with asyncio.timeout(5):
        with pytest.raises(ApiError) as error:
            await waiting
    assert (error.value.status, error.value.code) == (503, "engine_dead")
    assert error.value.headers["retry-after"] == "7"
    with pytest.raises(ApiError, match="dead"):
        supervisor.ready()


class Lives:
    """Replay the lives of engines for `_one_run`, on a clock of its own: seconds of loading and of service, and the
    end.
    """

    def __init__(self, supervisor: Supervisor, lives: list[tuple[float, float, str]]) -> None:
        self.left = lives
        self.waits: list[float] = []
        self.now = 0.0
        self._supervisor = supervisor

    async def live(self) -> str:
        supervisor = self._supervisor
        if not self.left:
            supervisor._stopping = True
            return "stopped"
        loads_s, serves_s, end = self.left.pop(0)
        supervisor._ready_since_s, supervisor._lost = None, _DIED
        self.now += loads_s
        if end != "died while it loaded":
            supervisor._become_ready(LIMITS)
        if end == "hung":
            supervisor._lost = EngineLost("hung", "engine_hung")
        self.now += serves_s
        return end

    async def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def keep_alive(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Lives]]:
    async def keep(*lives: tuple[float, float, str]) -> Lives:
        lived = Lives(supervisor, list(lives))
        supervisor.failure = asyncio.get_running_loop().create_future()
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, "_one_run", lived.live)
            patched.setattr("server.engine.supervisor.asyncio.sleep", lived.wait)
            patched.setattr("server.engine.supervisor.time.monotonic", lambda: lived.now)
            await supervisor._keep_alive()
        return lived

    return keep


async def test_an_engine_is_started_again_after_longer_and_longer_waits(
    supervisor: Supervisor, keep_alive: Callable[..., Awaitable[Lives]]
) -> None:
    short, healthy = (1.0, 1.0, "died"), (1.0, 100.0, "died")
    lived = await keep_alive(*[short] * 4, healthy, short)
    assert lived.waits == [0.25, 0.5, 1.0, 2.0, 0.25, 0.5]
    assert "tandem_engine_restarts_total 6.0" in supervisor._metrics.text().decode()


@pytest.mark.parametrize(
    "life",
    [(100.0, 1.0, "died"), (100.0, 0.0, "died while it loaded"), (1.0, 130.0, "hung")],
    ids=["loads long and dies at once", "dies while it loads", "hangs"],
)
async def test_engines_that_give_no_service_end_the_program_however_long_they_live(
    supervisor: Supervisor, keep_alive: Callable[..., Awaitable[Lives]], life: tuple[float, float, str]
) -> None:
    lived = await keep_alive(*[life] * 8)
    assert len(lived.left) == 3
    assert supervisor.state == "failed"
    assert lived.waits == [0.25, 0.5, 1.0, 2.0]
    assert supervisor.failure is not None
    told = await supervisor.failure
    assert told == f"engine: 5 engine processes failed in a row (server.max_engine_failures); last error: {life[2]}"


async def test_a_life_that_served_begins_a_new_row_of_failures(
    supervisor: Supervisor, keep_alive: Callable[..., Awaitable[Lives]]
) -> None:
    failed, healthy = (1.0, 130.0, "hung"), (1.0, 61.0, "died")
    lived = await keep_alive(*([failed] * 4 + [healthy]) * 2)
    assert lived.left == []
    assert supervisor.state != "failed"


class Silence:
    """Look for a sign of life on a clock of its own: `events` happen at their second, and a day is the end."""

    def __init__(self, supervisor: Supervisor, events: dict[float, Callable[[], object]]) -> None:
        self.now = 0.0
        self._supervisor = supervisor
        self._events = events

    async def wait(self, seconds: float) -> None:
        self.now += seconds
        for due_s in [due_s for due_s in self._events if due_s <= self.now]:
            self._events.pop(due_s)()
            self._supervisor._has_spoken = True
        if self.now > 86_400:
            raise TimeoutError("it was never killed")


@pytest.mark.parametrize(
    ("state", "spoke_s", "killed_s"),
    [("loading", [], 600), ("loading", [250.0, 500.0], 1100), ("ready", [], 120), ("ready", [100.0], 220)],
)
async def test_an_engine_that_falls_silent_is_killed_also_while_it_loads(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, state: str, spoke_s: list[float], killed_s: int
) -> None:
    supervisor.state = state
    silence = Silence(supervisor, {due_s: lambda: None for due_s in spoke_s})
    monkeypatch.setattr("server.engine.supervisor.asyncio.sleep", silence.wait)
    engine = Sent()
    await supervisor._end_silence(engine)
    assert engine.messages == ["killed"]
    assert silence.now == killed_s
    assert supervisor._lost.code == "engine_hung"
    assert "no sign of life for " in supervisor._lost.message


async def test_silence_while_loading_is_forgotten_when_the_engine_is_ready(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def become_ready() -> None:
        supervisor._become_ready(LIMITS)
        assert not supervisor.is_hung

    supervisor.state = "loading"
    silence = Silence(supervisor, {400.0: become_ready})
    monkeypatch.setattr("server.engine.supervisor.asyncio.sleep", silence.wait)
    await supervisor._end_silence(Sent())
    assert silence.now == 400 + 120
