"""Clients that nobody wants, for so many seconds: `python -m tests.end_to_end.hostile_clients URL SECONDS`.

Each kind goes on until time is up, a little slower than it could, so that those beside it can be served at all by the
same two cores. Prints as JSON how often each kind struck. They know HTTP and nothing of the server.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

HEAD = b"POST /v1/%b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
PROSE = "It was the best of times, it was the worst of times. "
PAUSE_S = 0.2
MANY_ITEMS = [  # path, and a list: how it begins, an item, how many of them, how it ends
    (b"chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [', b"{}", 5_200_000, b"]}"),
    (b"chat/completions", b'{"messages": [', b'{"role":"","content":""}', 600_000, b"]}"),
    (b"chat/completions", b'{"messages": [', b'{"role":"user","content":"a"}', 16_000, b"]}"),
    (
        b"chat/completions",
        b'{"messages": [{"role": "user", "content": [',
        b'{"type":"text","text":""}',
        500_000,
        b"]}]}",
    ),
    (b"completions", b'{"prompt": [', b"1.0", 1_300_000, b"]}"),
    (b"completions", b'{"prompt": [', b"1", 7_800_000, b"]}"),
    (b"completions", b'{"prompt": [', b"[]", 5_200_000, b"]}"),
    (b"completions", b'{"prompt": "a", "logit_bias": {', b'"70": 1', 1_200_000, b"}}"),
]
READ_S = 20.0
LINGER_S = 6.0  # after the last strike: longer than the server's deadlines for heads, bodies and who does not read


class Wire:
    """A bare connection; what the server does to it is no error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        try:
            for part in parts:
                self.writer.write(part)
                await asyncio.wait_for(self.writer.drain(), READ_S)
        except (ConnectionError, TimeoutError):
            pass

    async def read(self, most_bytes: int) -> bytes:
        got = b""
        try:
            async with asyncio.timeout(READ_S):
                while len(got) < most_bytes and (part := await self.reader.read(65536)):
                    got += part
        except (ConnectionError, TimeoutError):
            pass
        return got


class Attack:
    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)

    async def with_wire(self, use: Callable[[Wire], Awaitable[None]]) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except ConnectionError:
            return
        try:
            await use(Wire(reader, writer))
        finally:
            writer.close()

    async def flood_headers(self, wire: Wire) -> None:
        piece = random.choice([b"x: a\r\n" * 1000, b"a" * 8192])
        await wire.send(HEAD % b"completions" + b"x: ", *[piece] * 200)
        await wire.read(65536)

    async def idle(self, wire: Wire) -> None:
        await wire.read(1)

    async def half_headers(self, wire: Wire) -> None:
        await wire.send(HEAD % b"completions")
        await wire.read(65536)

    async def half_body(self, wire: Wire) -> None:
        await wire.send(HEAD % b"completions" + b"content-length: 100000\r\n\r\n" + b'{"prompt": "' + b"a" * 50_000)
        await wire.read(65536)

    async def malformed(self, wire: Wire) -> None:
        await wire.send(random.randbytes(500) + b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n")
        await wire.read(65536)

    async def pipeline(self, wire: Wire) -> None:
        await wire.send(*[b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 500] * 20)
        await wire.read(1 << 20)

    async def bad_json(self, wire: Wire) -> None:
        body = random.choice([b"[" * 200_000, b'{"prompt": "\\ud800"}', b'{"a":' * 50_000, b'{"prompt": NaN}'])
        await self.post(wire, b"completions", body)
        await wire.read(65536)

    async def long_text(self, wire: Wire) -> None:
        text = PROSE * random.choice([5_000, 20_000, 40_000])
        if random.random() < 0.5:
            await self.post(wire, b"completions", json.dumps({"prompt": text}).encode())
        else:
            messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            await self.post(wire, b"chat/completions", json.dumps({"messages": messages}).encode())
        await wire.read(65536)

    async def many_ids(self, wire: Wire) -> None:
        await self.post(wire, b"completions", b'{"prompt": [' + b"77," * random.choice([300_000, 1_500_000]) + b"7]}")
        await wire.read(65536)

    async def many_items(self, wire: Wire) -> None:
        path, begin, item, number, end = random.choice(MANY_ITEMS)
        await self.post(wire, path, begin + b",".join([item] * number) + end)
        await wire.read(65536)

    async def huge_body(self, wire: Wire) -> None:
        chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
        await wire.send(HEAD % b"completions" + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 400)
        await wire.read(65536)

    async def leave(self, wire: Wire) -> None:
        await self.stream(wire, {"prompt": PROSE * 20, "max_tokens": 200, "ignore_eos": True})
        await wire.read(2000)

    async def never_read(self, wire: Wire) -> None:
        wire.writer.transport.pause_reading()
        await self.stream(wire, {"prompt": PROSE, "max_tokens": 100, "ignore_eos": True, "logprobs": 20})
        await asyncio.sleep(5)

    async def stop_strings(self, wire: Wire) -> None:
        stops = ["b" * (i + 1) + "a" * (999 - i) for i in range(15)] + ["a" * 999 + "c"]
        await self.stream(wire, {"prompt": PROSE, "max_tokens": 50, "stop": stops, "logit_bias": {"66": 100}})
        await wire.read(1 << 20)

    async def half_close(self, wire: Wire) -> None:
        await self.stream(wire, {"prompt": PROSE, "max_tokens": 5})
        if random.random() < 0.5:
            wire.writer.write_eof()
            await wire.read(1 << 20)

    async def stream(self, wire: Wire, body: dict) -> None:
        await self.post(wire, b"completions", json.dumps(body | {"stream": True}).encode())

    async def post(self, wire: Wire, path: bytes, body: bytes) -> None:
        await wire.send(HEAD % path + b"content-length: %d\r\n\r\n" % len(body), body)


KINDS = {
    "flood_headers": 2, "idle": 40, "half_headers": 20, "half_body": 20, "malformed": 2, "pipeline": 1, "bad_json": 1,
    "long_text": 3, "many_ids": 1, "many_items": 1, "huge_body": 1, "leave": 1, "never_read": 2, "stop_strings": 1,
    "half_close": 1,
}  # fmt: skip


async def attack(url: str, seconds: float) -> Counter[str]:
    """All kinds at once, each in as many connections as `KINDS` says."""
    attacks = Attack(url)
    struck: Counter[str] = Counter()
    ends = time.monotonic() + seconds

    async def go_on(kind: str) -> None:
        await asyncio.sleep(random.random())
        while time.monotonic() < ends:
            struck[kind] += 1
            await attacks.with_wire(getattr(attacks, kind))
            await asyncio.sleep(PAUSE_S)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds + LINGER_S):
            await asyncio.gather(*(go_on(kind) for kind, number in KINDS.items() for _ in range(number)))
    return struck


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(sys.argv[1], float(sys.argv[2])))))
