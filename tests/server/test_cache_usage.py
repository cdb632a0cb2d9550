"""What an answer's usage tells of tokens that were computed though they were there, on each route."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from server.routes.chat.chat_answers import Usage
from server.routes.messages.message_answers import MessageUsage
from server.routes.responses.response_answers import ResponseUsage
from tests.server.live_server import Running, fake_command, make_deployment, running_server

HI = [{"role": "user", "content": "Hi there, you."}]
PASSED = {"computing_is_faster": 512, "reads_paused": 0}


@pytest.fixture(scope="module")
async def passing() -> AsyncIterator[Running]:
    async with running_server(make_deployment(), fake_command(disk=1, passed_over=512, computed_again=48)) as live:
        yield live


@pytest.mark.parametrize(
    ("path", "body", "usage", "details"),
    [
        ("/v1/completions", {"prompt": "Hi there, you."}, Usage, "prompt_tokens_details"),
        ("/v1/chat/completions", {"messages": HI}, Usage, "prompt_tokens_details"),
        ("/v1/messages", {"messages": HI, "model": "reference"}, MessageUsage, ""),
        ("/v1/responses", {"input": "Hi there, you."}, ResponseUsage, "input_tokens_details"),
    ],
)
async def test_tokens_that_are_computed_though_they_are_there_are_told_with_the_reason(
    passing: Running, path: str, body: dict[str, Any], usage: Any, details: str
) -> None:
    most = {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 4}
    numbers = {"tandem_disk_tokens_passed_over_computing_is_faster_total": 512,
               "tandem_cached_tokens_computed_again_total": 48}  # fmt: skip
    before = {name: await passing.metric(name) for name in numbers}
    told = (await passing.http.post(path, json=body | most)).json()["usage"]
    msgspec.convert(told, usage)
    of_prompt = told[details] if details else told
    assert (of_prompt["passed_over_on_disk"], of_prompt["computed_again_tokens"]) == (PASSED, 48)
    assert {name: await passing.metric(name) for name in numbers} == {
        name: before[name] + number for name, number in numbers.items()
    }


async def test_a_restore_tells_them_too(passing: Running) -> None:
    said = [{"role": "user", "content": "so " * 40}]
    await passing.http.post("/v1/chat/completions", json={"messages": said, "max_tokens": 4, "session_id": "s"})
    await passing.http.post("/slots/s?action=save", json={"filename": "x"})
    done = (await passing.http.post("/slots/s?action=restore", json={"filename": "x"})).json()
    assert (done["passed_over_on_disk"], done["n_read"]) == (PASSED, 0)


async def test_where_nothing_was_passed_over_nothing_is_told(live: Running) -> None:
    told = (await live.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4})).json()["usage"]
    assert not {"passed_over_on_disk", "computed_again_tokens"} & told["prompt_tokens_details"].keys()
