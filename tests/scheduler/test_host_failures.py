"""The engine with a real model and a real host tier when the host or a request fails: one request ends with the reason,
those beside it say what they say alone, and nothing is left behind.
"""

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import cpu.cpu_tier
import cpu.segment_store
from cpu.decode_step import StepAttention
from gpu.config import GpuConfig, ModelConfig
from gpu.decode.steps import LaunchedStep
from gpu.layers.decoder import Decoder
from gpu.step import DecodeGroup, Lane
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import EngineRequest
from scheduler.sequences.capacity import TooLargeError
from tests.scheduler.tiered_engine import (
    RESIDENT,
    VOCAB,
    ask,
    check_idle,
    plan_here,
    prompt_of,
    run,
    running_engine,
    text,
    tiered_config,
)
from transfer.exchange import ExchangeError, ExchangeSlot
from transfer.host_config import HostConfig
from transfer.host_pages import map_pages
from transfer.host_tier import HostMemoryError
from transfer.slabs import PageSource

LONG = 600
BULK = 2_150  # its tables are built at once


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    host = {"memory_limit_gib": 0.011, "residency": "fixed"}
    scheduler = SchedulerConfig(max_running=5, max_context_tokens=2600)
    with running_engine(tiered_config(0.25, host, scheduler, check_coverage=False)) as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    check_idle(loaded)


def alone(engine: Engine, request: EngineRequest) -> list[int]:
    """The text of a lone run, which leaves nothing for others to begin with."""
    said = text(run(engine, [request])[request.request_id])
    check_idle(engine)
    return said


def refuse(engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """From now on the system gives no memory, or does not pin it."""
    pool = engine._tier._pool

    def fail(_: object) -> None:
        raise OSError(12, "refused by the test")

    source = PageSource(fail, None, None) if kind == "map" else PageSource(map_pages, fail, lambda _: None)
    monkeypatch.setattr(pool, "_source", source)
    with pool._lock:
        pool._idle.clear()


def test_requests_wait_for_host_memory_and_one_that_never_fits_is_told_what_does(engine: Engine) -> None:
    requests = [ask(f"r{salt}", prompt_of(LONG, salt), 4) for salt in range(5)]
    expected = [alone(engine, request) for request in requests]
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, engine._tier.stats().contexts)

    deltas = run(engine, requests, watch)
    assert [text(deltas[request.request_id]) for request in requests] == expected
    assert most < 5
    with pytest.raises(TooLargeError, match=r"asked 2500 \+ 200 = 2700 tokens, the context is 2600; shorten"):
        engine.submit([ask("never", prompt_of(2500, 1), 200)])


@pytest.mark.parametrize(("when", "kind"), [("prefill", "map"), ("decode", "pin")])
def test_a_host_that_refuses_ends_one_request_and_says_why(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str, kind: str
) -> None:
    other = ask("other", prompt_of(40, 1), 12, "exact")
    expected = alone(engine, other)
    request = ask("long", prompt_of(LONG if when == "prefill" else RESIDENT + 120, 2), 30)
    with monkeypatch.context() as patch:
        refuse(engine, patch, kind)
        deltas = run(engine, [other, request])
    last = deltas["long"][-1]
    assert last.finish_reason == "error"
    assert "refused by the test" in last.error
    assert "lower host.memory_limit_gib" in last.error
    assert text(deltas["other"]) == expected
    check_idle(engine)
    assert len(alone(engine, request)) == 30


def test_a_copied_tail_that_the_host_refuses_ends_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention finds it out, in a step that has begun; the others' rows of that step begin anew."""
    first = prompt_of(LONG, 3)
    others = [ask("other", prompt_of(LONG, 4), 12), ask("exact", prompt_of(40, 1), 12, "exact")]
    expected = [alone(engine, other) for other in others]
    run(engine, [ask("first", first)])

    def refused(*_: object) -> Iterator[None]:
        raise HostMemoryError("host memory: asked 9, refused by the test")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(cpu.segment_store, "copy_layer", refused)
        deltas = run(engine, [ask("fork", first + prompt_of(300, 5), 12), *others])
    assert deltas["fork"][-1].finish_reason == "error"
    assert "refused by the test" in deltas["fork"][-1].error
    assert [text(deltas[other.request_id]) for other in others] == expected


