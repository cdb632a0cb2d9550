"""Run `tandem bench documents`: time the first tokens of prompts with stored documents, by policy and place of chunks.

A prompt has chunks of 512 random tokens, in a new order each time, with text before and a question after them. Chunks
are read from host memory, from the page cache, or from the disk (dropped from the page cache before). Also timed are
the choice of tokens alone, a conversation's next turn, and another profile's prefill of the whole prompt. Gate: on the
timed model, `pie` with a single chunk and no text before it draws what a whole prefill draws. Floor: the FLOPs that are
computed, or the rows over the link, whichever takes longer. The most important rows come first, and nothing new begins
when the time is over.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from bench.benchmark_rows import Row, announce, measure, require, summarise
from bench.documents_floors import drop_from_page_cache, fused_cost, plan_bench_prompt
from bench.engine_patches import forget_chunks
from bench.rates import device_name, measure_device_rates, measure_host_matmul
from gpu.fusion.fusion_plan import VANILLA
from gpu.fusion.token_choice import choose, question_scores
from gpu.model.architecture import Architecture, load_architecture
from gpu.profiles import get_profile, resolve_profiles
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.fusion_labels import UnknownLabelError, parse_fusions
from scheduler.messages import ChunkSpan, ChunksStored, EngineRequest, Fusion, StoreChunks, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from scheduler.planning.step_bytes import StepBytes
from server.deployment import Deployment
from transfer.chunks.chunk_store import ChunkStore
from transfer.machine import probe_machine

CHUNK_TOKENS, FRONT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 512, 32, 64, 16
SHORTEST_TOKENS = FRONT_TOKENS + CHUNK_TOKENS + QUESTION_TOKENS
EXACT = "exact"
GREEDY = SamplingParams(temperature=0.0)
Place = Literal["memory", "memory again", "page cache", "disk"]
"""memory again: in memory after one prompt has read them from files, as after a restart."""
Times = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class DocumentsBenchmark:
    """The settings of `tandem bench documents`.

    lengths: of prompts in tokens. policies: labels of `scheduler.fusion_labels`; the first one is used for all rows but
    first tokens. ratio: for policies that have one. repeats: times are medians of so many. profile: another profile
    whose prefill is timed, or None. seconds: no measurement begins later than this after the start; None: no limit.
    """

    lengths: tuple[int, ...]
    policies: tuple[str, ...]
    places: tuple[Place, ...]
    ratio: float
    repeats: int
    profile: str | None
    seconds: float | None


def run_documents_benchmark(
    benchmark: DocumentsBenchmark, deployment: Deployment, console: Console
) -> Iterator[list[Row]]:
    """Yield the rows so far, after each kind and length.

    Raises GateError before anything is timed, UnknownLabelError for an unknown policy or vanilla alone, ProfileError
    for an unknown profile, and TooLargeError for prompts that this deployment cannot serve.
    """
    began = time.monotonic()
    if benchmark.profile is not None:
        profiles = resolve_profiles(deployment.all_profiles, deployment.host)
        get_profile(benchmark.profile, profiles, "profile")
    fusions = {label: fusion for label in benchmark.policies for fusion in parse_fusions(label, [benchmark.ratio])}
    if not fusions:
        got = " ".join(benchmark.policies)
        raise UnknownLabelError(f"policies: got {got!r}; wanted one that reuses chunks, as 'a3'")
    machine = probe_machine()
    device = torch.device("cpu" if machine.gpu is None or deployment.gpu.device == "cpu" else "cuda")
    if device.type == "cuda":
        rates = measure_device_rates(device)
    else:
        rates = {"host_matmul_tflop_s": measure_host_matmul({torch.float32})}
    scheduler = deployment.scheduler.model_copy(update={"prefix_cache": False})
    deployment = deployment.model_copy(update={"scheduler": scheduler})
    architecture = load_architecture(deployment.model)
    plan = plan_engine(deployment, architecture, machine)
    engine, _ = load_engine(deployment, plan, lambda *_: None)
    console.print(f"loaded after {time.monotonic() - began:.0f} s", highlight=False)
    step = StepBytes(architecture, plan, None)
    bench = _Bench(benchmark, fusions, deployment, engine, step, rates, device, console)
    end = math.inf if benchmark.seconds is None else began + benchmark.seconds
    try:
        bench.check()
        rows: list[Row] = []
        for part in bench.parts():
            for row in part:
                rows.append(row)
                if time.monotonic() > end:
                    console.print(f"--seconds {benchmark.seconds:g} are over: that was all", highlight=False)
                    yield rows
                    return
            yield rows
    finally:
        engine.shutdown()


class _Bench:
    def __init__(
        self, benchmark: DocumentsBenchmark, fusions: dict[str, Fusion], deployment: Deployment, engine: Engine,
        step: StepBytes, rates: dict[str, float], device: torch.device, console: Console,
    ) -> None:  # fmt: skip
        self._benchmark, self._fusions, self._deployment, self._engine = benchmark, fusions, deployment, engine
        self._architecture: Architecture = step.architecture
        self._step, self._rates, self._device, self._console = step, rates, device, console
        self._draw = np.random.default_rng(1)
        assert engine.scheduler.documents is not None, "documents: a deployment with a section of that name"
        self._store: ChunkStore = engine.scheduler.documents._library.store
        self._chunks = self._draw_chunks(self._num_chunks(max(benchmark.lengths)))
        self._first = next(iter(fusions.items()))
        self._whole: dict[int, Times] = {}  # by length

    def check(self) -> None:
        """Check that a stored chunk alone draws the tokens that a whole prefill draws; then store all chunks."""
        (ids,) = self._draw_chunks(1)
        span = [ChunkSpan(0, len(ids))]
        whole = self._answer(ids, [], None, EXACT, 4)
        (pie,) = parse_fusions("pie", [])
        alone = self._answer(ids, span, pie, EXACT, 4)
        found = self._answer(ids, span, pie, EXACT, 4)
        require(alone == found, "a chunk that is stored gives the answer of one that was just computed")
        require(whole[0] == alone[0], "one chunk behind nothing gives the first token of a whole prefill")
        self._engine.store_chunks(StoreChunks("bench", [pack_tokens(chunk) for chunk in self._chunks], ""))
        stored: list[ChunksStored] = []
        while not stored:
            self._engine.step()
            stored = self._engine.take_stored()
        require(not stored[0].reason, f"all chunks are stored: {stored[0].reason}")

    def parts(self) -> Iterator[Iterator[Row]]:
        """Return iterators over the rows, in the order of measurement; a row is measured when it is taken."""
        lengths, places = self._benchmark.lengths, self._benchmark.places
        yield (self.selection_row(length) for length in lengths)
        yield from (self.first_token_rows(length, "memory") for length in lengths)
        yield from (self.turn_rows(length) for length in lengths)
        for place in [place for place in places if place != "memory"]:
            yield from (self.first_token_rows(length, place) for length in lengths)

    def selection_row(self, length: int) -> Row:
        """Time the scores of a question over a layer's keys, and the choice of tokens by them."""
        shape, dtype = self._architecture, torch.bfloat16 if self._device.type == "cuda" else torch.float32
        query = torch.randn(QUESTION_TOKENS, shape.num_heads, shape.dim, dtype=dtype, device=self._device)
        keys = torch.randn(shape.num_kv_heads, length, shape.dim, dtype=dtype, device=self._device)
        least = torch.full((length,), -torch.inf, device=self._device)

        def select() -> None:
            scores = question_scores(query, keys, length - QUESTION_TOKENS, 0.1)
            choose(scores, least, max(1, round(self._benchmark.ratio * length)))

        timing = measure(select, self._device, 3, 20)
        num_bytes = keys.numel() * keys.element_size()
        gb_s = self._rates.get("device_stream_gb_s")
        return self._row(
            "selection", f"{QUESTION_TOKENS} over {length:,}", (timing.ms, timing.p10, timing.p90),
            "none measured" if gb_s is None else f"{num_bytes / 1e6:.1f} MB of keys over {gb_s:.0f} GB/s",
            None if gb_s is None else num_bytes / gb_s / 1e6, None, {},
        )  # fmt: skip

    def first_token_rows(self, length: int, place: Place) -> Iterator[Row]:
        """Yield first tokens by policy. At a length's first call, a row of the whole prompt comes before them."""
        if length not in self._whole:
            floor, floor_ms = self._floor(length, None)
            announce(self._console, f"{VANILLA}, {length:,} tokens", floor, floor_ms)
            self._whole[length] = self._time(length, None, "memory", EXACT)
            yield self._row(VANILLA, f"{length:,} tokens", self._whole[length], floor, floor_ms, None, {})
        for label, fusion in self._fusions.items() if place in self._benchmark.places else ():
            yield self._first_token_row(label, length, fusion, place, EXACT)

    def turn_rows(self, length: int) -> Iterator[Row]:
        """Yield the next turn of a conversation about documents, and a first token with the other profile's prefill."""
        label, fusion = self._first
        if self._benchmark.profile is not None:
            yield self._first_token_row(label, length, fusion, "memory", self._benchmark.profile)
        floor, floor_ms = self._floor(length, fusion)
        times = []
        for number in range(self._benchmark.repeats + 1):
            prompt, spans = self._prompt(length, number)
            answer = self._answer(prompt, spans, fusion, EXACT, ANSWER_TOKENS)
            times.append(self._first_token([*prompt, *answer, *self._ids(QUESTION_TOKENS)], spans, fusion, EXACT))
        shape, whole = f"{length:,} tokens, memory", self._whole[length][0]
        yield self._row(f"{label}, next turn", shape, _of(times[1:]), floor, floor_ms, whole, {"ratio": fusion.ratio})

    def _first_token_row(self, label: str, length: int, fusion: Fusion, place: Place, profile: str) -> Row:
        name = label if profile == EXACT else f"{label}, profile {profile}"
        floor, floor_ms = self._floor(length, fusion)
        announce(self._console, f"{name}, {length:,} tokens", floor, floor_ms)
        times, whole = self._time(length, fusion, place, profile), self._whole[length][0]
        shape = f"{length:,} tokens, {place}"
        self._console.print(
            f"{name}, {shape}: {times[0]:.1f} ms, {times[0] / floor_ms:.2f} of its floor, "
            f"{whole / times[0]:.2f} times vanilla", highlight=False,
        )  # fmt: skip
        return self._row(name, shape, times, floor, floor_ms, whole, {"ratio": fusion.ratio})

    def _time(self, length: int, fusion: Fusion | None, place: Place, profile: str) -> Times:
        """Return milliseconds to the first token. If chunks are read from memory, a first run warms up."""
        num_warmups = 1 if place == "memory" else 0
        times = []
        for number in range(num_warmups + self._benchmark.repeats):
            prompt, spans = self._prompt(length, number)
            if place != "memory":
                forget_chunks(self._store)
            if place == "disk":
                folder = self._store.folder
                drop_from_page_cache((folder.root / folder.model).glob("*.kv"))
            if place == "memory again":
                self._first_token(prompt, spans, fusion, profile)
                self._store.finish_reads()
            times.append(self._first_token(prompt, spans, fusion, profile))
        return _of(times[num_warmups:])

    def _first_token(self, prompt: list[int], spans: list[ChunkSpan], fusion: Fusion | None, profile: str) -> float:
        began = time.perf_counter()
        self._answer(prompt, spans, fusion, profile, 1)
        return 1e3 * (time.perf_counter() - began)

    def _prompt(self, length: int, order: int) -> tuple[list[int], list[ChunkSpan]]:
        """Return the token ids of a prompt with chunks in the order of seed `order`, and the chunks' spans."""
        chunks = self._chunks[: self._num_chunks(length)]
        token_ids, spans = self._ids(FRONT_TOKENS), []
        for chunk in random.Random(order).sample(chunks, len(chunks)):
            spans.append(ChunkSpan(len(token_ids), len(token_ids) + len(chunk)))
            token_ids += chunk
        return token_ids + self._ids(QUESTION_TOKENS), spans

    def _answer(
        self, prompt: list[int], spans: list[ChunkSpan], fusion: Fusion | None, profile: str, max_tokens: int
    ) -> list[int]:
        self._submit(prompt, spans, fusion, profile, max_tokens)
        return self._drain()

    def _submit(
        self, prompt: list[int], spans: list[ChunkSpan], fusion: Fusion | None, profile: str, max_tokens: int
    ) -> str:
        request = EngineRequest(
            request_id=f"{time.monotonic_ns()}", prompt=pack_tokens(prompt), sampling=GREEDY, max_tokens=max_tokens,
            stop_token_ids=(), attention_profile=profile, arrival_s=time.monotonic(), chunks=tuple(spans),
            fusion=fusion,
        )  # fmt: skip
        self._engine.submit([request])
        return request.request_id

    def _drain(self) -> list[int]:
        tokens = []
        while self._engine.has_work:
            for delta in self._engine.step():
                require(delta.finish_reason != "error", delta.error or "a request failed")
                tokens += delta.token_ids
        return tokens

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._draw.integers(0, self._architecture.vocab_size, count).tolist()
        return ids

    def _draw_chunks(self, count: int) -> list[list[int]]:
        return [self._ids(CHUNK_TOKENS) for _ in range(count)]

    def _num_chunks(self, length: int) -> int:
        return (length - FRONT_TOKENS - QUESTION_TOKENS) // CHUNK_TOKENS

    def _floor(self, length: int, fusion: Fusion | None) -> tuple[str, float]:
        """Return the floor in words and in milliseconds. fusion None: everything is computed."""
        model, num_chunks = self._architecture, self._num_chunks(length)
        num_stored = num_chunks * CHUNK_TOKENS
        num_tokens, plan = FRONT_TOKENS + QUESTION_TOKENS + num_stored, None
        if fusion is not None:
            plan = plan_bench_prompt(fusion, FRONT_TOKENS, num_chunks, CHUNK_TOKENS, num_tokens, model)
        flops, num_bytes = fused_cost(model, num_tokens, plan, self._store.folder.shape, num_stored)
        tflop_s = self._rates.get("bf16_matmul_tflop_s") or self._rates["host_matmul_tflop_s"]
        gb_s = self._rates.get("host_to_device_gb_s")
        products = flops / tflop_s / 1e9
        link = num_bytes / gb_s / 1e6 if gb_s else 0.0
        if link > products:
            return f"{num_bytes / 1e9:.3g} GB up at {gb_s:.0f} GB/s", link
        return f"{flops / 1e12:.4g} TFLOP at {tflop_s:.3g} TFLOP/s", products

    def _row(
        self, name: str, shape: str, times: Times, floor: str, floor_ms: float | None, peer_ms: float | None,
        extras: dict[str, Any],
    ) -> Row:  # fmt: skip
        peer = "steps with all cells kept" if "batch" in extras else "the whole prompt computed"
        return Row(
            name=name, shape=shape, device=device_name(self._device), ms=times[0], p10=times[1], p90=times[2],
            floor=floor, floor_ms=floor_ms, peer=None if peer_ms is None else peer,
            peer_ms=peer_ms, rates=self._rates, extras=extras,
            config=self._deployment.model_dump(mode="json") | {"benchmark": asdict(self._benchmark)},
        )  # fmt: skip


def _of(milliseconds: Sequence[float]) -> Times:
    timing = summarise(milliseconds)
    return timing.ms, timing.p10, timing.p90
