"""Send streams of random token ids to a server of ours, and record when each chunk came."""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from lab.speed.token_turns import TokenLoad, Turn, draw_tokens

_TIMEOUT_S = 600.0


class LoadError(RuntimeError):
    """Raised for an answer that is not what was asked for."""


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def run_load(url: str, load: TokenLoad) -> list[Turn]:
    """Run a load to its last token, and return all turns. Raises LoadError."""
    timeout, connector = aiohttp.ClientTimeout(total=_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        async with session.get("/v1/models") as response:
            model = str((await response.json())["data"][0]["id"])
        room, arrivals = asyncio.Semaphore(load.concurrency or load.requests), load.arrivals()
        began_s = time.perf_counter()
        turns: list[Turn] = []

        async def chat(request: int) -> None:
            due_s = began_s
            if arrivals is not None:
                due_s += arrivals[request]
                await asyncio.sleep(due_s - time.perf_counter())
            async with room:
                prompt: list[int] = []
                for number in range(load.turns):
                    prompt += draw_tokens(load, request, number)
                    turn = Turn(due_s if arrivals is not None and not number else time.perf_counter())
                    await _stream(session, model, prompt, load.tokens_out, turn)
                    prompt += turn.token_ids
                    turns.append(turn)

        await asyncio.gather(*(chat(request) for request in range(load.requests)))
    return turns


async def _stream(session: aiohttp.ClientSession, model: str, prompt: list[int], max_tokens: int, turn: Turn) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip
    turn.sent_s = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise LoadError(f"load: HTTP {response.status}: {(await response.text())[:200]}")
        rest = b""
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    chunk = _decode(line[6:])
                    if chunk.error is not None:
                        raise LoadError(f"load: error in a stream: {chunk.error}")
                    if chunk.choices and chunk.choices[0].token_ids:
                        turn.times_s.append(now)
                        turn.token_ids += chunk.choices[0].token_ids
    if len(turn.token_ids) != max_tokens:
        raise LoadError(f"load: got an answer of {len(turn.token_ids)} tokens; wanted {max_tokens}")
