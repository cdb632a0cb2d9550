"""Requests whose prompts have documents' chunks, through a whole engine of a tiny model on the CPU."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.config import Composition, ModelConfig
from gpu.in_flight import InFlight
from gpu.memory.demand import PlanError
from gpu.methods.momo.query_blocks import Momo
from gpu.model.architecture import NAMED_SHAPES, load_architecture, named_shape
from gpu.model.spec import RopeScaling
from gpu.sampling_params import SamplingParams
from gpu.step import FUSED, PrefillUnit, StepPlan
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import chunk_kv_key
from scheduler.messages import (
    ChunkSpan,
    ChunksStored,
    Delta,
    DropChunks,
    EngineRequest,
    Fusion,
    NamedChunk,
    StoreChunks,
    pack_tokens,
)
from scheduler.sequences.capacity import TooLargeError
from tests.scheduler.real_model import load_small
from tests.tolerances import FUSED_LOGIT_ATOL
from transfer.chunks.chunk_format import ChunkKey, digest_tokens
from transfer.host_config import DocumentsConfig, HostConfig

MODEL = ModelConfig(random_weights="tiny")
SHAPE = load_architecture(MODEL)
VOCAB = SHAPE.vocab_size
FRONT, SIZES, QUESTION = 40, (50, 64, 33), 12
GREEDY = SamplingParams(temperature=0.0)
A3 = Fusion(policy="a3", ratio=0.2, select_layer=1)


def draw(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, count).tolist()


CHUNKS = [draw(size, 10 + number) for number, size in enumerate(SIZES)]


def make_engine(
    folder: Path, host: HostConfig | None = None, pages_gib: float = 0.1, model: ModelConfig = MODEL,
    checks: bool = False, profiles: dict[str, Composition] | None = None, max_jobs: int = 8, **documents: object,
) -> Engine:  # fmt: skip
    return load_small(
        model,
        {"kv_cache_gib": pages_gib, "check_coverage": checks},
        max_context_tokens=2048,
        max_jobs=max_jobs,
        host=host,
        profiles=profiles or {},
        documents=DocumentsConfig(**{"folder": folder, "rows": "float32", "memory_limit_gib": 0.1, **documents}),
    )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = make_engine(tmp_path)
    yield engine
    assert engine.scheduler.documents._library._held == {}, "nobody holds a chunk any more"
    engine.shutdown()


def ask(
    name: str, fusion: Fusion | None, order: tuple[int, ...] = (0, 1, 2), max_tokens: int = 4, **how: object
) -> EngineRequest:
    """Text, chunks with a token between them, text."""
    prompt, spans = draw(FRONT, 1), []
    for number in order:
        spans.append(ChunkSpan(len(prompt), len(prompt) + SIZES[number]))
        prompt += CHUNKS[number] + [7]
    prompt += draw(QUESTION, 2)
    settings = {"attention_profile": "exact", "sampling": GREEDY, "chunks": tuple(spans), **how}
    return EngineRequest(
        request_id=name, prompt=pack_tokens(prompt), max_tokens=max_tokens, stop_token_ids=(),
        arrival_s=time.monotonic(), fusion=fusion, **settings,
    )  # fmt: skip


def run(engine: Engine) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        STORED.extend(engine.take_stored())
    return deltas


STORED: list[ChunksStored] = []


def serve(engine: Engine, request: EngineRequest) -> list[Delta]:
    engine.submit([request])
    return run(engine)[request.request_id]


def text(deltas: list[Delta]) -> list[int]:
    assert deltas[-1].finish_reason == "length"
    return [token for delta in deltas for token in delta.token_ids]


def test_chunks_are_computed_for_the_first_prompt_and_found_by_the_next(engine: Engine) -> None:
    first = serve(engine, ask("a", A3))
    second = serve(engine, ask("b", A3))
    assert text(first) == text(second)
    total = FRONT + sum(SIZES) + len(SIZES) + QUESTION
    recomputed = round(0.2 * total)
    assert [
        (one[-1].figures.get("reused_tokens", 0), one[-1].figures.get("recomputed_tokens", 0))
        for one in (first, second)
    ] == [
        (0, recomputed),
        (sum(SIZES) - recomputed, recomputed),
    ]
    assert second[-1].num_cached_tokens == FRONT // 16 * 16
    third = serve(engine, ask("c", A3, order=(2, 0, 1)))
    assert third[-1].figures.get("reused_tokens", 0) == sum(SIZES) - recomputed


def test_all_tokens_computed_again_give_the_text_of_a_prompt_without_chunks(engine: Engine) -> None:
    wanted = text(serve(engine, ask("a", None, max_tokens=12)))
    for policy in ("a3", "random"):
        assert (
            text(serve(engine, ask(policy, Fusion(policy=policy, ratio=1.0, select_layer=1), max_tokens=12))) == wanted
        )
    assert text(serve(engine, ask("v", Fusion(policy="vanilla", ratio=0.1, select_layer=1), max_tokens=12))) == wanted


def test_nothing_that_a_question_fused_is_found_by_others(engine: Engine) -> None:
    plain = text(serve(engine, ask("a", None, max_tokens=20, cache_salt="other")))
    serve(engine, ask("b", Fusion(policy="pie", ratio=0.0, select_layer=1), max_tokens=20))
    found = serve(engine, ask("c", None, max_tokens=20))
    assert found[-1].num_cached_tokens == FRONT // 16 * 16
    assert text(found) == plain


def test_a_prompt_with_chunks_takes_no_prefix_beyond_its_first(engine: Engine) -> None:
    serve(engine, ask("a", None))
    fused = serve(engine, ask("b", A3))
    assert fused[-1].num_cached_tokens == FRONT // 16 * 16


def test_after_a_restart_the_first_prompt_brings_chunks_into_memory(tmp_path: Path) -> None:
    """Also the layers that a policy which looks computes in full, and never asks for."""
    fusion = Fusion(policy="a3", ratio=0.2, select_layer=2)
    engine = make_engine(tmp_path)
    wanted = text(serve(engine, ask("a", fusion)))
    engine.shutdown()
    again = make_engine(tmp_path)
    assert text(serve(again, ask("b", fusion))) == wanted
    again.scheduler.documents._library.store.finish_reads()
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    found = serve(again, ask("c", fusion))
    assert text(found) == wanted
    assert found[-1].figures.get("reused_tokens", 0) > 0
    again.shutdown()


def test_documents_that_are_stored_already_give_up_no_memory(engine: Engine) -> None:
    serve(engine, ask("a", A3))
    store = engine.scheduler.documents._library.store
    before, kept = store.counts(), store.bytes_in_memory
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    run(engine)
    assert STORED[-1].num_known == len(CHUNKS)
    assert (store.counts(), store.bytes_in_memory) == (before, kept)


def test_chunks_that_gave_no_finite_logits_are_computed_anew(engine: Engine) -> None:
    """Whatever made them: floating rows are stored as they are."""
    wanted = text(serve(engine, ask("a", A3)))
    assert engine.scheduler.documents is not None
    documents = engine.scheduler.documents
    store, key = documents._library.store, documents._name(np.array(CHUNKS[1]), "")
    store.delete(key).result()
    broken = np.full(store.folder.shape.layer_bytes(SIZES[1]) // 4, np.nan, np.float32).view(np.uint8)
    assert store.put(key, [broken] * SHAPE.num_layers).result()
    assert serve(engine, ask("b", A3))[-1].finish_reason == "error"
    store.delete(documents._name(np.array([1]), "")).result()  # behind what was asked for before
    assert text(serve(engine, ask("c", A3))) == wanted


def test_those_that_wait_for_long_have_no_chunks_computed_beyond_what_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first in the queue they are, so that it can begin as soon as it may."""
    monkeypatch.setattr("transfer.chunks.chunk_library.LEAST_AHEAD_BYTES", 1)
    engine = make_engine(tmp_path, memory_limit_gib=0.0, disk_limit_gib=1e-9)
    library = engine.scheduler.documents._library
    others = [ask(f"plain{number}", None, max_tokens=400, cache_salt=str(number)) for number in range(4)]
    engine.submit(others)
    while len(engine.scheduler.roster.running) < 4:
        engine.step()
    engine.submit([ask(f"{number}", A3, chunks=salted(number)) for number in range(3)])
    for _ in range(60):
        engine.step()
    assert len(engine.scheduler.roster.running) == 4
    own = library.store.folder.shape
    assert library._bytes_kept == sum(own.chunk_bytes(size) for size in SIZES), "the first one's alone"
    engine.store_chunks(StoreChunks("s", [pack_tokens(draw(20, 99))], ""))
    engine.cancel([one.request_id for one in others])
    STORED.clear()
    told = run(engine)
    assert len({tuple(text(told[f"{number}"])) for number in range(3)}) == 1
    assert [one.request_id for one in STORED] == ["s"]
    assert library.room_bytes == 1
    engine.shutdown()


