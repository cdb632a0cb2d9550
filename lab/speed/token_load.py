"""Load a server of ours with streams of random token ids, and keep when each chunk came.

Prompts follow from seed, request and turn, so that another program can be given the same ones (`draw_tokens`). A next
turn's prompt is the one before it, its answer, and new tokens. Times are of `time.perf_counter`, which on Linux all
processes of a host share.
"""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import numpy as np

from bench.load.arrivals import draw_arrivals

FIRST_ID, LAST_ID = 3, 500  # of prompts: ids that every vocabulary has, none of them special
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """Requests of so many tokens in and out. concurrency: open at once; None: all. rate: arrivals a second, by Poisson.
    turns: of each chat; a turn after the first has `tokens_in` new tokens.
    """

    requests: int
    tokens_in: int
    tokens_out: int
    concurrency: int | None = None
    rate: float | None = None
    turns: int = 1
    seed: int = 0

    @property
    def num_tokens_out(self) -> int:
        return self.requests * self.turns * self.tokens_out

    def arrivals(self) -> list[float] | None:
        """Return when requests come, in seconds; None: as soon as there is room."""
        if self.rate is None:
            return None
        return [float(at) for at in draw_arrivals(self.rate, 1.0, self.seed, self.requests, None)]


@dataclass(slots=True)
class Turn:
    """One request and its answer: when it was due and sent, when chunks came, and the answer's tokens."""

    due_s: float
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Return the seconds from when it was due to the first chunk."""
        return self.times_s[0] - self.due_s

    @property
    def token_s(self) -> float | None:
        """Return the seconds a token after the first; None of a single one."""
        count = len(self.token_ids) - 1
        return (self.times_s[-1] - self.times_s[0]) / count if count > 0 and len(self.times_s) > 1 else None


class LoadError(RuntimeError):
    """An answer that is not what was asked for."""


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def draw_tokens(load: TokenLoad, request: int, turn: int) -> list[int]:
    """Return the new tokens of a turn of a request."""
    random = np.random.default_rng([load.seed, request, turn])
    tokens: list[int] = random.integers(FIRST_ID, LAST_ID, load.tokens_in).tolist()
    return tokens


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


def summarise_turns(turns: list[Turn]) -> dict[str, float]:
    """Return seconds in all, tokens/s, and the median and the 99th of 100 of first tokens, time a token and gaps."""
    seconds = max(turn.times_s[-1] for turn in turns) - min(turn.due_s for turn in turns)
    tokens = sum(len(turn.token_ids) for turn in turns)
    kinds = {
        "first_s": [turn.first_s for turn in turns],
        "token_s": [turn.token_s for turn in turns if turn.token_s is not None],
        "gap_s": [late - early for turn in turns for early, late in pairwise(turn.times_s)],
    }
    summary = {"seconds": seconds, "tokens_per_s": tokens / seconds}
    for name, values in kinds.items():
        for share in (50, 99):
            summary[f"{name}_p{share}"] = float(np.percentile(values, share)) if values else 0.0
        summary[f"{name}_most"] = max(values, default=0.0)
    return summary
