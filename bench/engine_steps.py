"""Run `tandem bench engine`: time a decode step through the Runner, against the floor of its weights and a peer.

Floor: the bytes of weights that a step reads, over the measured rate of reading them. On the CPU that is the better
rate of two: a stream from memory, and a buffer as large as the weights, which may fit in the cache. The peer runs in
the same process, interleaved: transformers' `generate` if there is a checkpoint, else the same step in plain torch (a
CUDA graph on a GPU). No number is reported unless the peer chooses the same tokens. Steps run in the graphs that a
server captures.

Prompts are timed last, after the steps have passed the check. They run in an engine that is loaded like a server's,
with all that a start measures and chooses. Their time is the one that a server reports as `tandem_prefill_seconds`.
Their floor is the arithmetic over the measured rate, or the reading of weights if that takes longer.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.agreement import Agreement, require_agreement
from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, announce, measure, require, summarise
from bench.decode_loop import build_runner, decode, served_graph_sizes
from bench.hugging_face import HuggingFace, load_hugging_face
from bench.long_client import GREEDY, Client
from bench.plain_decode import PlainDecode
from bench.rates import device_name, measure_device_rates, measure_host_matmul
from cpu.memory_rates import measure_host_rates, measure_read_rate
from gpu.batching.captured_steps import StepKind
from gpu.config import GpuConfig, ModelConfig
from gpu.decode.steps import Batch
from gpu.load import DTYPES, RANDOM_SEED, LoadedModel
from gpu.model.architecture import Architecture, named_shape, read_architecture
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.gguf_translation.tensor_names import stored_as
from gpu.model.humming_formats import multiplied
from gpu.model.matrix_formats import rounded, step_weight_bytes
from gpu.runner import Runner
from gpu.weights.checkpoint import load_weights
from gpu.weights.drawing import random_weights
from gpu.weights.humming_matrix import prepare, require_products
from gpu.weights.weights import Weights, unpacked
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from scheduler.planning.step_bytes import prompt_flops
from transfer.machine import GIB, probe_machine

_WARMUP_STEPS = 4
_GRAPH_REPEATS = 50
_PROMPT_OUTPUT = 2  # tokens of an answer to a timed prompt; it is cancelled after its first
_LEAST_PROMPTS_MS = 1500.0  # time prompts of one length until they took this together ...
_MOST_PROMPTS = 40  # ... or until there are so many
_KV_ROOM = 2  # multiple of the longest prompt's rows: for pages that are partly full, and windows of layers


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """What to measure, of either `model` or `random_weights`.

    rounds, steps: so many rounds of so many steps, ours and the peer's in turn.
    weights: as `model.weights`, or for random weights a GGUF file's kind; the peer has them unpacked.
    prompts: lengths of prompts that are timed to their first token, in units of `chunk_tokens`.
    products: as `model.products`.
    """

    model: Path | None
    random_weights: str | None
    batches: tuple[int, ...]
    prompt_tokens: int
    steps: int
    rounds: int
    threads: int
    device: str
    dtype: str
    weights: str | None = None
    prompts: tuple[int, ...] = ()
    chunk_tokens: int = 2048
    products: str = "own"

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.steps + 1

    @property
    def kind(self) -> str:
        """Return the format of the weights as rows name it, with the library of products if it is not our own."""
        return (self.weights or self.dtype) + (f" by {self.products}" if self.products != "own" else "")


def run_engine_benchmark(benchmark: EngineBenchmark, console: Console) -> list[Row]:
    """Return a row for each batch size, with one more for its bare graph on CUDA, and one for each prompt.

    Raises GateError or ModelError.
    """
    device, dtype = torch.device(benchmark.device), DTYPES[benchmark.dtype]
    torch.set_num_threads(benchmark.threads)
    require_products(benchmark.products, device, benchmark.dtype)
    architecture, weights = _load(benchmark, dtype, device)
    began = time.perf_counter()
    prepare(weights.matrices, range(1, max(benchmark.chunk_tokens, *benchmark.batches) + 1), lambda fraction: None)
    if benchmark.products != "own":
        console.print(f"kernels of products: {time.perf_counter() - began:.1f} s, as a start takes", highlight=False)
    is_packed = weights.is_packed
    one_bytes = step_weight_bytes(architecture, dtype.itemsize, is_packed, 1)
    rates, rate = measure_floor_rates(one_bytes, benchmark.threads, device)
    runner = build_runner(architecture, weights, max(benchmark.batches), benchmark.context, dtype, device)
    runner.capture(served_graph_sizes(benchmark.batches), lambda fraction: None)
    plain = unpacked(replace(weights, layers=list(weights.layers)))
    checkpoint = load_hugging_face(benchmark.model, dtype, device) if benchmark.model is not None else None
    rows, what = [], f"{architecture.name} {benchmark.kind}"
    for batch in benchmark.batches:
        weight_bytes = step_weight_bytes(architecture, dtype.itemsize, is_packed, batch)
        floor = f"{weight_bytes / 1e9:.3f} GB of weights over {rate:.0f} GB/s, measured"
        floor_ms = weight_bytes / rate / 1e6
        announce(
            console,
            f"decode step, {what}, batch {batch}",
            floor,
            floor_ms,
        )
        common: dict[str, Any] = {
            "shape": f"{what}, batch {batch}, context {benchmark.context}",
            "device": device_name(device) + ("" if device.type == "cuda" else f", {benchmark.threads} threads"),
            "floor": floor,
            "floor_ms": floor_ms,
            "rates": rates,
            "config": asdict(benchmark) | {"model": str(benchmark.model), "batch": batch, "torch": torch.__version__},
        }
        prompts = draw_prompts(batch, benchmark.prompt_tokens, architecture.vocab_size)
        if checkpoint is not None:
            measured = _against_hugging_face(runner, checkpoint, prompts, benchmark)
        else:
            peer = PlainDecode(architecture, plain, batch, benchmark.context, device)
            measured = _against_plain(runner, peer, prompts, benchmark)
        measured["extras"] |= {"tokens_per_s": 1e3 * batch / measured["ms"]}
        measured["extras"] |= {"peer_tokens_per_s": 1e3 * batch / measured["peer_ms"]}
        rows.append(Row(name="decode step", **common, **measured))
        if device.type == "cuda":
            rows.append(Row(name="decode graph alone", **common, **_time_graph(runner, batch, benchmark.prompt_tokens)))
    if benchmark.prompts:
        del runner
        gc.collect()  # frees the runner's pages and graphs: the engine needs the memory
        rows += _prefill_rows(benchmark, LoadedModel(architecture, weights), rates, rate, console)
    return rows


def _prefill_rows(
    benchmark: EngineBenchmark, model: LoadedModel, rates: dict[str, float], rate: float, console: Console
) -> list[Row]:
    """Return a row for each prompt length. rate: at which the device reads weights, in GB/s."""
    device, dtype, rows = torch.device(benchmark.device), DTYPES[benchmark.dtype], []
    architecture = model.architecture
    if device.type == "cpu":
        rates = rates | {"host_matmul_tflop_s": measure_host_matmul({torch.float32, dtype})}
    tflop_s = rates["bf16_matmul_tflop_s" if device.type == "cuda" else "host_matmul_tflop_s"]
    what = f"{architecture.name} {benchmark.kind}"
    with _serving_client(benchmark, model) as client:
        for length in benchmark.prompts:
            flops = prompt_flops(architecture, 0, length)
            weight_bytes = step_weight_bytes(architecture, dtype.itemsize, model.weights.is_packed, length)
            products_ms, weights_ms = flops / tflop_s / 1e9, weight_bytes / rate / 1e6
            floor = (
                f"the longer of {flops / 1e12:.4g} TFLOP at {tflop_s:.3g} TFLOP/s, {products_ms:.4g} ms, and "
                f"{weight_bytes / 1e9:.3f} GB of weights over {rate:.0f} GB/s, {weights_ms:.4g} ms"
            )
            announce(console, f"prefill, {what}, {length:,} tokens", floor, max(products_ms, weights_ms))
            times = _time_prompts(client, length, max(2, benchmark.rounds))
            choice = client.engine._runner.dense.choice
            extras = {
                "products_ms": products_ms,
                "weights_ms": weights_ms,
                "tokens_per_s": 1e3 * length / min(times),
                "attention": None if choice is None else choice.as_row(),
            }
            rows.append(Row(
                name="prefill", shape=f"{what}, {length:,} tokens", device=device_name(device),
                **asdict(summarise(times)), floor=floor, floor_ms=max(products_ms, weights_ms), peer=None, peer_ms=None,
                rates=rates, extras=extras,
                config=asdict(benchmark) | {"model": str(benchmark.model), "torch": torch.__version__},
            ))  # fmt: skip
    return rows


@contextmanager
def _serving_client(benchmark: EngineBenchmark, model: LoadedModel) -> Iterator[Client]:
    """Load the engine that a server would load for this model, with pages for one prompt of the greatest length."""
    context = max(benchmark.prompts) + _PROMPT_OUTPUT
    shape = model.architecture
    row_bytes = (
        shape.rows_of_head * shape.num_layers * shape.num_kv_heads * shape.dim * DTYPES[benchmark.dtype].itemsize
    )
    config = EngineConfig(
        model=ModelConfig(
            path=benchmark.model, random_weights=benchmark.random_weights, products=benchmark.products
        ),
        gpu=GpuConfig(
            device=benchmark.device, dtype=benchmark.dtype, threads=benchmark.threads, graph_batch_sizes=(1,),
            kv_cache_gib=_KV_ROOM * context * row_bytes / GIB,
        ),
        scheduler=SchedulerConfig(
            max_context_tokens=context, prefill=PrefillConfig(chunk_tokens=benchmark.chunk_tokens)
        ),
    )  # fmt: skip
    plan = plan_engine(config, shape, probe_machine())
    engine, ready = load_engine(config, plan, lambda stage, fraction: None, model)
    try:
        with interpreter_as_served():
            yield Client(engine, ready.vocab_size, ready.profiles)
    finally:
        engine.shutdown()


def _time_prompts(client: Client, length: int, rounds: int) -> list[float]:
    """Return the milliseconds of at least `rounds` prompts after one that warms up.

    Short prompts are repeated more often, since launches from Python vary by a third from one prompt to the next.
    """
    _prefill_ms(client, length)
    times = [_prefill_ms(client, length) for _ in range(rounds)]
    while len(times) < _MOST_PROMPTS and sum(times) < _LEAST_PROMPTS_MS:
        times.append(_prefill_ms(client, length))
    return times


def _prefill_ms(client: Client, length: int) -> float:
    """Return the engine's time for a prompt of new tokens, from its start to its first draw, in milliseconds."""
    request_id = client.submit(client.prompt(length), _PROMPT_OUTPUT, "exact", GREEDY)
    while True:
        for delta in client.advance():
            if delta.request_id == request_id and delta.prefill_seconds is not None:
                client.drain([request_id])
                return 1e3 * delta.prefill_seconds