def test_chunks_to_store_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.chunks.chunk_library.LEAST_AHEAD_BYTES", 1)
    engine = make_engine(tmp_path, memory_limit_gib=0.0)
    library, may_go, real = engine.scheduler.documents._library, threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert may_go.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    chunks = [draw(90, 40 + number) for number in range(3)]
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in chunks], ""))
    STORED.clear()
    for _ in range(40):
        engine.step()
    assert library._bytes_kept == library.store.folder.shape.chunk_bytes(90), "one, which the disk has not taken"
    may_go.set()
    run(engine)
    assert [(one.num_stored, one.reason) for one in STORED] == [(3, "")]
    assert library.room_bytes == 1
    engine.shutdown()


def test_chunks_that_are_not_on_the_disk_yet_are_not_computed_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, real = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert may_go.wait(20)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    plans = see_plans(engine, monkeypatch)
    STORED.clear()
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    while engine.scheduler.documents._to_store or engine.scheduler.documents._computing:
        engine.step()
    engine.store_chunks(StoreChunks("t", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    engine.submit([ask("a", A3)])
    told: list[Delta] = []
    while not told or told[-1].finish_reason is None:
        told += engine.step()
    assert told[-1].figures.get("reused_tokens", 0) > 0
    assert STORED + engine.take_stored() == [], "nothing is on the disk"
    may_go.set()
    run(engine)
    assert sorted((one.request_id, one.num_stored, one.num_known) for one in STORED) == [("s", 3, 0), ("t", 3, 0)]
    captured = [prompt for plan in plans for job in plan.new_jobs for prompt in job.prompts if prompt.capture]
    assert len(captured) == len(CHUNKS)


def salted(number: int) -> list[ChunkSpan]:
    return [structs.replace(span, salt=str(number)) for span in ask("", None).chunks]


def test_who_waits_for_chunks_is_passed_a_bounded_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' prompts take every job as it becomes free, which the chunks need as well."""
    monkeypatch.setattr("scheduler.admission.admission._MOST_BYPASSES", 5)
    engine = make_engine(tmp_path, max_jobs=1)
    engine.submit([ask("documents", A3, max_tokens=1)])
    told: list[str] = []
    for number in range(200):
        if len(engine.scheduler._admission.waiting) < 3:
            other = {"prompt": pack_tokens(draw(20, 100 + number)), "chunks": []}
            engine.submit([structs.replace(ask(f"{number}", None, max_tokens=1), **other)])
        told += [delta.request_id for delta in engine.step()]
        if "documents" in told:
            break
    assert told[-1] == "documents"
    assert 4 < len(told) < 20
    run(engine)
    engine.shutdown()


@pytest.mark.parametrize("has_begun", [False, True])
def test_chunks_to_store_are_overtaken_by_a_bounded_number_of_requests(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' prompts never end. has_begun: there was nothing else to do for a moment, and a job of them stands."""
    monkeypatch.setattr("scheduler.prefill.document_chunks.MOST_OVERTAKEN", 5)
    engine = make_engine(tmp_path, max_jobs=2 if has_begun else 1)
    STORED.clear()
    told: list[str] = []

    def serve_others(number: int) -> None:
        if len(engine.scheduler._admission.waiting) < 3:
            other = {"prompt": pack_tokens(draw(20, 100 + number)), "chunks": []}
            engine.submit([structs.replace(ask(f"{number}", None, max_tokens=1), **other)])
        told.extend(delta.request_id for delta in engine.step())

    if not has_begun:
        serve_others(0)
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS[:2]], ""))
    if has_begun:
        engine.step()
        assert engine.scheduler.documents._computing
    for number in range(1, 300):
        serve_others(number)
        STORED.extend(engine.take_stored())
        if not engine.scheduler.documents.has_work:
            break
        assert len(told) < 40, "they wait for ever"
    assert [one.num_stored for one in STORED] == [2]
    assert len(told) > 5
    run(engine)
    engine.shutdown()


