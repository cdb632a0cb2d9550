"""Mixed load on a real model while its engine is killed again and again: nothing is lost but what was in flight.

Honest clients ask for greedy answers whose text is known from lone runs. Beside them others submit and disconnect, drop
their streams, or never read. Needs TANDEM_REAL_MODEL, a GGUF file or a folder of a small chat model, and takes
TANDEM_MIXED_SECONDS (120; 600 is what a release is held to), of which a fifth is the life of each engine.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.server_process import ServerProcess, running_server
from tests.end_to_end.test_soak import OPENINGS, Run, first_difference
from tests.tolerances import LEVEL_LOGPROBS, MIXED_GROWTH_BYTES

SECONDS = float(os.environ.get("TANDEM_MIXED_SECONDS", "120"))
MODEL = os.environ.get("TANDEM_REAL_MODEL")
LIFE_SECONDS = SECONDS / 5  # of an engine, until it is killed
NUM_PROMPTS = 10
NUM_HONEST = 6
NUM_TOKENS = 48
RETRY_SECONDS = 60.0  # in which a request that was lost with its engine is answered by the next one
PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Load:
    """What the clients saw. lives: of each engine, resident bytes by second since it served."""

    finished: list[tuple[int, Run]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    server_bytes: list[tuple[float, int]] = field(default_factory=list)
    lives: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)


def honest_body(index: int) -> tuple[str, dict]:
    """Return the path and body of a prompt of 20 to 700 tokens; half are chats, a third are answered whole."""
    text = f"Note {index}. " + " ".join(OPENINGS[(index + i) % len(OPENINGS)] for i in range(1 + 7 * index))
    common = {"model": "real", "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True,
              "stream": index % 3 != 0}  # fmt: skip
    if index % 2:
        messages = [{"role": "user", "content": f"{text} What happens next?"}]
        return PATHS[1], common | {"messages": messages, "logprobs": True, "top_logprobs": 2}
    return PATHS[0], common | {"prompt": text, "logprobs": 2}


def read_choice(run: Run, choice: dict) -> None:
    """Add the tokens of a choice, whole or an event's, and the gaps between the two best."""
    logprobs = choice.get("logprobs") or {}
    tops: list[list[float]]
    if "content" in logprobs:
        entries = logprobs["content"] or []
        run.tokens += [entry["token"] for entry in entries]
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    else:
        run.tokens += logprobs.get("tokens", [])
        tops = [list(top.values()) for top in logprobs.get("top_logprobs", [])]
    for top in tops:
        best = sorted(top, reverse=True)
        run.gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    run.is_done |= choice.get("finish_reason") == "length"


class EngineLostError(Exception):
    """The answer says that its engine is gone, or that none serves yet."""


async def ask(client: httpx.AsyncClient, index: int) -> Run:
    """Return the whole answer. Raises EngineLostError; any other error is an assertion."""
    path, body = honest_body(index)
    run = Run()
    if not body["stream"]:
        answer = await client.post(path, json=body)
        if answer.status_code in (500, 503):
            raise EngineLostError(answer.text)
        assert answer.status_code == 200, answer.text
        read_choice(run, answer.json()["choices"][0])
        return run
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code in (500, 503):
            raise EngineLostError((await answer.aread()).decode())
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineLostError(line)
            for choice in event["choices"]:
                read_choice(run, choice)
    return run