def measure_floor_rates(weight_bytes: int, threads: int, device: torch.device) -> tuple[dict[str, float], float]:
    """Return all measured rates, and the best one in GB/s at which this device can read the weights."""
    if device.type == "cuda":
        rates = measure_device_rates(device)
        return rates, rates["device_stream_gb_s"]
    rates = measure_host_rates(threads) | {"host_weights_gb_s": measure_read_rate(threads, weight_bytes)}
    return rates, max(rates["host_stream_gb_s"], rates["host_weights_gb_s"])


def draw_prompts(batch: int, prompt_tokens: int, vocab_size: int) -> np.ndarray:
    """Draw different prompts of one length, int32 `[batch, prompt_tokens]`, the same ones at every call."""
    return np.random.default_rng(0).integers(0, vocab_size, (batch, prompt_tokens), dtype=np.int32)


def _load(benchmark: EngineBenchmark, dtype: torch.dtype, device: torch.device) -> tuple[Architecture, Weights]:
    if benchmark.model is not None:
        architecture = rounded(read_architecture(benchmark.model), benchmark.weights, "--weights")
        architecture = multiplied(architecture, benchmark.products, "--products")
        return architecture, load_weights(benchmark.model, architecture, dtype, device, lambda fraction: None)
    assert benchmark.random_weights is not None
    shape, kind = named_shape(benchmark.random_weights), benchmark.weights
    is_block = kind is not None and kind in BLOCK_KINDS
    architecture = stored_as(shape, kind) if is_block else rounded(shape, kind, "--weights")
    architecture = multiplied(architecture, benchmark.products, "--products")
    return architecture, random_weights(architecture, RANDOM_SEED, dtype, device, lambda fraction: None)


