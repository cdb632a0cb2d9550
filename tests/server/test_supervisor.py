"""A submission is the engine's whole or nobody's, and everyone whose engine is lost is told so once."""

import asyncio
from typing import Any

import pytest

from gpu.sampling_params import SamplingParams
from scheduler.messages import Cancel, Delta, EngineRequest, Outputs, Progress, Refused, Submit, pack_tokens
from server.api_error import ApiError
from server.mailbox import EngineLost, Mailbox
from server.metrics import Metrics
from server.supervisor import Supervisor
from tests.server.live_server import make_deployment
from tests.server.test_generation import LIMITS


class Sent:
    """An engine that is told things and says nothing."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def make_request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt=pack_tokens([1]), sampling=SamplingParams(), max_tokens=1, stop_token_ids=[],
        attention_profile="exact", arrival_s=0.0,
    )  # fmt: skip


@pytest.fixture
def supervisor() -> Supervisor:
    """With an engine that is ready."""
    made = Supervisor(make_deployment(retry_after_seconds=7), [], Metrics(), lambda _: None)
    made.state, made.limits = "ready", LIMITS
    made._engine = Sent()  # type: ignore[assignment]
    return made


async def submit(supervisor: Supervisor, *names: str) -> tuple["asyncio.Task[None]", Mailbox, str]:
    """A submission that waits for its answer: its task, its mailbox and its id."""
    mailbox = Mailbox()
    task = asyncio.create_task(supervisor.submit([make_request(name) for name in names], mailbox, "prompt"))
    await asyncio.sleep(0)
    message = supervisor._engine.messages[-1]  # type: ignore[union-attr]
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
    cancelled = [message for message in supervisor._engine.messages if isinstance(message, Cancel)]  # type: ignore[union-attr]
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


async def test_an_engine_is_started_again_after_longer_and_longer_waits(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives, waits = [1.0] * 4 + [100.0] + [1.0], []  # seconds; the fifth was a healthy one

    async def live() -> str:
        nonlocal now
        if not lives:
            supervisor._stopping = True
            return "stopped"
        now += lives.pop(0)
        return "ended"

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    now = 0.0
    monkeypatch.setattr(supervisor, "_one_life", live)
    monkeypatch.setattr("server.supervisor.asyncio.sleep", wait)
    monkeypatch.setattr("server.supervisor.time.monotonic", lambda: now)
    await supervisor._keep_alive()
    assert waits == [0.25, 0.5, 1.0, 2.0, 0.25, 0.5]
    assert "tandem_engine_restarts_total 6.0" in supervisor._metrics.text().decode()
