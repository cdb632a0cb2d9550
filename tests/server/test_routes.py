"""Every route is behind the key and the drain, but for those that say how the server is; a new one is so by itself."""

import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server import routes as routes_package
from server.commands.api_page import write_tables
from server.routes.catalogue import find_routes
from server.routes.ollama.ollama_model_routes import REFUSED
from server.routes.page.page_routes import list_files
from server.routes.route import BODY_ERRORS
from tests.server.live_server import fake_command, make_app, make_deployment

FILES = {f"/docs/{name}" for name in ("start.js", "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")}
PAGE = {"/", *(f"/page/{name}" for name in list_files())}
OPEN = {"/health", "/live", "/version", "/metrics", "/openapi.json", "/docs"} | FILES | PAGE
GUARDED = {"/v1/documents", "/v1/documents/{document_id}", 
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model_id:path}", "/tokenize", "/detokenize",
    "/tokenizer_info", "/server_info", "/get_server_info", "/v1/loads", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items", "/v1/embeddings", "/rerank", "/v1/rerank",
    "/v2/rerank", "/v1/sessions", "/v1/sessions/{session_id:path}", "/slots", "/slots/{id_slot}",
    "/v1/saved_contexts", "/v1/saved_contexts/{filename}", "/v1/activity",
    *(f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "tags", "ps", "version", "show")),
    *(path for _, path in REFUSED),
}  # fmt: skip


def list_routes(routes: Iterable[Any]) -> list[tuple[str, str]]:
    """Return method and path of each, those of included routers too."""
    found = []
    for route in routes:
        included = getattr(route, "original_router", None)
        found += list_routes(included.routes) if included else [(method, route.path) for method in route.methods]
    return sorted(found)


def kind_of(answer: httpx.Response) -> str:
    """Return the kind of an error, in OpenAI's shape, or in Anthropic's or Ollama's where their clients ask."""
    error = answer.json()["error"]
    if answer.request.url.path.startswith("/api/"):
        return answer.json()["code"]
    return error["type"] if answer.request.url.path.startswith("/v1/messages") else error["code"]


APP = make_app(make_deployment(api_keys=["first", "second"]), fake_command())
ROUTES = list_routes(APP.routes)


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Of an application whose engine never starts."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def test_the_routes_are_those_that_are_documented() -> None:
    assert {path for _, path in ROUTES} == OPEN | GUARDED


async def test_no_route_but_the_open_ones_answers_without_a_key(subtests: pytest.Subtests) -> None:
    async with client_of(APP) as client:
        for (method, path), given in product(ROUTES, (None, "Bearer wrong", "Basic first")):
            with subtests.test(method=method, path=path, given=given):
                answer = await client.request(method, path, headers={"authorization": given} if given else {})
                assert (answer.status_code == 401) == (path not in OPEN)
                if path not in OPEN:
                    assert kind_of(answer) in ("invalid_api_key", "authentication_error")


async def test_every_route_answers_with_any_of_the_keys(subtests: pytest.Subtests) -> None:
    async with client_of(APP) as client:
        for (method, path), key in product(ROUTES, ("first", "second")):
            with subtests.test(method=method, path=path, key=key):
                answer = await client.request(method, path, headers={"authorization": f"bearer {key}"})
                assert answer.status_code not in (401, 500)


async def test_no_route_but_the_open_ones_answers_while_the_server_drains(subtests: pytest.Subtests) -> None:
    app = make_app(make_deployment(retry_after_seconds=4), fake_command())
    app.state.service.draining = True
    async with client_of(app) as client:
        for method, path in ROUTES:
            with subtests.test(method=method, path=path):
                answer = await client.request(method, path)
                if path in OPEN:
                    assert path == "/health" or answer.status_code == 200
                    continue
                assert answer.status_code == 503
                assert kind_of(answer) in ("draining", "overloaded_error")
                assert answer.headers["retry-after"] == "4"


async def test_a_draining_server_says_that_it_is_not_healthy() -> None:
    app = make_app(make_deployment(), fake_command())
    app.state.service.supervisor.state = "ready"
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        app.state.service.draining = True
        answer = await client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


async def test_a_request_is_open_as_long_as_it_runs_and_the_open_routes_never_are() -> None:
    app = make_app(make_deployment(), fake_command())
    service = app.state.service
    seen = []
    service.supervisor.ready = lambda: seen.append(service.num_open)  # then the route fails, and the count goes back
    async with client_of(app) as client:
        answer = await client.post("/tokenize", json={"prompt": "a"})
        assert answer.status_code == 500
        assert (seen, service.num_open) == ([1], 0)
        await client.get("/metrics")
        assert service.num_open == 0


async def test_a_path_that_nothing_has_is_cut_where_it_is_repeated() -> None:
    async with client_of(make_app(make_deployment(), fake_command())) as client:
        for method, path, status in (("GET", "/" + "x" * 20_000, 404), ("PUT", "/v1/models/" + "x" * 20_000, 405)):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"].startswith(path[:100])
            assert len(answer.text) < 500


ECHO = """
import msgspec

from server.bodies.fields import Fields, does
from server.routes.answer import Answer
from server.routes.route import BODY_ERRORS, Route


class EchoBody(msgspec.Struct):
    text: str
    model: str | None = None


class Echo(Answer):
    text: str


async def echo(call):
    return {"text": call.body.text}


ECHO = Fields(EchoBody, does("comes back as it was sent", "text") | does("the model", "model"))
ROUTES = (Route("post", "/echo", echo, "Repeat a text", Echo, ECHO, {"text": "Hi"}, errors=BODY_ERRORS),)
"""


async def test_a_route_in_one_file_is_served_described_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_routes.py").write_text(ECHO)
    monkeypatch.setattr(routes_package, "__path__", [*routes_package.__path__, str(tmp_path)])
    try:
        async with client_of(make_app(make_deployment(), fake_command())) as client:
            answer = await client.post("/echo", json={"text": "Hello"})
            refused = await client.post("/echo", json={"txt": "Hello"})
            document = (await client.get("/openapi.json")).json()
        page = write_tables(find_routes())
    finally:
        sys.modules.pop("server.routes.echo_routes", None)
    assert (answer.status_code, answer.json()) == (200, {"text": "Hello"})
    assert refused.json()["error"]["message"] == "txt: unknown field; the nearest known one is 'text'"
    described = document["paths"]["/echo"]["post"]
    assert described["summary"] == "Repeat a text"
    assert set(described["responses"]) == {"200", *map(str, BODY_ERRORS)}
    assert document["components"]["schemas"]["EchoBody"]["required"] == ["text"]
    assert "| `POST /echo` | Repeat a text | `EchoBody` | `Echo` | 400, " in page
    assert "| `text` | comes back as it was sent | `echo` |" in page
