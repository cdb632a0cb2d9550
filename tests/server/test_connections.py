"""Connections: what a client may send before anybody looks at it, how long it may take, and how it may end."""

import asyncio
import json
import resource
import socket
from contextvars import Context

import httpx
import psutil
import pytest

from server.http.app import _bind, http_config, most_connections, serve
from server.http.client_connection import MOST_HEADER_BYTES, MOST_HEADERS, MOST_PIPELINED, Connection, Limits
from tests.server.live_server import Running, fake_command, make_app, make_deployment, plan_of, running_server
from tests.tolerances import CANCEL_S, DEADLINE_LATE_S, HEADER_FLOOD_BYTES

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "one two three", "temperature": 0}).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
SLOW_BODY = json.dumps(
    {"prompt": "one", "attention_profile": "slow", "max_tokens": 2000, "ignore_eos": True, "stream": True}
).encode()
MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),  # a TLS handshake
    b"nonsense\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /he alth HTTP/1.1\r\n\r\n",
    b"GET http://[::1/health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    HEAD + b"content-length: x\r\n\r\n",
    HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
]


class Wire:
    """Hold a bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, live: Running) -> "Wire":
        return cls(*await asyncio.open_connection("127.0.0.1", int(live.url.rsplit(":", 1)[1])))

    async def send(self, data: bytes) -> None:
        """Send as much as is taken: a server that refuses stops reading."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass

    async def read(self) -> bytes:
        """Return all that comes until the end."""
        parts = []
        try:
            async with asyncio.timeout(10):
                while part := await self.reader.read(65536):
                    parts.append(part)
        except ConnectionError:
            pass
        return b"".join(parts)

    async def read_error(self) -> tuple[int, dict]:
        head, _, body = (await self.read()).partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head
        assert b"x-request-id: " in head
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return int(head.split()[1]), error

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
async def wire(live):
    connection = await Wire.to(live)
    yield connection
    connection.close()


async def is_well(live: Running) -> bool:
    return (
        await live.http.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})
    ).is_success


