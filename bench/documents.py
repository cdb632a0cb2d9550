"""Times the first token of prompts whose documents are stored, by policy: `tandem bench documents`.

Chunks of 512 random tokens in an order of their own each time, text in front and a question behind. They are read from
host memory, from the page cache, or from the disk (dropped from the page cache before). Gate: `pie` of one chunk behind
nothing draws what a whole prefill draws, on the model that is timed. Floor: FLOPs of what is computed, or rows over the
link, the larger; the peer is the whole prompt, computed.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from bench.rates import device_name, measure_device_rates, measure_host_matmul
from bench.rows import Row, announce, measure, require, summarise
from gpu.fusion.choice import choose, question_scores
from gpu.fusion.plan import VANILLA, get_policy, plan_fused
from gpu.load import load_architecture
from gpu.model.architecture import Architecture
from gpu.sampling.params import SamplingParams
from gpu.step import FusedPrompt, PlacedChunk
from scheduler.engine import Engine
from scheduler.load import load_engine
from scheduler.memory import plan_engine
from scheduler.messages import ChunkSpan, EngineRequest, Fusion, StoreChunks, pack_tokens
from server.config import Deployment
from transfer.chunks.format import ChunkKey, ChunkShape
from transfer.chunks.store import ChunkStore
from transfer.machine import probe_machine

CHUNK_TOKENS, FRONT_TOKENS, QUESTION_TOKENS = 512, 32, 64
GREEDY = SamplingParams(temperature=0.0)
Place = Literal["memory", "page cache", "disk"]


@dataclass(frozen=True, slots=True)
class DocumentsBenchmark:
    """`lengths` of prompts in tokens; `ratio`: of policies that have one; times are medians of `repeats`."""

    lengths: tuple[int, ...]
    policies: tuple[str, ...]
    places: tuple[Place, ...]
    ratio: float
    repeats: int


def run_documents_benchmark(
    benchmark: DocumentsBenchmark, deployment: Deployment, console: Console
) -> Iterator[list[Row]]:
    """The rows so far, after each length. Raises GateError before anything is timed."""
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
    bench = _Bench(benchmark, deployment, engine, architecture, rates, device, console)
    try:
        bench.check()
        rows = [bench.selection_row(length) for length in benchmark.lengths]
        for length in benchmark.lengths:
            rows += bench.rows(length)
            yield rows
    finally:
        engine.shutdown()


class _Bench:
    def __init__(
        self, benchmark: DocumentsBenchmark, deployment: Deployment, engine: Engine, architecture: Architecture,
        rates: dict[str, float], device: torch.device, console: Console,
    ) -> None:  # fmt: skip
        self._benchmark, self._deployment, self._engine = benchmark, deployment, engine
        self._architecture, self._rates, self._device, self._console = architecture, rates, device, console
        self._draw = np.random.default_rng(1)
        assert engine.scheduler.documents is not None, "documents: a deployment with a section of that name"
        self._store: ChunkStore = engine.scheduler.documents.store_of_chunks

    def check(self) -> None:
        """A chunk alone, and computed: the same tokens are drawn."""
        (ids,) = self._chunks(1)
        span = [ChunkSpan(0, len(ids))]
        whole = self._answer(ids, [], None, 4)
        alone = self._answer(ids, span, Fusion(policy="pie", ratio=0.0), 4)
        found = self._answer(ids, span, Fusion(policy="pie", ratio=0.0), 4)
        require(alone == found, "a chunk that is stored gives the answer of one that was just computed")
        require(whole[0] == alone[0], "one chunk behind nothing gives the first token of a whole prefill")

    def selection_row(self, length: int) -> Row:
        """Scores of a question over a layer's keys, and the choice."""
        shape, dtype = self._architecture, torch.bfloat16 if self._device.type == "cuda" else torch.float32
        query = torch.randn(QUESTION_TOKENS, shape.num_heads, shape.dim, dtype=dtype, device=self._device)
        keys = torch.randn(shape.num_kv_heads, length, shape.dim, dtype=dtype, device=self._device)
        positions = torch.arange(length - QUESTION_TOKENS, length, device=self._device)
        least = torch.full((length,), -torch.inf, device=self._device)

        def select() -> None:
            choose(question_scores(query, keys, positions, 0.1), least, max(1, round(self._benchmark.ratio * length)))

        timing = measure(select, self._device, 3, 20)
        num_bytes = keys.numel() * keys.element_size()
        gb_s = self._rates.get("device_stream_gb_s")
        return self._row(
            "selection", f"{QUESTION_TOKENS} over {length:,}", (timing.ms, timing.p10, timing.p90),
            "none measured" if gb_s is None else f"{num_bytes / 1e6:.1f} MB of keys over {gb_s:.0f} GB/s",
            None if gb_s is None else num_bytes / gb_s / 1e6, None, {},
        )  # fmt: skip

    def rows(self, length: int) -> list[Row]:
        chunks = self._chunks((length - FRONT_TOKENS - QUESTION_TOKENS) // CHUNK_TOKENS)
        self._engine.store_chunks(StoreChunks("bench", [pack_tokens(chunk) for chunk in chunks], ""))
        self._drain()
        (stored,) = self._engine.take_stored()
        require(not stored.reason, f"all chunks are stored: {stored.reason}")
        floor, floor_ms = self._floor(length, chunks, None)
        announce(self._console, f"{VANILLA}, {length:,} tokens", floor, floor_ms)
        whole = self._time(chunks, None, "memory")
        rows = [self._row(VANILLA, f"{length:,} tokens", whole, floor, floor_ms, None, {})]
        for name in self._benchmark.policies:
            fusion = Fusion(policy=name, ratio=self._benchmark.ratio if get_policy(name).chooses else 0.0)
            floor, floor_ms = self._floor(length, chunks, fusion)
            announce(self._console, f"{name}, {length:,} tokens", floor, floor_ms)
            for place in self._benchmark.places:
                times = self._time(chunks, fusion, place)
                shape = f"{length:,} tokens, {place}"
                rows.append(self._row(name, shape, times, floor, floor_ms, whole[0], {"ratio": fusion.ratio}))
                self._console.print(
                    f"{name}, {shape}: {times[0]:.1f} ms, {times[0] / floor_ms:.2f} of its floor, "
                    f"{whole[0] / times[0]:.2f} times vanilla", highlight=False,
                )  # fmt: skip
        return rows

    def _time(self, chunks: list[list[int]], fusion: Fusion | None, place: Place) -> tuple[float, float, float]:
        """Milliseconds to the first token; one run before the others warms up."""
        times = []
        for number in range(self._benchmark.repeats + 1):
            order = random.Random(number).sample(chunks, len(chunks))
            token_ids = self._ids(FRONT_TOKENS)
            spans = []
            for chunk in order:
                spans.append(ChunkSpan(len(token_ids), len(token_ids) + len(chunk)))
                token_ids += chunk
            if place != "memory":
                self._store.forget()
            if place == "disk":
                drop_from_page_cache(self._store)
            began = time.perf_counter()
            self._answer([*token_ids, *self._ids(QUESTION_TOKENS)], spans, fusion, 1)
            times.append(1e3 * (time.perf_counter() - began))
        timing = summarise(times[1:])
        return timing.ms, timing.p10, timing.p90

    def _answer(self, prompt: list[int], spans: list[ChunkSpan], fusion: Fusion | None, max_tokens: int) -> list[int]:
        request = EngineRequest(
            request_id=f"{time.monotonic_ns()}", prompt=pack_tokens(prompt), sampling=GREEDY, max_tokens=max_tokens,
            stop_token_ids=[], attention_profile="exact", arrival_s=time.monotonic(), chunks=spans, fusion=fusion,
        )  # fmt: skip
        self._engine.submit([request])
        return self._drain()

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

    def _chunks(self, count: int) -> list[list[int]]:
        return [self._ids(CHUNK_TOKENS) for _ in range(count)]

    def _floor(self, length: int, chunks: Sequence[list[int]], fusion: Fusion | None) -> tuple[str, float]:
        """FLOPs of the stages, attention of scattered tokens over what they see on average; bytes of loaded layers."""
        model = self._architecture
        num_tokens = FRONT_TOKENS + QUESTION_TOKENS + len(chunks) * CHUNK_TOKENS
        plan = None if fusion is None else _plan(fusion, num_tokens, len(chunks), model)
        flops, num_bytes = fused_cost(model, num_tokens, plan, self._store.folder.shape, len(chunks) * CHUNK_TOKENS)
        tflop_s = self._rates.get("bf16_matmul_tflop_s") or self._rates["host_matmul_tflop_s"]
        gb_s = self._rates.get("host_to_device_gb_s")
        products = flops / tflop_s / 1e9
        link = num_bytes / gb_s / 1e6 if gb_s else 0.0
        if link > products:
            return f"{num_bytes / 1e9:.3g} GB up at {gb_s:.0f} GB/s", link
        return f"{flops / 1e12:.4g} TFLOP at {tflop_s:.3g} TFLOP/s", products

    def _row(
        self, name: str, shape: str, times: tuple[float, float, float], floor: str, floor_ms: float | None,
        peer_ms: float | None, extras: dict[str, Any],
    ) -> Row:  # fmt: skip
        return Row(
            name=name, shape=shape, device=device_name(self._device), ms=times[0], p10=times[1], p90=times[2],
            floor=floor, floor_ms=floor_ms, peer=None if peer_ms is None else "the whole prompt computed",
            peer_ms=peer_ms, rates=self._rates, extras=extras,
            config=self._deployment.model_dump(mode="json") | {"benchmark": asdict(self._benchmark)},
        )  # fmt: skip


def _plan(fusion: Fusion, num_tokens: int, num_chunks: int, model: Architecture) -> FusedPrompt | None:
    key = ChunkKey("", CHUNK_TOKENS, "")
    begins = range(FRONT_TOKENS, FRONT_TOKENS + num_chunks * CHUNK_TOKENS, CHUNK_TOKENS)
    chunks = [PlacedChunk(begin, begin + CHUNK_TOKENS, key) for begin in begins]
    windows = [spec.window_tokens for spec in model.layers]
    return plan_fused(fusion.policy, fusion.ratio, fusion.select_layer, fusion.seam_tokens, 0, chunks, 0, num_tokens,
                      num_tokens, windows)  # fmt: skip


def fused_cost(
    model: Architecture, num_tokens: int, plan: FusedPrompt | None, shape: ChunkShape, num_chunk_tokens: int
) -> tuple[float, int]:
    """FLOPs that a prompt's first token takes, and bytes that go to the device. Chosen tokens see half the prompt."""
    width, layers = model.num_heads * model.dim, model.num_layers
    full_layers = layers if plan is None else plan.select_layer
    flops = full_layers * (2.0 * num_tokens * model.num_layer_weights + 2.0 * width * num_tokens**2)
    flops += 2.0 * model.num_embedding_weights
    if plan is None:
        return flops, 0
    rest = layers - full_layers
    num_pairs = plan.num_chosen * num_tokens / 2 + (plan.question_end - plan.question_begin) * num_tokens
    flops += rest * (2.0 * plan.num_computed * model.num_layer_weights + 4.0 * width * num_pairs)
    looks = get_policy(plan.policy).looks
    if looks:  # keys and values of all tokens in the layer that looks
        flops += 4.0 * num_tokens * model.hidden * model.num_kv_heads * model.dim
    return flops, (rest - looks) * shape.layer_bytes(num_chunk_tokens)


def drop_from_page_cache(store: ChunkStore) -> None:
    for path in (store.folder.root / store.folder.model).glob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
