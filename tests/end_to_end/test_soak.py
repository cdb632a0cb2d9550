"""Many streams at once over HTTP: none is lost, none mixed up with another, and memory stays flat.

Takes TANDEM_SOAK_SECONDS (6 by default; 120 is what a release is held to) after its lone runs.
"""

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server_process import KV_CACHE_GIB, ServerProcess, running_server
from tests.tolerances import (
    BF16_FLIP_LOGIT_GAP,
    BF16_SAMPLED_FLIPS_PER_TOKEN,
    FLIP_LOGIT_GAP,
    SAMPLED_FLIPS_PER_TOKEN,
    SOAK_GROWTH_BYTES,
)

SOAK_SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "6"))
NUM_STREAMS = 64
NUM_PROMPTS = 8
NUM_TOKENS = 24
STATS_SECONDS = 1.0  # the engine reports its gauges four times a second

OPENINGS = (
    "The harbour was quiet when the ferry came in,",
    "Nobody in the valley had seen the old road since",
    "She folded the letter twice and",
    "Under the bridge the water ran dark, and",
)


@dataclass
class Run:
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two best logits, per token
    is_done: bool = False


def body(index: int) -> dict:
    """Prompts of 20 to 500 tokens, half greedy and half drawn with a seed."""
    prompt = " ".join(OPENINGS[(index + i) % len(OPENINGS)] for i in range(1 + 3 * index)) + f" {index}"
    drawing = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + index}
    return {"model": "reference", "prompt": prompt, "max_tokens": NUM_TOKENS, "logprobs": 2, "stream": True,
            "ignore_eos": True, **drawing}  # fmt: skip


async def stream(client: httpx.AsyncClient, index: int) -> Run:
    run = Run()
    async with client.stream("POST", "/v1/completions", json=body(index)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                run.is_done = True
                break
            for choice in json.loads(line[6:])["choices"]:
                logprobs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
                run.tokens += logprobs["tokens"]
                for top in logprobs["top_logprobs"]:
                    best = sorted(top.values(), reverse=True)
                    run.gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return run


def first_difference(run: Run, lone: Run) -> int | None:
    for index, (token, expected) in enumerate(zip(run.tokens, lone.tokens, strict=False)):
        if token != expected:
            return index
    return None if len(run.tokens) == len(lone.tokens) else min(len(run.tokens), len(lone.tokens))


def settled_bytes(server: ServerProcess) -> int:
    """Return the memory of both processes without the KV pages, which the host commits in blocks as streams meet."""
    page_bytes = KV_CACHE_GIB * 2**30 / server.metric("tandem_pages_capacity")
    return server.resident_bytes() - int(server.metric("tandem_pages_committed") * page_bytes)


async def soak(server: ServerProcess) -> tuple[list[Run], list[tuple[int, Run]], list[int]]:
    """Lone runs of every prompt, then all streams at once until time is up, with memory sampled on the way."""
    limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=NUM_STREAMS)
    finished: list[tuple[int, Run]] = []
    memory: list[int] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        lone = [await stream(client, index) for index in range(NUM_PROMPTS)]
        ends = time.monotonic() + SOAK_SECONDS

        async def worker(number: int) -> None:
            while time.monotonic() < ends:
                index = (number + len(finished)) % NUM_PROMPTS
                finished.append((index, await stream(client, index)))

        async def watch() -> None:
            while time.monotonic() < ends:
                memory.append(await asyncio.to_thread(settled_bytes, server))
                await asyncio.sleep(0.5)

        await asyncio.gather(watch(), *(worker(number) for number in range(NUM_STREAMS)))
    await asyncio.sleep(STATS_SECONDS)
    memory.append(settled_bytes(server))
    return lone, finished, memory


def check_soak(server: ServerProcess, flip_logit_gap: float, sampled_flips_per_token: float) -> None:
    """Every stream ended whole and says what its lone run said, but for flips between near-equal choices."""
    lone, finished, memory = asyncio.run(soak(server))
    assert len(finished) >= NUM_STREAMS
    assert all(run.is_done and len(run.tokens) == NUM_TOKENS for _, run in finished)
    num_tokens = sum(len(run.tokens) for _, run in finished)
    greedy_flips = sampled_flips = 0
    for index, run in finished:
        at = first_difference(run, lone[index])
        if at is None:
            continue
        if body(index)["temperature"] == 0.0:
            assert lone[index].gaps[at] <= flip_logit_gap, f"prompt {index} differs from its lone run at {at}"
            greedy_flips += 1
        else:
            sampled_flips += 1
    growth = memory[-1] - memory[2 * len(memory) // 3]
    print(
        f"\nsoak: {SOAK_SECONDS:.0f} s, {len(finished)} streams, {num_tokens} tokens, flips: {greedy_flips} greedy, "
        f"{sampled_flips} sampled; memory {growth / 2**20:+.1f} MiB over the last third"
    )
    assert sampled_flips <= max(1.0, sampled_flips_per_token * num_tokens)
    assert growth <= SOAK_GROWTH_BYTES
    for name in ("tandem_requests_running", "tandem_requests_waiting", "tandem_pages_used"):
        assert server.metric(name) == 0.0


@pytest.mark.timeout(SOAK_SECONDS + 280)
def test_64_streams_are_neither_lost_nor_mixed_up_and_memory_is_flat(tmp_path: Path) -> None:
    with running_server(tmp_path, {"scheduler": {"max_running": NUM_STREAMS}}) as server:
        check_soak(server, FLIP_LOGIT_GAP, SAMPLED_FLIPS_PER_TOKEN)


@pytest.mark.gpu
@pytest.mark.timeout(SOAK_SECONDS + 280)
def test_64_streams_on_a_gpu_in_bf16_flip_only_where_choices_are_near(tmp_path: Path) -> None:
    gpu = {"device": "cuda", "dtype": "bfloat16", "memory_limit_gib": 8}
    with running_server(tmp_path, {"gpu": gpu, "scheduler": {"max_running": NUM_STREAMS}}) as server:
        check_soak(server, BF16_FLIP_LOGIT_GAP, BF16_SAMPLED_FLIPS_PER_TOKEN)


def test_a_stream_that_got_another_ones_token_would_be_noticed() -> None:
    lone, other = Run(["a", "b", "c"], [0.5, 0.5, 0.5]), Run(["a", "x", "c"], [0.5, 0.5, 0.5])
    assert first_difference(other, lone) == 1
    assert lone.gaps[1] > FLIP_LOGIT_GAP
    assert first_difference(Run(["a", "b"]), lone) == 2
