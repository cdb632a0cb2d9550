"""Read the arguments of `tandem bench engine` and `tandem bench rates`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from bench.benchmark_rows import Row

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the rows there as well")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads; default: physical cores")]
_BUSY_LOAD = 0.5  # load per core above which a warning is printed


def rates(threads: Threads = None, json_file: JsonFile = None) -> None:
    """Measure the machine's rates: memory, link and matrix products. Floors divide by them."""
    from bench.rates import rates as measure_rates

    console = Console()
    warn_if_busy(console)
    measure_rates(threads, json_file, console)


def engine(
    model: Annotated[Path | None, typer.Option(help="a Hugging Face folder; the peer is transformers")] = None,
    random_weights: Annotated[str | None, typer.Option(help="a named shape; the peer is plain torch")] = None,
    batch: Annotated[str, typer.Option(help="batch sizes, with commas")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=8, help="decode steps of a round; with --http: tokens of a stream")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="times that we and the peer take turns")] = 3,
    threads: Threads = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option()] = "auto",
    devices: Annotated[int, typer.Option(min=1, help="over which the model is split; more than one: no peer")] = 1,
    dtype: Annotated[str, typer.Option(help="auto: bfloat16 on cuda, float32 and bfloat16 on the CPU")] = "auto",
    weights: Annotated[
        Literal["fp8", "int8", "int4", "Q8_0", "Q4_0", "Q4_K", "Q6_K"] | None,
        typer.Option(help="rounded to this at load; GGUF's kinds: of random weights"),
    ] = None,
    products: Annotated[Literal["own", "humming", "fp8"], typer.Option(help="as `model.products`")] = "own",
    prompts: Annotated[str | None, typer.Option(help="tokens of prompts that are timed, too, with commas")] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="of a prefill unit of these prompts")] = 2048,
    http: Annotated[Path | None, typer.Option(metavar="CONFIG", help="instead: serve CONFIG, stream over HTTP")] = None,
    streams: Annotated[int, typer.Option(min=1, help="with --http")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Time a decode step against the floor of its weights and a peer; with --http, the server against its engine."""
    import torch

    from bench.benchmark_rows import GateError, report
    from bench.engine_steps import EngineBenchmark, run_engine_benchmark
    from bench.split_engine import run_split_benchmark
    from gpu.load import DTYPES
    from gpu.memory.demand import PlanError
    from gpu.model.spec import ModelError
    from transfer.machine import count_physical_cores

    console = Console()
    warn_if_busy(console)
    resolved = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [dtype] if dtype != "auto" else ["bfloat16"] if resolved == "cuda" else ["float32", "bfloat16"]
    if not set(dtypes) <= set(DTYPES):
        raise typer.BadParameter(f"got {dtype}; wanted auto or one of {', '.join(DTYPES)}", param_hint="--dtype")
    if devices > 1 and (http is not None or (weights is not None and weights.startswith("Q"))):
        raise typer.BadParameter(
            "stands beside neither --http nor a GGUF file's kind of weights", param_hint="--devices"
        )
    try:
        if http is not None:
            rows = run_http(http, streams, prompt_tokens, steps, rounds, threads, console)
            report(rows, json_file, console)
            return
        if (model is None) == (random_weights is None):
            raise typer.BadParameter("give one of --model and --random-weights, or --http CONFIG")
        if model is not None and weights is not None and weights.startswith("Q"):
            raise typer.BadParameter(
                f"got {weights} of a folder; wanted it of --random-weights", param_hint="--weights"
            )
        rows = []
        for one in dtypes:
            benchmark = EngineBenchmark(
                model=model,
                random_weights=random_weights,
                batches=parse_batches(batch),
                prompt_tokens=prompt_tokens,
                steps=steps,
                rounds=rounds,
                threads=threads or count_physical_cores(),
                device=resolved,
                dtype=one,
                weights=weights,
                prompts=() if prompts is None else parse_batches(prompts),
                chunk_tokens=chunk_tokens,
                products=products,
            )
            if devices == 1:
                rows += run_engine_benchmark(benchmark, console)
            else:
                rows += run_split_benchmark(benchmark, devices, console)
        report(rows, json_file, console)
    except (GateError, ModelError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def drafts(
    random_weights: Annotated[
        str | None, typer.Option(help="a named shape; left out: llama-3.1-8b, with --mtp qwen3.5-9b")
    ] = None,
    weights: Annotated[
        Literal["none", "fp8", "int8", "int4"], typer.Option(help="rounded to this; none: as `dtype`")
    ] = "int4",
    batch: Annotated[str | None, typer.Option(help="streams, with commas; left out: 1,8, with --mtp 1")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=16)] = 2048,
    tokens: Annotated[int | None, typer.Option(min=32, help="of each stream; left out: 512, with --mtp 128")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="times that streams with and without drafts take turns")] = 3,
    accepted: Annotated[
        str | None,
        typer.Option(
            help="how often a drafted token is right, with commas: rates, or a real model's `questions`, `summaries`, "
            "`edits`, `indexed`; left out: questions,edits,0.8,0.95, over host memory indexed,0.95, with --mtp 0.8"
        ),
    ] = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], typer.Option()] = "auto",
    threads: Threads = None,
    over_host: Annotated[
        bool, typer.Option(help="instead: one context in host memory, `verified` beside `offloaded`")
    ] = False,
    mtp: Annotated[
        bool, typer.Option(help="the head that comes with the checkpoint drafts, in place of n-grams")
    ] = False,
    memory_limit_gib: Annotated[float | None, typer.Option(min=0.1, help="with --over-host: of the card")] = None,
    host_rows: Annotated[Literal["bfloat16", "int8"], typer.Option(help="with --over-host")] = "bfloat16",
    resident_tokens: Annotated[
        int, typer.Option(min=0, help="with --over-host: longer contexts leave the device at once")
    ] = 1024,
    json_file: JsonFile = None,
) -> None:
    """Time steps of 1, 2, 4 and 8 rows a stream, and streams with drafts of stated acceptance beside those without.

    All draw the texts that were recorded without drafts; draws that would have differed are counted. With --over-host,
    a context in host memory is timed: the CPU's attention for 1 to 16 rows, and `verified` beside `offloaded`.
    """
    from bench.benchmark_rows import GateError, report
    from bench.draft_speed import DraftsBenchmark, run_drafts_benchmark
    from bench.host_drafts import HostDraftsBenchmark, run_host_drafts_benchmark
    from bench.replay import parse_acceptance
    from transfer.machine import count_physical_cores

    console = Console()
    warn_if_busy(console)
    few = "indexed,0.95" if over_host else "0.8" if mtp else "questions,edits,0.8,0.95"
    try:
        rates = parse_acceptance(accepted or few)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--accepted") from None
    shape, streams = random_weights or ("qwen3.5-9b" if mtp else "llama-3.1-8b"), batch or ("1" if mtp else "1,8")
    most = tokens or (128 if mtp else 512)
    num_threads = threads or count_physical_cores()
    try:
        if over_host:
            over = HostDraftsBenchmark(
                shape, None if weights == "none" else weights, device, dtype, host_rows, memory_limit_gib,
                resident_tokens, prompt_tokens, most, rounds, rates, num_threads,
            )  # fmt: skip
            report(run_host_drafts_benchmark(over, console), json_file, console)
            return
        benchmark = DraftsBenchmark(
            shape, None if weights == "none" else weights, device, dtype, parse_batches(streams), prompt_tokens,
            most, rounds, rates, num_threads, mtp,
        )  # fmt: skip
        report(run_drafts_benchmark(benchmark, console), json_file, console)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse `1,8` to (1, 8). Raises BadParameter."""
    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        batches = ()
    if not batches or min(batches) < 1:
        raise typer.BadParameter(f"got {text!r}; wanted positive numbers with commas, like 1,8", param_hint="--batch")
    return batches


def warn_if_busy(console: Console) -> None:
    """Warn if other programs use the machine, since they change the times."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY_LOAD * cores:
        console.print(
            f"warning: load {load:.1f} on {cores} cores before this began: numbers mean little", style="yellow"
        )


def run_http(
    config: Path, streams: int, prompt_tokens: int, tokens: int, rounds: int, threads: int | None, console: Console
) -> "list[Row]":
    """Run the HTTP benchmark on a deployment's file."""
    import torch

    from bench.engine_steps import measure_floor_rates
    from bench.over_http import Floor, HttpBenchmark, run_http_benchmark
    from gpu.model.matrix_formats import step_weight_bytes
    from server.deployment import load_deployment
    from server.planning.deployment_plan import resolve_plan
    from transfer.machine import probe_machine

    plan = resolve_plan(load_deployment(config), probe_machine())
    device = torch.device(plan.memory.device)
    weight_bytes = step_weight_bytes(plan.architecture, plan.memory.dtype_bytes, plan.memory.is_packed, streams)
    rates, rate = measure_floor_rates(weight_bytes, threads or plan.memory.threads, device)
    floor = Floor(f"{weight_bytes / 1e9:.3f} GB of weights over {rate:.0f} GB/s", weight_bytes / rate / 1e6, rates)
    benchmark = HttpBenchmark(
        config=config,
        streams=streams,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        rounds=rounds,
        vocab_size=plan.architecture.vocab_size,
        load_timeout_s=600,
    )
    return run_http_benchmark(benchmark, plan, floor, console)
