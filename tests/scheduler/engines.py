"""The engine over a runner that keeps tokens in pages, requests for it, and what each of them must say."""

import time
from collections.abc import Callable
from typing import Literal

from gpu.model.architecture import NAMED_SHAPES
from gpu.profiles import Profile
from gpu.sampling_params import SamplingParams
from scheduler.cache.page_pool import Memory
from scheduler.engine.engine import Engine
from scheduler.engine_config import PrefillConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, pack_tokens
from scheduler.sequences.capacity import Capacity
from scheduler.steps.scheduler import Device, Scheduler
from tests.scheduler.page_runner import PageRunner, expected_output
from tests.scheduler.window_model import TokenStates, TokenWindows

SHAPE = NAMED_SHAPES["tiny"]
PROFILES = {name: Profile(name, kv_key=name, parts=()) for name in ("exact", "other")}
PAGE = 16
WINDOW, SPARE = 40, 40  # of layers that keep no more, where there are any: what they see, and what they have beyond


def make_engine(
    *,
    num_pages: int = 64,
    max_running: int = 8,
    max_queue: int = 100,
    chunk_tokens: int = 64,
    max_hidden_tokens: int = 10_000,
    is_pipelined: bool = True,
    prefix_cache: bool = True,
    max_jobs: int = 8,
    oldest_share: float = 1 / 3,
    token_gap_target_ms: float = 100.0,
    runner: PageRunner | None = None,
    num_windows: int = 0,
    jump_forward: bool = True,
    page_memory: Memory | None = None,
    window_memory: Memory | None = None,
    num_states: int = 0,
    snapshot_tokens: int = 64,
    num_host_states: int = 0,
    favour: Literal["auto", "latency"] = "auto",
) -> tuple[Engine, PageRunner]:
    prefill = PrefillConfig(
        chunk_tokens=chunk_tokens, max_jobs=max_jobs, oldest_share=oldest_share, max_hidden_tokens=max_hidden_tokens
    )
    config = SchedulerConfig(
        max_running=max_running,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
        prefill=prefill,
        token_gap_target_ms=token_gap_target_ms,
        jump_forward=jump_forward,
        favour=favour,
    )
    kept = (num_states, 0, {}, snapshot_tokens, num_host_states) if num_states else (num_windows, SPARE)
    capacity = Capacity(num_pages, PAGE, 10_000, max_hidden_tokens, None, {}, *kept)
    device = Device(page_memory=page_memory, window_memory=window_memory)
    scheduler = Scheduler(config, SHAPE, capacity, b"model", PROFILES, device)
    runner = runner or PageRunner(SHAPE.num_layers, PAGE)
    if num_windows:
        runner.windows = TokenWindows(num_windows, WINDOW + SPARE, WINDOW)
    if num_states:
        runner.windows = TokenStates(num_states, num_host_states)
    return Engine(scheduler, runner, None, is_pipelined), runner


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    stop: list[int] | None = None,
    profile: str = "exact",
    min_tokens: int = 0,
    num_prompt_logprobs: int | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0, num_prompt_logprobs=num_prompt_logprobs),
        max_tokens=max_tokens,
        stop_token_ids=stop or [],
        attention_profile=profile,
        arrival_s=time.monotonic(),
        min_tokens=min_tokens,
    )


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7919 + 31 * i) % 50 for i in range(length)]


def drain(engine: Engine, most_steps: int = 20_000) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"still {engine.scheduler.roster.num_unfinished} unfinished after {most_steps} steps")


Workload = list[tuple[EngineRequest, int, int | None]]  # with the step it comes at, and how many later it is cancelled


def follow(engine: Engine, workload: Workload, idle_steps: int, after_step: Callable[[], None] = lambda: None) -> None:
    """Run a workload, and check that each request that is not cancelled gets the text of its lone run. idle_steps: by
    when everybody has come.
    """
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request, _, _ in workload}
    cancelled: set[str] = set()
    for step in range(20_000):
        for request, arrives, leaves in workload:
            if arrives == step:
                engine.submit([request])
            if leaves is not None and arrives <= step and leaves == step - arrives:
                if not (deltas[request.request_id] and deltas[request.request_id][-1].finish_reason):
                    cancelled.add(request.request_id)
                engine.cancel([request.request_id])
        if engine.has_work:
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
                assert delta.request_id not in cancelled
            after_step()
        elif step > idle_steps:
            break
    for request, _, _ in workload:
        if request.request_id not in cancelled:
            check_output(request, deltas[request.request_id])


def text(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def check_output(request: EngineRequest, deltas: list[Delta]) -> None:
    expected = expected_output(
        request.prompt_token_ids,
        request.max_tokens,
        request.stop_token_ids,
        request.attention_profile,
        request.min_tokens,
    )
    assert text(deltas) == expected
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == ("stop" if expected and expected[-1] in request.stop_token_ids else "length")
    scored = [] if request.sampling.num_prompt_logprobs is None else request.prompt_token_ids[1:]
    assert [-entry.logprob for entry in deltas[0].prompt_logprobs or []] == scored
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def check_empty(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert scheduler.pages.num_held == 0
    assert scheduler.residence.windows.num_free == scheduler.residence.windows.count
    assert scheduler.pages.num_available == scheduler.pages.num_pages
    stats = engine.stats()
    assert (stats.num_running, stats.num_prefilling, stats.num_waiting) == (0, 0, 0)


def answer(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[Delta]]:
    """Return all deltas of requests that come together. Each must get the text of its lone run."""
    engine.submit(requests)
    deltas = drain(engine)
    for request in requests:
        check_output(request, deltas[request.request_id])
    return deltas