def _against_hugging_face(
    runner: Runner, peer: HuggingFace, prompts: np.ndarray, benchmark: EngineBenchmark
) -> dict[str, Any]:
    ours, theirs = [], []
    for _ in range(benchmark.rounds):
        decoded = decode(runner, prompts, benchmark.steps)
        tokens, peer_ms = peer.generate(prompts, benchmark.steps)
        ours += decoded.step_ms[_WARMUP_STEPS:]
        theirs += peer_ms[_WARMUP_STEPS:]
        if benchmark.dtype == "float32":
            same = float((decoded.tokens == tokens).mean())
            require(same == 1.0, f"{same:.2%} of our float32 tokens equal transformers' generate; wanted all")
    agreement = peer.follow(prompts, decoded.tokens)
    require_agreement(agreement, DTYPES[benchmark.dtype])
    return _summary(ours, theirs, "transformers generate", agreement)


def _against_plain(
    runner: Runner, peer: PlainDecode, prompts: np.ndarray, benchmark: EngineBenchmark
) -> dict[str, Any]:
    decoded = decode(runner, prompts, benchmark.steps)
    agreement = peer.follow(prompts, decoded.tokens)
    require_agreement(agreement, DTYPES[benchmark.dtype])
    ours, theirs = [], []
    for _ in range(benchmark.rounds):
        ours += decode(runner, prompts, benchmark.steps).step_ms[_WARMUP_STEPS:]
        peer.position.fill_(prompts.shape[1])
        theirs.append(measure(peer.step, peer.device, _WARMUP_STEPS, benchmark.steps - _WARMUP_STEPS).ms)
    what = "plain torch in a CUDA graph" if peer.device.type == "cuda" else "plain torch"
    return _summary(ours, theirs, what, agreement)


def _summary(ours: Sequence[float], theirs: Sequence[float], peer: str, agreement: Agreement) -> dict[str, Any]:
    return asdict(summarise(ours)) | {
        "peer": peer,
        "peer_ms": summarise(theirs).ms,
        "extras": {"agreement": agreement.share, "behind": agreement.behind},
    }


@torch.inference_mode()
def _time_graph(runner: Runner, batch: int, position: int) -> dict[str, Any]:
    """Time the captured step alone, without sampling and without the host; its inputs stay the same."""
    steps = runner.decode_steps
    places = [position] * batch
    steps.run(Batch(list(range(batch)), places, [None] * batch))
    captured = steps._find_captured(StepKind(0, False), batch)
    assert captured is not None, "bench: a step of this batch was captured"
    timing = measure(captured.graph.replay, runner.device, _WARMUP_STEPS, _GRAPH_REPEATS)
    return asdict(timing) | {"peer": None, "peer_ms": None, "extras": {}}