class Clients:
    """All clients of one run; each kind goes on until `ends`."""

    def __init__(self, server: ServerProcess, client: httpx.AsyncClient, load: Load, ends: float) -> None:
        self.server, self.client, self.load, self.ends = server, client, load, ends
        self.random = random.Random(7)
        host, port = server.url.removeprefix("http://").split(":")
        self.address = host, int(port)

    async def be_honest(self, number: int) -> None:
        """Ask one prompt after the other; what a kill took is asked again, and must be answered then."""
        turn = number
        while time.monotonic() < self.ends:
            index, turn = turn % NUM_PROMPTS, turn + NUM_HONEST + 1
            began = time.monotonic()
            while True:
                sent = time.monotonic()
                try:
                    run = await ask(self.client, index)
                except EngineLostError as error:
                    self._judge_loss(sent, str(error))
                    if time.monotonic() - began > RETRY_SECONDS:
                        raise AssertionError(f"prompt {index} is not answered: {error}") from None
                    await asyncio.sleep(0.25)
                    continue
                self.load.finished.append((index, run))
                break

    def _judge_loss(self, sent: float, error: str) -> None:
        """An error is right where an engine was killed while the request was under way, or none served since."""
        now = time.monotonic()
        has_cause = any(sent <= kill <= now for kill in self.load.kills)
        is_loading = any(kill <= sent < kill + RETRY_SECONDS for kill in self.load.kills)
        self.load.counts["lost in flight" if has_cause else "refused while loading"] += 1
        if not (has_cause or is_loading):
            self.load.unexpected.append(error)

    async def leave(self, kind: str) -> None:
        """Submit and disconnect at once, drop a stream after some tokens, or never read one."""
        while time.monotonic() < self.ends:
            try:
                reader, writer = await asyncio.open_connection(*self.address)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            try:
                await getattr(self, kind)(reader, writer)
            except (ConnectionError, TimeoutError):
                self.load.counts[f"{kind}: connection broke"] += 1
            finally:
                writer.close()
            self.load.counts[kind] += 1
            await asyncio.sleep(self.random.uniform(0.1, 0.5))

    async def submit_and_disconnect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, num_words=self.random.choice([5, 300]), max_tokens=16)
        await asyncio.sleep(self.random.uniform(0.0, 0.2))

    async def drop_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._post(writer, num_words=40, max_tokens=200)
        async with asyncio.timeout(30):
            for _ in range(20):
                await reader.readline()

    async def never_read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await self._post(writer, num_words=20, max_tokens=300)
        await asyncio.sleep(5)

    async def _post(self, writer: asyncio.StreamWriter, num_words: int, max_tokens: int) -> None:
        words = " ".join(self.random.choice(OPENINGS).split()[0] for _ in range(num_words))
        body = json.dumps({"model": "real", "prompt": words, "max_tokens": max_tokens, "ignore_eos": True,
                           "stream": True}).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def kill_engines(self) -> None:
        """Kill the engine when it has served for its life, but for the last one; note when each was killed."""
        while time.monotonic() + LIFE_SECONDS < self.ends:
            await asyncio.sleep(LIFE_SECONDS)
            engine = self.server.engine
            self.load.kills.append(time.monotonic())
            engine.kill()
            await asyncio.to_thread(engine.wait)

    async def watch(self) -> None:
        """Note resident memory once a second, of the server and of the engine that serves."""
        server, served_since = psutil.Process(self.server.process.pid), dict[int, float]()
        while time.monotonic() < self.ends:
            now = time.monotonic()
            self.load.server_bytes.append((now, server.memory_info().rss))
            try:
                engine = self.server.engine
                if (await self.client.get("/health")).status_code == 200:
                    since = served_since.setdefault(engine.pid, now)
                    self.load.lives.setdefault(engine.pid, []).append((now - since, engine.memory_info().rss))
            except (AssertionError, psutil.NoSuchProcess, httpx.TransportError):
                pass  # between two engines
            await asyncio.sleep(1.0)


async def run_load(server: ServerProcess) -> tuple[list[Run], Load]:
    """Return every prompt's lone run, and what the clients saw until time was up."""
    load = Load()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        lone = [await ask(client, index) for index in range(NUM_PROMPTS)]
        clients = Clients(server, client, load, time.monotonic() + SECONDS)
        await asyncio.gather(
            clients.watch(),
            clients.kill_engines(),
            *(clients.be_honest(number) for number in range(NUM_HONEST)),
            *(clients.leave(kind) for kind in ("submit_and_disconnect", "drop_stream", "never_read") for _ in range(2)),
        )
    return lone, load


