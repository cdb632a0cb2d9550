"""Run `tandem bench engine --devices N`: time decode steps of a model that is split over devices of one host.

The engine is loaded as a server loads its own, with a process for each device. Floor: bytes of the weights that a step
reads on one device, over that device's measured rate of reading them. The floor leaves out sums over devices. There is
no peer: the same command without `--devices` times one device.
"""

from dataclasses import asdict

import numpy as np
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, announce, require, summarise
from bench.decode_loop import decode, prefill_ms, served_graph_sizes
from bench.engine_steps import EngineBenchmark, draw_prompts, measure_floor_rates
from bench.rates import device_name
from gpu.config import GpuConfig, ModelConfig
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture, load_architecture
from gpu.model.matrix_formats import step_weight_bytes
from gpu.model.split import split_over
from gpu.runner import Runner
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, PrefillConfig, SchedulerConfig
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import GIB, probe_machine

_WARMUP_STEPS = 4
_ROOM = 2  # pages, as a multiple of the rows of all contexts


def run_split_benchmark(benchmark: EngineBenchmark, devices: int, console: Console) -> list[Row]:
    """Return a row for each batch size and one for each prompt. Raises GateError, ModelError or PlanError."""
    config = _config(benchmark, devices)
    whole = load_architecture(config.model)
    share, machine = split_over(whole, devices), probe_machine()
    plan = plan_engine(config, whole, machine)
    one_bytes = step_weight_bytes(share, plan.dtype_bytes, plan.is_packed, 1)
    rates, rate = measure_floor_rates(one_bytes, plan.threads, torch.device(benchmark.device))
    if benchmark.device == "cuda":
        torch.cuda.empty_cache()  # the engine's plan gives this memory to pages
    engine, _ = load_engine(config, plan, lambda stage, fraction: None)
    try:
        with interpreter_as_served():
            return _rows(benchmark, devices, engine._runner, share, plan, (rates, rate), console)
    finally:
        engine.shutdown()


def _rows(
    benchmark: EngineBenchmark, devices: int, runner: Runner, share: Architecture, plan: MemoryPlan,
    measured: tuple[dict[str, float], float], console: Console,
) -> list[Row]:  # fmt: skip
    rates, rate = measured
    what = f"{share.name} {benchmark.kind} over {devices} devices"
    device = f"{devices} of {device_name(runner.device)}"
    if runner.device.type == "cpu":
        device += f", {plan.threads} threads each"
    rows = []
    for batch in benchmark.batches:
        weight_bytes = step_weight_bytes(share, plan.dtype_bytes, plan.is_packed, batch)
        floor = f"{weight_bytes / 1e9:.3f} GB of weights of each device over {rate:.0f} GB/s, measured"
        floor_ms = weight_bytes / rate / 1e6
        announce(console, f"decode step, {what}, batch {batch}", floor, floor_ms)
        times = _time_steps(runner, batch, benchmark, share.vocab_size)
        timing = summarise(times)
        rows.append(Row(
            name="decode step", shape=f"{what}, batch {batch}, context {benchmark.context}", device=device,
            **asdict(timing), floor=floor, floor_ms=floor_ms, peer=None, peer_ms=None, rates=rates,
            extras={"tokens_per_s": 1e3 * batch / timing.ms}, config=_described(benchmark, devices, batch),
        ))  # fmt: skip
    for length in benchmark.prompts:
        prompt = draw_prompts(1, length, share.vocab_size)[0]
        times = [prefill_ms(runner, prompt, benchmark.chunk_tokens) for _ in range(1 + benchmark.rounds)]
        timing = summarise(times[1:])
        rows.append(Row(
            name="prefill", shape=f"{what}, {length:,} tokens", device=device, **asdict(timing),
            floor="none: products and sums over devices in turn", floor_ms=None, peer=None, peer_ms=None, rates=rates,
            extras={"tokens_per_s": 1e3 * length / timing.ms}, config=_described(benchmark, devices, 1),
        ))  # fmt: skip
    return rows


def _time_steps(runner: Runner, batch: int, benchmark: EngineBenchmark, vocab_size: int) -> list[float]:
    """Return milliseconds of steps. Raises GateError if two rounds draw different tokens, or no valid ones."""
    prompts, times = draw_prompts(batch, benchmark.prompt_tokens, vocab_size), []
    first: np.ndarray | None = None
    for _ in range(max(2, benchmark.rounds)):
        decoded = decode(runner, prompts, benchmark.steps)
        first = decoded.tokens if first is None else first
        same = float((decoded.tokens == first).mean())
        require(same == 1.0 and bool((first >= 0).all()), f"{same:.2%} of tokens are those of the round before")
        times += decoded.step_ms[_WARMUP_STEPS:]
    return times


def _described(benchmark: EngineBenchmark, devices: int, batch: int) -> dict[str, object]:
    given = asdict(benchmark) | {"model": str(benchmark.model), "batch": batch}
    return given | {"devices": devices, "torch": torch.__version__}


def _config(benchmark: EngineBenchmark, devices: int) -> EngineConfig:
    """Return the settings of a server for this model, with pages for all contexts of the largest batch."""
    model = ModelConfig.model_validate({
        "path": benchmark.model, "random_weights": benchmark.random_weights, "weights": benchmark.weights,
        "products": benchmark.products,
    })  # fmt: skip
    share = split_over(load_architecture(model), devices)
    sizes = served_graph_sizes(benchmark.batches)
    longest = max(benchmark.context, *(length + 1 for length in benchmark.prompts or (0,)))
    bytes_of_token = share.kv_bytes_per_token(4 if benchmark.dtype == "float32" else 2)
    tokens = max(max(benchmark.batches) * benchmark.context, longest)
    gpu = GpuConfig.model_validate({
        "device": benchmark.device, "devices": devices, "dtype": benchmark.dtype, "graph_batch_sizes": sizes,
        "kv_cache_gib": _ROOM * tokens * bytes_of_token / GIB,
    })  # fmt: skip
    return EngineConfig(
        model=model,
        gpu=gpu,
        scheduler=SchedulerConfig(
            max_running=max(*benchmark.batches, *sizes, 1), max_context_tokens=longest,
            prefill=PrefillConfig(
                chunk_tokens=benchmark.chunk_tokens,
                max_hidden_tokens=max(longest, max(benchmark.batches) * benchmark.prompt_tokens),
            ),
        ),
    )  # fmt: skip