async def test_malformed_http_is_a_400_with_an_error_object(live, caplog):
    for raw in MALFORMED:
        wire = await Wire.to(live)
        await wire.send(raw)
        status, error = await wire.read_error()
        assert (status, error["code"]) == (400, "malformed_request"), raw
        assert error["type"] == "invalid_request_error"
        wire.close()
    assert await is_well(live)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx-host: a\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHost: a\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHOST: a\r\nconnection: close\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
    ],
)
async def test_http_1_1_names_its_host_once_and_http_1_0_need_not(live, wire, head, status):
    await wire.send(head + b"\r\n")
    if status == 400:
        got, error = await wire.read_error()
        assert (got, error["code"]) == (400, "malformed_request")
        assert "Host header" in error["message"]
    else:
        assert (await wire.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_request_without_a_host_behind_another_one_is_refused_after_its_answer(live, wire):
    await wire.send(WHOLE + b"GET /health HTTP/1.1\r\n\r\n")
    answers = await wire.read()
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert b"one two three" in answers
    assert b"malformed_request" in answers[answers.index(b"HTTP/1.1 400 ") :]


async def test_headers_of_any_size_or_number_are_refused_before_they_are_kept_or_keys_looked_at(caplog):
    floods = [
        (HEAD + b"x: ", b"a"),
        (HEAD, b"x: a\r\n"),
        (HEAD + b"x", b"x"),
        (b"GET /", b"a"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a"),  # a trailer, behind headers that lack a key
    ]
    async with running_server(make_deployment(api_keys=["secret"]), fake_command()) as live:
        assert (await live.http.get("/v1/models")).status_code == 401
        before = most = psutil.Process().memory_info().rss
        for begin, more in floods:
            wire = await Wire.to(live)
            reading = asyncio.create_task(wire.read())
            await wire.send(begin)
            piece = more * (65536 // len(more))
            for _ in range(HEADER_FLOOD_BYTES // len(piece)):
                await wire.send(piece)
                most = max(most, psutil.Process().memory_info().rss)
                if reading.done():
                    break
            answer = await reading
            assert answer.startswith(b"HTTP/1.1 401 " if b"chunked" in begin else b"HTTP/1.1 431 "), answer[:80]
            wire.close()
        assert most - before < HEADER_FLOOD_BYTES / 3
    assert "Traceback" not in caplog.text


async def test_just_as_many_headers_as_are_allowed_are_served(live, wire):
    own = HEAD.count(b": ") + 1
    await wire.send(HEAD + b"x: a\r\n" * (MOST_HEADERS - own) + WHOLE.removeprefix(HEAD))
    assert b"one two three" in await wire.reader.readuntil(b"}}}")
    await wire.send(HEAD + b"x: a\r\n" * (MOST_HEADERS - own + 1) + WHOLE.removeprefix(HEAD))
    assert (await wire.read_error())[0] == 431
    other = await Wire.to(live)
    await other.send(HEAD + b"x: %b\r\n" % (b"a" * (MOST_HEADER_BYTES - 200)) + WHOLE.removeprefix(HEAD))
    assert (await other.reader.readline()).startswith(b"HTTP/1.1 200 ")
    other.close()


async def test_headers_and_bodies_have_deadlines_and_a_running_answer_has_none(caplog):
    running_body = HEAD + b"content-length: %d\r\n\r\n" % len(SLOW_BODY) + SLOW_BODY
    async with running_server(make_deployment(header_seconds=1.0, body_seconds=1.5), fake_command()) as live:

        async def sent(data: bytes) -> Wire:
            wire = await Wire.to(live)
            await wire.send(data)
            return wire

        began_s = asyncio.get_running_loop().time()
        running = await sent(running_body)
        silent = [await sent(b"") for _ in range(30)]
        stray = await sent(b"\r\n\r\n")
        half_heads = [await sent(HEAD) for _ in range(30)]
        half_bodies = [await sent(WHOLE[:-5]) for _ in range(30)]
        idle = await sent(WHOLE)
        await idle.reader.readuntil(b"}}}")
        await idle.send(b"\r\n")
        for wire in [*silent, stray, idle]:
            assert await wire.read() == b""
        for part, wires in (("headers", half_heads), ("body", half_bodies)):
            for wire in wires:
                status, error = await wire.read_error()
                assert (status, error["code"]) == (408, "request_timeout")
                assert error["message"].startswith(f"{part}: ")
        assert asyncio.get_running_loop().time() - began_s < 1.5 + DEADLINE_LATE_S
        assert (await running.reader.readline()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(max(0.0, began_s + 2.5 - asyncio.get_running_loop().time()))
        assert live.service.num_open == 1, "the running answer goes on"
        running.close()
        for wire in [*silent, stray, idle, *half_heads, *half_bodies]:
            wire.close()

        async def is_free() -> bool:
            return live.service.num_open == 0

        await live.until(is_free, CANCEL_S)
        assert await is_well(live)
    assert "Traceback" not in caplog.text


async def test_a_slow_sender_of_headers_has_the_deadline_of_all_of_them(caplog):
    async with running_server(make_deployment(header_seconds=1.0), fake_command()) as live:
        wire = await Wire.to(live)
        for number in range(25):
            await wire.send(b"x: a\r\n" if number else b"GET / HTTP/1.1\r\n")
            await asyncio.sleep(0.05)
        assert (await wire.read_error())[0] == 408
        wire.close()


async def test_one_connection_too_many_is_told_so_and_a_free_place_is_taken_again(caplog):
    async with running_server(make_deployment(max_connections=8), fake_command()) as live:
        await live.http.aclose()
        live.http = httpx.AsyncClient(base_url=live.url, timeout=20, limits=httpx.Limits(max_keepalive_connections=0))
        wires = [await Wire.to(live) for _ in range(8)]
        await asyncio.sleep(0.05)
        over = await Wire.to(live)
        status, error = await over.read_error()
        assert (status, error["code"], error["type"]) == (503, "too_many_connections", "server_error")
        assert "server.max_connections" in error["message"]
        many = [await Wire.to(live) for _ in range(100)]
        for wire in many:
            assert (await wire.read())[:13] in (b"", b"HTTP/1.1 503 ")
        for wire in [over, *many, *wires]:
            wire.close()
        await asyncio.sleep(0.1)
        assert await is_well(live)


def test_so_many_connections_fit_below_the_descriptors():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most_connections()
    assert most < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert most > 100
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft


@pytest.mark.parametrize(("asked", "allowed"), [(None, 172), (8, 8), (172, 172), (173, 172), (100_000, 172)])
def test_no_more_connections_are_allowed_than_descriptors_however_many_are_asked_for(
    asked: int | None, allowed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Limits] = []
    monkeypatch.setattr("server.http.app.connection_type", found.append)
    monkeypatch.setattr("server.http.app.resource.getrlimit", lambda _: (300, 300))
    http_config(make_app(make_deployment(max_connections=asked), fake_command()))
    assert [limits.connections for limits in found] == [allowed]
    is_cut = asked is not None and asked > allowed
    assert (f"max_connections_cut asked={asked} allowed=172" in caplog.text) == is_cut


async def test_a_client_that_closes_its_sending_half_gets_its_answer(live):
    body = {"prompt": "one two three four five", "temperature": 0, "attention_profile": "slow"}
    for stream, version in ((True, b"1.1"), (False, b"1.1"), (False, b"1.0")):
        answer = await half_close(live, json.dumps(body | {"stream": stream}).encode(), version)
        assert answer.count(b"HTTP/1.1 200 OK") == 1
        assert (b"data: [DONE]" if stream else b"one two three four five") in answer
        assert version == b"1.1" or b"100 Continue" not in answer


async def half_close(live: Running, body: bytes, version: bytes) -> bytes:
    wire = await Wire.to(live)
    await wire.send(HEAD.replace(b"1.1", version) + b"content-length: %d\r\n\r\n" % len(body) + body)
    wire.writer.write_eof()
    answer = await wire.read()
    wire.close()
    return answer


async def test_a_request_that_ends_half_way_is_told_so(live):
    for part, raw in (("headers", HEAD), ("body", WHOLE[:-5])):
        wire = await Wire.to(live)
        await wire.send(raw)
        wire.writer.write_eof()
        status, error = await wire.read_error()
        assert (status, error["message"]) == (400, f"request: the connection ended before the {part} did")
        wire.close()


async def test_a_client_that_is_gone_is_told_from_one_that_only_has_no_more_to_say(live):
    async def is_idle() -> bool:
        return await live.metric("tandem_requests_running") == 0

    async def is_busy() -> bool:
        return not await is_idle()

    for stream in (b"true", b"false"):
        wire = await Wire.to(live)
        body = SLOW_BODY.replace(b"true}", stream + b"}")
        await wire.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await live.until(is_busy)
        wire.close()
        await live.until(is_idle, CANCEL_S)


async def test_a_client_that_reads_nothing_is_let_go(caplog, monkeypatch):
    caplog.set_level("INFO", "tandem")
    pause = Connection.pause_writing  # the transport may call it outside the request's context, as uvloop's does
    monkeypatch.setattr(Connection, "pause_writing", lambda self: Context().run(pause, self))
    async with running_server(make_deployment(stall_seconds=0.3), fake_command()) as live:
        wire = await Wire.to(live)
        wire.writer.transport.pause_reading()
        body = json.dumps({"prompt": "one " * 400, "max_tokens": 12000, "ignore_eos": True, "stream": True, "n": 4})
        await wire.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body.encode())

        async def is_free() -> bool:
            return live.service.num_open == 0

        async def is_taken() -> bool:
            return live.service.num_open == 1

        await live.until(is_taken)
        await live.until(is_free, 20)
        wire.close()
        assert await is_well(live)
    assert "Traceback" not in caplog.text
    aborted = [record.message for record in caplog.records if record.message.startswith("aborted")]
    assert aborted
    assert all("why=stalled" in line and "request_id=" in line for line in aborted)


async def test_pipelined_requests_are_answered_in_order_up_to_a_number(live, wire):
    await wire.send(WHOLE * (MOST_PIPELINED + 1))
    for _ in range(MOST_PIPELINED + 1):
        assert b"one two three" in await wire.reader.readuntil(b"}}}")
    await wire.send(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n" * 5000)
    answers = await wire.read()
    assert 0 < answers.count(b"HTTP/1.1 200 OK") <= MOST_PIPELINED + 1
    assert b"HTTP/1.1 200 OK" not in answers.split(b"HTTP/1.1 400 Bad Request")[1], "the last one says why it ends"
    assert b"requests sent ahead of their answers" in answers
    assert await is_well(live)


def test_small_answers_are_sent_at_once() -> None:
    """asyncio turns Nagle's delay off for sockets whose protocol is named, and accepted ones have the listener's."""
    with _bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_port_in_use_ends_the_program_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.logs.configure", lambda level: None)  # of this process: other tests read its log
    with _bind("127.0.0.1", 0) as taken:
        deployment = make_deployment(port=taken.getsockname()[1])
        told = serve(deployment, plan_of(deployment))
    assert told.startswith(f"server: cannot listen on 127.0.0.1:{deployment.server.port}: ")