def growth_bytes(samples: list[tuple[float, int]], first_seconds: float) -> int:
    """Return how much more the last sample is than the one that was taken `first_seconds` after the first."""
    begin = samples[0][0]
    after = [num_bytes for at, num_bytes in samples if at - begin >= first_seconds]
    return after[-1] - after[0] if after else 0


def judge(lone: list[Run], load: Load) -> tuple[int, list[str]]:
    """Return how many answers part from their lone run where the choices are level, and what is wrong with others."""
    num_level, wrong = 0, list(load.unexpected)
    for index, run in load.finished:
        if not run.is_done or len(run.tokens) != NUM_TOKENS:
            wrong.append(f"prompt {index} ended after {len(run.tokens)} tokens")
            continue
        at = first_difference(run, lone[index])
        if at is None:
            continue
        if lone[index].gaps[at] <= LEVEL_LOGPROBS:
            num_level += 1
        else:
            wrong.append(f"prompt {index} parts at token {at}, where the best is ahead by {lone[index].gaps[at]:.4f}")
    return num_level, wrong


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.skipif(MODEL is None, reason="needs TANDEM_REAL_MODEL: a GGUF file or folder of a small chat model")
def test_mixed_load_loses_nothing_but_what_was_in_flight_when_an_engine_was_killed(tmp_path: Path) -> None:
    changes = {
        "model": {"path": MODEL, "name": "real"},
        "gpu": {"kv_cache_gib": 0.25, "threads": 2},
        "scheduler": {"max_context_tokens": 2048, "max_running": 16},
        "server": {"max_engine_failures": 100},
    }
    with running_server(tmp_path, changes) as server:
        lone, load = asyncio.run(run_load(server))
        num_level, wrong = judge(lone, load)
        first_s = min(60.0, LIFE_SECONDS / 2)
        server_growth = growth_bytes(load.server_bytes, first_s)
        engine_growth = [growth_bytes(samples, first_s) for samples in load.lives.values()]
        print(
            f"\nmixed load: {SECONDS:.0f} s, {len(load.kills)} engines killed; {len(load.finished)} honest answers, "
            f"{num_level} part where two tokens are level, {len(wrong)} are wrong; {dict(load.counts)}; after "
            f"the first {first_s:.0f} s the server grew by {server_growth / 2**20:+.1f} MiB, the engines by "
            f"{', '.join(f'{num_bytes / 2**20:+.1f}' for num_bytes in engine_growth)}"
        )
        assert wrong == []
        assert len(load.kills) == len(load.lives) - 1
        assert len(load.finished) >= NUM_PROMPTS
        assert max(server_growth, *engine_growth) <= MIXED_GROWTH_BYTES
        assert "Traceback" not in server.log.read_text()


def test_an_answer_of_another_text_or_length_and_an_error_without_a_kill_are_seen() -> None:
    lone = [Run([str(i) for i in range(NUM_TOKENS)], [0.5] * NUM_TOKENS, True)]
    level = [Run(lone[0].tokens, [0.5] * 3 + [LEVEL_LOGPROBS / 2] + [0.5] * (NUM_TOKENS - 4), True)]
    other = Run([*lone[0].tokens[:3], "x", *lone[0].tokens[4:]], [0.5] * NUM_TOKENS, True)
    short = Run(lone[0].tokens[:-1], [0.5] * (NUM_TOKENS - 1), True)
    assert judge(lone, Load(finished=[(0, lone[0])])) == (0, [])
    assert judge(level, Load(finished=[(0, other)])) == (1, [])
    assert [len(judge(lone, Load(finished=[(0, run)]))[1]) for run in (other, short)] == [1, 1]
    assert judge(lone, Load(unexpected=["engine lost"])) == (0, ["engine lost"])


def test_memory_is_compared_with_what_it_was_after_the_first_seconds() -> None:
    assert growth_bytes([(0.0, 10), (1.0, 50), (2.0, 60), (3.0, 55)], 1.0) == 5
    assert growth_bytes([(0.0, 10)], 1.0) == 0