def test_chunks_to_store_that_are_overtaken_still_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for them meanwhile."""
    monkeypatch.setattr("scheduler.prefill.document_chunks.MOST_OVERTAKEN", 0)
    monkeypatch.setattr("transfer.chunks.chunk_library.LEAST_AHEAD_BYTES", 0)
    engine = make_engine(tmp_path, memory_limit_gib=0.0)
    engine.store_chunks(StoreChunks("s", [pack_tokens(CHUNKS[0])], ""))
    engine.submit([ask("a", None)])
    deltas = [delta for _ in range(200) for delta in engine.step()]
    assert deltas
    assert text(deltas)
    assert engine.take_stored() == []
    engine.shutdown()


def see_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    plans: list[StepPlan] = []
    launch = engine._runner.launch

    def see(plan: StepPlan) -> InFlight:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", see)
    return plans


def test_units_of_a_fused_prompt_are_those_of_its_stages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(engine, ask("a", A3))
    plans = see_plans(engine, monkeypatch)
    serve(engine, ask("b", A3))
    units = [unit for plan in plans for unit in plan.units if isinstance(unit, PrefillUnit)]
    total = FRONT % 16 + sum(SIZES) + len(SIZES) + QUESTION
    few = FRONT % 16 + len(SIZES) + QUESTION + round(0.2 * (FRONT + sum(SIZES) + len(SIZES) + QUESTION))
    ends = {layer: max(unit.end for unit in units if unit.layer == layer) for layer in range(4)}
    assert ends == {0: total, 1: few, 2: few, 3: few}
    assert {unit.method == FUSED for unit in units if unit.layer} == {True}
    assert {unit.method == FUSED for unit in units if not unit.layer} == {False}
    assert all(unit.end - unit.begin <= 96 for unit in units)


def test_several_prompts_wait_for_one_computation(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = see_plans(engine, monkeypatch)
    engine.submit([ask("a", A3), ask("b", A3, order=(1, 0))])
    run(engine)
    jobs = [job for plan in plans for job in plan.new_jobs]
    computed = [prompt.token_ids.tolist() for job in jobs for prompt in job.prompts if prompt.capture is not None]
    assert sorted(computed) == sorted(CHUNKS)


def test_prompts_that_are_cancelled_hold_nothing(engine: Engine) -> None:
    for steps in (0, 1, 3, 6, 9):
        engine.submit([ask("a", A3, cache_salt=str(steps))])
        for _ in range(steps):
            engine.step()
        engine.cancel(["a"])
        run(engine)
        assert engine._runner.num_prefill_jobs == 0


def test_chunks_are_stored_behind_requests_and_answered_once(engine: Engine) -> None:
    STORED.clear()
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    engine.submit([ask("a", None, max_tokens=2)])
    first = engine.step()
    while not first:
        first = engine.step()
    assert engine.scheduler.documents._library.store.counts()["stored"] == 0, "a request goes first"
    run(engine)
    assert [(one.request_id, one.num_stored, one.num_known, one.reason) for one in STORED] == [("s", 3, 0, "")]
    engine.store_chunks(StoreChunks("t", [pack_tokens(chunk) for chunk in [*CHUNKS, draw(20, 99)]], ""))
    engine.store_chunks(StoreChunks("u", [pack_tokens(CHUNKS[0])], "of another key"))
    engine.store_chunks(StoreChunks("v", [], ""))
    engine.store_chunks(StoreChunks("w", [pack_tokens(draw(97, 3))], ""))
    run(engine)
    answers = {one.request_id: (one.num_stored, one.num_known) for one in STORED[1:]}
    assert answers == {"t": (1, 3), "u": (1, 0), "v": (0, 0), "w": (0, 0)}
    assert "a chunk of 97 tokens; wanted 1 to 96" in next(one.reason for one in STORED if one.request_id == "w")
    assert serve(engine, ask("b", A3))[-1].figures.get("reused_tokens", 0) > 0


def named(number: int, salt: str = "") -> NamedChunk:
    return NamedChunk(digest_tokens(CHUNKS[number]), len(CHUNKS[number]), salt)


def test_chunks_that_no_document_has_leave_the_store_and_others_stay(engine: Engine) -> None:
    STORED.clear()
    documents = engine.scheduler.documents
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    run(engine)
    engine.drop_chunks(DropChunks([named(0), named(1, "of another key")]))
    engine.store_chunks(StoreChunks("t", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    run(engine)
    assert (STORED[1].num_stored, STORED[1].num_known) == (1, 2)
    answer = text(serve(engine, ask("before", A3, max_tokens=4)))
    engine.submit([ask("a", A3, max_tokens=4)])
    begun = engine.step()
    engine.drop_chunks(DropChunks([named(number) for number in range(3)]))  # in use
    assert text([*begun, *run(engine)["a"]]) == answer
    documents._library.store.delete(documents._name(CHUNKS[0], "")).result()
    assert list(documents._library.store.folder.root.rglob("*.kv")) == []
    assert text(serve(engine, ask("b", A3, max_tokens=4))) == answer


def test_what_is_dropped_before_it_is_computed_or_written_is_not_stored(engine: Engine) -> None:
    STORED.clear()
    store = engine.scheduler.documents._library.store
    engine.store_chunks(StoreChunks("s", [pack_tokens(chunk) for chunk in CHUNKS], ""))
    engine.drop_chunks(DropChunks([named(0)]))
    engine.step()
    engine.drop_chunks(DropChunks([named(1)]))
    engine.store_chunks(StoreChunks("t", [pack_tokens(CHUNKS[2])], ""))
    run(engine)
    store.delete(engine.scheduler.documents._name(CHUNKS[0], "")).result()
    left = {path.stem for path in store.folder.root.rglob("*.kv")}
    assert left == {engine.scheduler.documents._name(CHUNKS[2], "").name}
    assert "deleted meanwhile" in next(one.reason for one in STORED if one.request_id == "s")


def test_what_is_left_again_after_it_was_dropped_in_the_making_is_stored(engine: Engine) -> None:
    """Also while the chunk that was dropped is still to be written, and then deleted."""
    STORED.clear()
    documents = engine.scheduler.documents
    store, may_write = documents._library.store, threading.Event()
    again = [pack_tokens(CHUNKS[0])]
    engine.store_chunks(StoreChunks("s", again, ""))
    engine.step()
    assert documents._computing, "it is being computed"
    engine.drop_chunks(DropChunks([named(0)]))
    store.delete(documents._name(CHUNKS[1], "")).result()  # behind what was to be deleted
    store._writer.submit(may_write.wait)
    while documents._computing:
        engine.step()
    engine.store_chunks(StoreChunks("t", again, ""))
    engine.step()
    may_write.set()
    run(engine)
    store.delete(documents._name(CHUNKS[1], "")).result()  # behind all that is to be written
    assert [one.num_stored for one in STORED if one.request_id == "t"] == [1]
    assert [path.stem for path in store.folder.root.rglob("*.kv")] == [documents._name(CHUNKS[0], "").name]


def test_without_room_on_the_disk_prompts_are_served_on(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, disk_limit_gib=1e-9, memory_limit_gib=0.0)
    other = make_engine(tmp_path / "other")
    STORED.clear()
    assert text(serve(engine, ask("a", A3))) == text(serve(other, ask("a", A3)))
    engine.store_chunks(StoreChunks("s", [pack_tokens(CHUNKS[0])], ""))
    run(engine)
    assert (STORED[0].num_stored, STORED[0].num_known) == (0, 0)
    assert "disk_limit_gib" in STORED[0].reason
    engine.shutdown()
    other.shutdown()


def test_what_a_full_disk_did_not_take_is_stored_when_it_is_asked_for_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has it, but a restart would lose it; metrics tell of both."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    ask_for = StoreChunks("s", [pack_tokens(CHUNKS[0])], "")
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        engine.store_chunks(ask_for)
        run(engine)
    assert (STORED[-1].num_stored, STORED[-1].num_known) == (0, 0)
    engine.store_chunks(ask_for)
    run(engine)
    assert (STORED[-1].num_stored, STORED[-1].num_known, STORED[-1].reason) == (1, 0, "")
    told = engine.stats().chunks
    assert (told.written, told.refused, told.evicted, told.set_aside, told.lost) == (1, 1, 0, 0, 0)
    assert told.memory_bytes > 0
    engine.store_chunks(ask_for)
    run(engine)
    assert (STORED[-1].num_stored, STORED[-1].num_known) == (0, 1)


def test_what_cannot_be_served_is_refused_by_name(engine: Engine) -> None:
    for fusion, words in (
        (Fusion(policy="a4", ratio=0.1, select_layer=1), "unknown policy 'a4'; known: a3, random"),
        (Fusion(policy="a3", ratio=0.1, select_layer=4), "fusion.select_layer: asked 4, the model has layers 0 to 3"),
    ):
        with pytest.raises(TooLargeError, match=words):
            engine.submit([ask("a", fusion)])


def test_a_scored_prompt_is_computed_whole(engine: Engine) -> None:
    scored = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    deltas = serve(engine, ask("a", A3, sampling=scored))
    assert (deltas[-1].figures.get("reused_tokens", 0), deltas[-1].figures.get("recomputed_tokens", 0)) == (0, 0)
    assert deltas[0].prompt_logprobs is not None


def test_a_fused_context_is_offloaded_and_is_read_there(tmp_path: Path) -> None:
    host = HostConfig(resident_tokens=64, residency="fixed", memory_limit_gib=0.2, dense_layers=(0,), rows="bfloat16")
    engine = make_engine(tmp_path, host)
    wanted = text(serve(engine, ask("a", A3, max_tokens=6)))
    assert text(serve(engine, ask("b", A3, max_tokens=6))) == wanted
    down = serve(engine, ask("c", A3, max_tokens=6, attention_profile="offloaded"))
    whole = serve(engine, ask("d", None, max_tokens=6, attention_profile="offloaded"))
    again = serve(
        engine, ask("e", Fusion(policy="a3", ratio=1.0, select_layer=1), max_tokens=6, attention_profile="offloaded")
    )
    assert text(again) == text(whole)
    assert down[-1].figures.get("reused_tokens", 0) > 0
    assert text(down) == wanted
    engine.shutdown()


def flip(file: Path, draw: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    data[int(draw.integers(len(data)))] ^= 1 << int(draw.integers(8))
    file.write_bytes(data)


def cut(file: Path, draw: np.random.Generator) -> None:
    os.truncate(file, int(draw.integers(file.stat().st_size)))


def exchange(file: Path, draw: np.random.Generator) -> None:
    others = [other for other in file.parent.glob("*.kv") if other != file]
    file.write_bytes(others[int(draw.integers(len(others)))].read_bytes())


def remove(file: Path, draw: np.random.Generator) -> None:
    file.unlink()


@pytest.mark.parametrize(("damage", "policy"), [(flip, "a3"), (cut, "pie"), (exchange, "a3"), (remove, "pie")])
def test_whatever_happens_to_files_answers_are_those_of_whole_ones(
    damage: Callable[[Path, np.random.Generator], None], policy: str, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path, memory_limit_gib=0.0)
    fusion = Fusion(policy=policy, ratio=0.2 if policy == "a3" else 0.0, select_layer=1)
    wanted = text(serve(engine, ask("a", fusion)))
    draw, root = np.random.default_rng(5), next(tmp_path.glob("?" * 32))
    for number in range(4):
        files = sorted(root.glob("*.kv"))
        damage(files[number % len(files)], draw)
        assert text(serve(engine, ask(f"b{number}", fusion))) == wanted
        engine.scheduler.documents._library.store.delete(
            ChunkKey("none", 1, "0" * 32)
        ).result()  # behind what is written
        assert len(list(root.glob("*.kv"))) == len(CHUNKS), "what was lost is stored again"
    assert text(serve(engine, ask("c", fusion))) == wanted
    engine.shutdown()


def test_two_engines_share_a_folder_that_has_room_for_few_chunks(tmp_path: Path) -> None:
    room_gib = 2.5 * max(SIZES) * 4 * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.dim / 2**30
    engines = [make_engine(tmp_path, memory_limit_gib=0.0, disk_limit_gib=room_gib) for _ in range(2)]
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]
    wanted = {order: text(serve(engines[0], ask(f"{order}", A3, order))) for order in orders}
    for number, order in enumerate(2 * orders):
        for engine in engines:
            engine.submit([ask(f"{number}", A3, order)])
        told: list[list[int]] = [[], []]
        while any(engine.has_work for engine in engines):
            for engine, tokens in zip(engines, told, strict=True):
                for delta in engine.step() if engine.has_work else ():
                    assert delta.finish_reason != "error"
                    tokens += delta.token_ids
        assert told == [wanted[order]] * 2
    for engine in engines:
        engine.shutdown()
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*.kv")) <= room_gib * 2**30


MOMO = {"method": "momo", "gamma": 16, "key_block": 16, "query_block": 16, "dense_until_tokens": 32}


def test_what_is_computed_in_full_goes_by_the_profiles_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    attend = Momo.attend

    def watched(self: Momo, query: PrefillQuery) -> Attended:
        assert query.begin is not None
        seen.append((query.layer, query.begin, query.begin + len(query.query)))
        return attend(self, query)

    monkeypatch.setattr(Momo, "attend", watched)
    profiles = {
        "every-block": Composition.model_validate({"prefill": MOMO | {"k": 64, "k_trim": 64}}),
        "few": Composition.model_validate({"prefill": MOMO | {"k": 1, "k_trim": 2}}),
    }
    engine = make_engine(tmp_path, profiles=profiles)
    fusion = Fusion(policy="a3", ratio=0.2, select_layer=2)
    with_logprobs = SamplingParams(temperature=0.0, num_logprobs=1)
    wanted = serve(engine, ask("a", fusion, sampling=with_logprobs))
    assert not seen
    for number in range(2):  # the second one begins behind the text in front that the first one left
        found = serve(engine, ask(f"b{number}", fusion, sampling=with_logprobs, attention_profile="every-block"))
        assert text(found) == text(wanted)
        np.testing.assert_allclose(drawn_logprobs(found), drawn_logprobs(wanted), atol=FUSED_LOGIT_ATOL)
        assert {layer for layer, _, _ in seen} == {0, 1}, "those before the layer that looks"
        first = sorted((begin, end) for layer, begin, end in seen if layer == 0)
        assert first[-1][1] == len(engine_prompt(ask("", fusion)))
        assert [end for _, end in first[:-1]] == [begin for begin, _ in first[1:]]
        seen.clear()
    few = serve(engine, ask("c", fusion, sampling=with_logprobs, attention_profile="few"))
    apart = np.abs(np.subtract(drawn_logprobs(few)[:1], drawn_logprobs(wanted)[:1]))
    assert apart.max() > FUSED_LOGIT_ATOL, "few blocks are not all of them"
    engine.shutdown()


def drawn_logprobs(deltas: list[Delta]) -> list[float]:
    return [one.logprob for delta in deltas for one in delta.logprobs or []]


def engine_prompt(request: EngineRequest) -> np.ndarray:
    return np.frombuffer(request.prompt, np.int32)


def test_a_fused_context_is_hashed_and_sampled(tmp_path: Path) -> None:
    """One bit a table, so that all keys collide in two of them and a sample is all there is."""
    host = HostConfig.model_validate({
        "resident_tokens": 64, "residency": "fixed", "memory_limit_gib": 0.2, "dense_layers": (0,), "rows": "bfloat16",
        "sampled": {"bits_per_table": 1, "num_tables": 64},
    })  # fmt: skip
    engine = make_engine(tmp_path, host, checks=True)
    read = serve(engine, ask("a", A3, max_tokens=6, attention_profile="offloaded"))
    sampled = serve(engine, ask("b", A3, max_tokens=6, attention_profile="sampled"))
    assert sampled[-1].figures.get("reused_tokens", 0) > 0
    assert text(sampled) == text(read)
    engine.shutdown()


def test_a_fused_context_is_indexed(tmp_path: Path) -> None:
    """A budget of everything gives what reading all gives; with few tokens the others are estimated, and that shows."""
    host = HostConfig(resident_tokens=0, residency="fixed", memory_limit_gib=0.2, dense_layers=(0,), rows="bfloat16")
    own = {"method": "indexed", "budget_tokens": 64, "least_tokens": 16, "min_context_tokens": 0, "rings": 1}
    profiles = {
        "all": Composition.model_validate({"host": own | {"budget_share": 1.0, "budget_tokens": 1024}}),
        "few": Composition.model_validate({"host": own | {"budget_share": 0.05}}),
    }
    engine = make_engine(tmp_path, host, checks=True, profiles=profiles)
    how = {"order": (0, 1, 2, 1, 0), "max_tokens": 6, "sampling": SamplingParams(temperature=0.0, num_logprobs=1)}
    read, whole, few = (
        serve(engine, ask(profile, A3, attention_profile=profile, **how)) for profile in ("offloaded", "all", "few")
    )
    assert whole[-1].figures["reused_tokens"] > 0
    assert whole[-1].figures["index_heads"] > 0
    assert text(whole) == text(read)
    np.testing.assert_allclose(drawn_logprobs(whole), drawn_logprobs(read), atol=FUSED_LOGIT_ATOL)
    assert few[-1].figures["index_estimated_mass"] > 0
    apart = np.abs(np.subtract(drawn_logprobs(few)[1:2], drawn_logprobs(read)[1:2]))
    assert apart.max() > FUSED_LOGIT_ATOL, "few tokens are not all of them"
    engine.shutdown()


def test_one_that_is_preempted_is_fused_again(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    wanted = text(serve(engine, ask("a", A3, max_tokens=30)))
    engine.submit([ask("b", A3, max_tokens=30)])
    tokens: list[int] = []
    while len(tokens) < 9:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    engine.scheduler.roster.preempt_last(engine.scheduler.roster.running)
    tokens += [token for delta in run(engine)["b"] for token in delta.token_ids]
    assert len(tokens) == 30
    assert tokens[:9] == wanted[:9]
    engine.shutdown()


def test_chunks_are_named_by_what_their_keys_depend_on() -> None:
    shape = named_shape("tiny")
    plain = chunk_kv_key(shape, "float32", 2048, "")
    assert chunk_kv_key(shape, "float32", 4096, "") == plain
    assert chunk_kv_key(shape, "bfloat16", 2048, "") != plain
    assert chunk_kv_key(shape, "float32", 2048, "integers") != plain
    dynamic = replace(
        shape, rope=RopeScaling("dynamic", 1e4, {"factor": 2.0, "original_max_position_embeddings": 1024.0})
    )
    assert len({plain, *(chunk_kv_key(dynamic, "float32", tokens, "") for tokens in (2048, 4096))}) == 3


SCORED = SamplingParams(temperature=0.0, num_logprobs=20)


def logprobs(engine: Engine, request: EngineRequest) -> dict[int, float]:
    """Of the first token drawn, the likeliest 20."""
    first = serve(engine, request)[0].logprobs
    return dict(first[0].top)


def off(some: dict[int, float], others: dict[int, float]) -> float:
    return max(abs(some[token] - others.get(token, -99.0)) for token in list(some)[:5])


STATES = "depends on all tokens in front of it"
REFUSED = {"tiny-gemma4": "KV heads of their own", "tiny-gemma4-shared": "keys and values of earlier layers",
           "tiny-glm4-moe-lite": "leaves a latent row", "tiny-mistral4": "leaves a latent row",
           "tiny-lfm2": STATES, "tiny-granite-hybrid": STATES, "tiny-nemotron-h": STATES,
           "tiny-muse-glimmer": "attention are gated",
           "tiny-qwen3-next": STATES, "tiny-qwen3.5": STATES, "tiny-qwen3.5-moe": STATES}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMED_SHAPES if name.startswith("tiny") and name not in REFUSED])
def test_every_familys_chunks_are_placed_as_if_they_had_been_computed_there(name: str, tmp_path: Path) -> None:
    """Norms of keys, biases, windows, scaled positions: one chunk behind nothing, and all tokens computed again."""
    engine = make_engine(tmp_path, model=ModelConfig(random_weights=name))
    prompt = pack_tokens([*CHUNKS[0], *draw(QUESTION, 2)])
    alone = {"prompt": prompt, "chunks": [ChunkSpan(0, SIZES[0])], "sampling": SCORED}
    wanted = logprobs(engine, structs.replace(ask("a", None, max_tokens=1), **alone))
    pie = Fusion(policy="pie", ratio=0.0, select_layer=1)
    for again in ("b", "c"):  # computed for it, and found
        got = logprobs(engine, structs.replace(ask(again, pie, max_tokens=1), **alone))
        assert off(wanted, got) < FUSED_LOGIT_ATOL
    whole = logprobs(engine, ask("d", None, max_tokens=1, sampling=SCORED))
    for policy in ("a3", "random"):
        fusion = Fusion(policy=policy, ratio=1.0, select_layer=1)
        assert off(whole, logprobs(engine, ask(policy, fusion, max_tokens=1, sampling=SCORED))) < FUSED_LOGIT_ATOL
    engine.shutdown()


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_chunks_of_models_whose_layers_are_not_alike_are_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"^documents: .*{why}.* in {name}, so its chunks cannot be stored"):
        make_engine(tmp_path, model=ModelConfig(random_weights=name))
