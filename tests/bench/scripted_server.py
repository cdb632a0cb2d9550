"""Serve OpenAI-like routes as a test tells it: known delays, known tokens, known failures.

A script is a list of behaviours, taken in turn by requests as they arrive; the last one
repeats. What arrived is kept in `bodies`, the most requests open at once in `peak`, the clients' addresses in `peers`.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Behaviour:
    """How one request is answered.

    kind: ok, error, disconnect, malformed, error_object, hang, not_a_stream, no_finish or empty.
    """

    kind: str = "ok"
    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 4
    tokens_per_chunk: int = 1
    status: int = 200
    usage: bool = True
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    word: str = " word"


@dataclass
class ScriptedServer:
    script: list[Behaviour]
    tokenize: str | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    peak: int = 0
    open_now: int = 0
    peers: set[Any] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        behaviour = self.script[min(len(self.bodies), len(self.script) - 1)]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.open_now += 1
        self.peak = max(self.peak, self.open_now)
        try:
            return await self._answer(request, body, behaviour)
        finally:
            self.open_now -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], how: Behaviour) -> web.StreamResponse:
        if how.kind == "error":
            error = {"error": {"message": "scripted", "type": "server_error"}}
            return web.json_response(error, status=how.status, headers={"Retry-After": "0.05"})
        if how.kind == "not_a_stream":
            return web.json_response({"choices": []})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(how.first_s)
        if how.kind == "hang":
            await asyncio.sleep(30)
        if how.kind == "empty":
            await response.write(b"data: [DONE]\n\n")
            return response
        is_chat = "messages" in body
        for begin in range(0, how.tokens, how.tokens_per_chunk):
            if begin:
                await asyncio.sleep(how.gap_s)
            if begin >= how.tokens // 2 and how.kind in ("disconnect", "malformed", "error_object", "no_finish"):
                await self._break(request, response, how.kind)
                return response
            text = how.word * min(how.tokens_per_chunk, how.tokens - begin)
            await _send(response, {"choices": [_choice(is_chat, text, None)]})
        await _send(response, {"choices": [_choice(is_chat, "", "length")]})
        if how.usage and body.get("stream_options", {}).get("include_usage"):
            usage = {
                "prompt_tokens": how.prompt_tokens if how.prompt_tokens is not None else 100,
                "completion_tokens": how.tokens,
                "prompt_tokens_details": {"cached_tokens": how.cached_tokens},
            }
            await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, kind: str) -> None:
        if kind == "disconnect":
            request.transport.abort()
        elif kind == "malformed":
            await response.write(b'data: {"choices": [{"text": \n\n')
            await asyncio.sleep(0.2)
        elif kind == "error_object":
            await _send(response, {"error": {"message": "engine died", "type": "server_error"}})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted-model"}]})

    async def count(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": len(body["prompt"].split()), "tokens": []})


def _choice(is_chat: bool, text: str, finish: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    return choice | ({"delta": {"content": text}} if is_chat else {"text": text})


async def _send(response: web.StreamResponse, tree: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(tree)}\n\n".encode())


@contextmanager
def scripted_server(*script: Behaviour, tokenize: bool = False) -> Iterator[ScriptedServer]:
    """A server on a free port, in a thread of its own, until the block ends."""
    server = ScriptedServer(list(script))
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        app.router.add_get("/v1/models", server.models)
        if tokenize:
            app.router.add_post("/tokenize", server.count)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
