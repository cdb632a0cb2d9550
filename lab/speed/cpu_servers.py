"""Time our server and llama.cpp's on this CPU, both over HTTP with as many streams, in turns.

A step's time is the additional time of answers of many tokens over answers of one, with contexts that both servers
keep. Each is the best of its repeats. All streams have one prompt: ours share its pages, each slot of llama.cpp has a
copy.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np

from bench.server_process import serving
from lab.speed.token_turns import FIRST_ID, LAST_ID

_REPEATS, _STEPS = 4, 48
_LONG, _LONG_STEPS = 1024, 16  # tokens of a long context, and its steps, which other programs disturb less
_LONG_PROMPTS = 1
_START_S, _TIMEOUT_S = 120.0, 1200.0

_SPARE_TOKENS = 64
_SAVED = "context"


@dataclass(frozen=True)
class Server:
    """A running server. is_ours: otherwise it is llama.cpp's, which has its own interface beside the common one."""

    url: str
    is_ours: bool

    def body(self, prompt: Sequence[int], num_tokens: int, stream: int) -> tuple[str, dict[str, Any]]:
        """Return the path and body of a greedy request of `num_tokens` tokens."""
        common = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True}
        if self.is_ours:
            return "/v1/completions", common | {"model": "served", "max_tokens": num_tokens}
        return "/completion", common | {"n_predict": num_tokens, "id_slot": stream, "cache_prompt": True}

    async def answer(self, prompt: Sequence[int], num_streams: int, num_tokens: int) -> float:
        """Return the seconds until num_streams concurrent requests have their answers."""
        async with aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:

            async def ask(stream: int) -> None:
                path, body = self.body(prompt, num_tokens, stream)
                async with session.post(path, json=body) as response:
                    said = await response.json()
                    response.raise_for_status()
                    count = said["usage"]["completion_tokens"] if self.is_ours else said["tokens_predicted"]
                    assert count == num_tokens, f"{self.url}: {count} tokens; wanted {num_tokens}"

            began = time.perf_counter()
            await asyncio.gather(*(ask(stream) for stream in range(num_streams)))
            return time.perf_counter() - began

    def spread(self, num_streams: int) -> None:
        """Copy the first slot of llama.cpp's server to all others. Ours needs nothing: it finds pages by hashes."""
        if not self.is_ours:
            for slot in range(num_streams):
                action = "restore" if slot else "save"
                httpx.post(
                    f"{self.url}/slots/{slot}?action={action}", json={"filename": _SAVED}, timeout=_TIMEOUT_S
                ).raise_for_status()


def time_servers(model: Path, threads: int, sizes: list[int], prompt: int, program: Path, options: str) -> None:
    """Print the times of a prompt and of steps of `sizes` streams after it, for both servers, and as a line of JSON.

    program: llama.cpp's llama-server. options: more of its command line. Raises GateError if a server does not start,
    aiohttp's errors if one fails.
    """
    is_long, rng = prompt > _LONG, np.random.default_rng(0)
    steps = _LONG_STEPS if is_long else _STEPS
    rows: list[dict[str, object]] = []
    with both_serving(model, threads, max(sizes), prompt, [str(program), *options.split()]) as servers:
        for server in servers:  # the first answer loads code, which is not timed
            asyncio.run(server.answer(list(range(FIRST_ID, FIRST_ID + 32)), 1, 2))
        context: list[int] = []
        first = {server: float("inf") for server in servers}
        for _ in range(_LONG_PROMPTS if is_long else _REPEATS):
            context = rng.integers(FIRST_ID, LAST_ID, prompt).tolist()
            for server in servers:
                first[server] = min(first[server], asyncio.run(server.answer(context, 1, 1)))
        rows.append(_row(f"prompt-{prompt}", [1e3 * first[server] for server in servers], prompt))
        for server in servers:
            server.spread(max(sizes))
        for size in sizes:
            best = {(server, count): float("inf") for server in servers for count in (1, 1 + steps)}
            for _ in range(_REPEATS):
                for server, count in best:
                    best[server, count] = min(best[server, count], asyncio.run(server.answer(context, size, count)))
            ms = [1e3 * (best[server, 1 + steps] - best[server, 1]) / steps for server in servers]
            rows.append(_row(f"step-{size}-over-{prompt}", ms, size))
    print(json.dumps({"model": model.name, "threads": threads, "prompt": prompt, "options": options, "rows": rows}))


@contextmanager
def both_serving(
    model: Path, threads: int, num_streams: int, prompt: int, program: Sequence[str]
) -> Iterator[tuple[Server, Server]]:
    """Start both servers for num_streams streams of this model, yield them, ours first, and end them on leaving."""
    tokens = prompt + _STEPS + _SPARE_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "served.yaml")
        config.write_text(json.dumps({  # which YAML reads
            "model": {"path": str(model.resolve()), "name": "served"}, "gpu": {"device": "cpu", "threads": threads},
            "scheduler": {"max_running": num_streams, "max_context_tokens": tokens},
        }))  # fmt: skip

        def ours(port: int) -> list[str]:
            return [sys.executable, "-m", "server.commands", "serve", str(config), "--port", str(port)]

        def theirs(port: int) -> list[str]:
            return [*program, "-m", str(model), "-t", str(threads), "-tb", str(threads), "--port", str(port),
                    "-np", str(num_streams), "-c", str(num_streams * (tokens + _SPARE_TOKENS)), "--cache-ram", "0",
                    "--slot-save-path", folder]  # fmt: skip

        with serving(ours, _START_S) as our_url, serving(theirs, _START_S) as their_url:
            yield Server(our_url, True), Server(their_url, False)


def _row(what: str, ms: Sequence[float], num_tokens: int) -> dict[str, object]:
    ours, theirs = ms
    print(f"{what}: ours {ours:.2f} ms, {1e3 * num_tokens / ours:.0f} tokens/s; llama.cpp's server {theirs:.2f} ms, "
          f"{1e3 * num_tokens / theirs:.0f} tokens/s; {theirs / ours:.2f} times its tokens/s", flush=True)  # fmt: skip
    return {"what": what, "best_ms": ours, "llama_best_ms": theirs}