def test_an_exchange_that_fails_ends_its_group_and_nobody_else(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows' keys and values of that step mean nothing; the next step's exchange is a new one."""
    group = [ask(f"down{salt}", prompt_of(LONG, salt), 12, "offloaded") for salt in (3, 4)]
    others = [ask("sampled", prompt_of(LONG, 5), 12), ask("exact", prompt_of(40, 1), 12, "exact")]
    others.append(ask("ended", prompt_of(50, 2), 1, "exact"))  # with its prompt, in no step
    expected = {request.request_id: alone(engine, request) for request in (*group, *others)}
    run_layer, decode = StepAttention.run, engine._runner._decode
    asks: list[set[str]] = []  # of steps with one of these rows, and whose
    stepped: set[str] = set()

    def watched(decoded: DecodeGroup, lane: Lane, has_host_reads: bool) -> LaunchedStep:
        stepped.clear()
        stepped.update(one.request_id for one in engine.scheduler.roster.running if one.slot in decoded.slots)
        return decode(decoded, lane, has_host_reads)

    def late(attention: StepAttention, layer: int, slot: ExchangeSlot) -> None:
        if "down3" in stepped:
            asks.append(set(stepped))
            if len(asks) == 5:
                raise ExchangeError("exchange: row 0 of 1 has stamp 4 after 60 s, wanted 5; the device is behind")
        run_layer(attention, layer, slot)

    with monkeypatch.context() as patch:
        patch.setattr(StepAttention, "run", late)
        patch.setattr(engine._runner, "_decode", watched)
        deltas = run(engine, [*group, *others])
    assert asks[4]
    for name in asks[4]:
        assert deltas[name][-1].finish_reason == "error"
        assert "the device is behind" in deltas[name][-1].error
    assert "ended" not in asks[4]
    for name in expected.keys() - asks[4]:
        assert text(deltas[name]) == expected[name]
    assert alone(engine, group[0]) == expected["down3"]


def test_tables_that_cannot_be_built_leave_their_rows_read_exactly(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(BULK, 6)
    whole = alone(engine, ask("offloaded", prompt, 8, "offloaded"))
    before = engine.stats().host.method_counts

    def broken(*_: object) -> Iterator[None]:
        raise ValueError("no table today")
        yield

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(cpu.segment_store, "build_layer", broken)
        said = alone(engine, ask("sampled", prompt, 8))
    after = engine.stats().host.method_counts
    assert said == whole
    assert after["host_tables_failed"] - before["host_tables_failed"] == len(engine._tier.shape.layers)
    assert after["host_tables_built"] == before["host_tables_built"]
    assert "background_job_failed job=tables" in caplog.text
    assert "no table today" in caplog.text


@pytest.mark.parametrize("profile", ["sampled", "offloaded"])
def test_a_token_without_a_finite_embedding_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """What its prefill leaves in staging and pages is not read by the prompt that comes after it."""
    others = [ask(name, prompt_of(LONG, salt), 10, profile) for name, salt in (("one", 7), ("two", 8))]
    expected = [alone(engine, other) for other in others]
    bad_token = next(token for token in range(10, VOCAB) if all(token not in one.prompt_token_ids for one in others))
    prompt = prompt_of(LONG, 9)
    prompt[LONG // 2] = bad_token
    embed = Decoder.embed

    def spoilt(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(decoder, token_ids).masked_fill((token_ids == bad_token)[:, None], torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "embed", spoilt)
        deltas = run(engine, [others[0], ask("bad", prompt, 10, profile), others[1]])
    assert deltas["bad"][-1].finish_reason == "error"
    assert [text(deltas[other.request_id]) for other in others] == expected


@pytest.mark.parametrize(("profile", "what"), [("sampled", "keys"), ("offloaded", "values")])
def test_rows_that_turn_into_nan_on_the_host_end_their_request_alone(engine: Engine, profile: str, what: str) -> None:
    other, bad = (
        ask("other", prompt_of(LONG, 7), 10, profile),
        ask("bad", prompt_of(BULK if profile == "sampled" else LONG, 9), 10, profile),
    )
    expected = alone(engine, other)
    spoilt: list[int] = []

    def spoil() -> None:
        running = {one.request_id: one for one in engine.scheduler.roster.running}
        if not spoilt and "bad" in running:
            context = engine._tier._contexts[running["bad"].context.context_id]
            for piece in context.pieces:
                getattr(piece.segment, what)(0).view(np.uint8)[:] = 0xFF
            spoilt.append(1)

    deltas = run(engine, [bad, other], spoil)
    assert spoilt
    assert deltas["bad"][-1].finish_reason == "error"
    assert text(deltas["other"]) == expected


def test_a_prefill_is_cancelled_while_its_copies_are_under_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ask("other", prompt_of(40, 1), 12, "exact")
    expected = alone(engine, other)
    tier, arrived = engine._tier, threading.Event()
    fill = tier.fill

    class Late:
        def synchronize(self) -> None:
            assert arrived.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "fill", lambda reservation, layers, done: fill(reservation, layers, Late()))
        engine.submit([ask("long", prompt_of(BULK, 2))])
        while not any(segment.fills[0] for segment in tier._store._segments):
            engine.step()
        engine.cancel(["long"])
        deltas = run(engine, [other])
    assert text(deltas["other"]) == expected
    assert tier.stats().contexts == 0
    assert tier.stats().bytes_in_use > 0, "copies still write there"
    arrived.set()


def test_an_engine_whose_memory_is_not_pinned_does_not_start_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_refusing(*arguments: object) -> object:
        *before, _, errors, is_adaptive = arguments
        return open_tier(*before, True, errors, is_adaptive)

    def pin(_: object) -> None:
        raise OSError(2, "cudaHostRegister failed with CUDA error 2; locked memory is 64 KiB (ulimit -l)")

    open_tier = cpu.cpu_tier.open_tier
    monkeypatch.setattr("cpu.cpu_tier.open_tier", open_refusing)
    monkeypatch.setattr("cpu.cpu_tier.pin_pages", pin)
    config = EngineConfig(
        model=ModelConfig(random_weights="tiny"),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.1, threads=1),
        host=HostConfig(memory_limit_gib=0.1, threads=1, resident_tokens=RESIDENT),
        scheduler=SchedulerConfig(max_running=2, max_context_tokens=2048),
    )
    with pytest.raises(HostMemoryError, match=r"cudaHostRegister failed .* raise `ulimit -l`"):
        load_engine(config, plan_here(config), lambda *_: None)
