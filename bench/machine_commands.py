"""Arguments of `tandem bench engine` and `tandem bench rates`, turned into benchmarks. Measures nothing itself."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from bench.rows import Row

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the rows there as well")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads; default: physical cores")]
_BUSY_LOAD = 0.5  # of the cores


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
    dtype: Annotated[str, typer.Option(help="auto: bfloat16 on cuda, float32 and bfloat16 on the CPU")] = "auto",
    http: Annotated[Path | None, typer.Option(metavar="CONFIG", help="instead: serve CONFIG, stream over HTTP")] = None,
    streams: Annotated[int, typer.Option(min=1, help="with --http")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Time a decode step against the floor of its weights and a peer; with --http, the server against its engine."""
    import torch

    from bench.engine import EngineBenchmark, run_engine_benchmark
    from bench.rows import GateError, report
    from gpu.load import DTYPES
    from transfer.machine import count_physical_cores

    console = Console()
    warn_if_busy(console)
    resolved = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [dtype] if dtype != "auto" else ["bfloat16"] if resolved == "cuda" else ["float32", "bfloat16"]
    if not set(dtypes) <= set(DTYPES):
        raise typer.BadParameter(f"got {dtype}; wanted auto or one of {', '.join(DTYPES)}", param_hint="--dtype")
    try:
        if http is not None:
            rows = run_http(http, streams, prompt_tokens, steps, rounds, threads, console)
            report(rows, json_file, console)
            return
        if (model is None) == (random_weights is None):
            raise typer.BadParameter("give one of --model and --random-weights, or --http CONFIG")
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
            )
            rows += run_engine_benchmark(benchmark, console)
        report(rows, json_file, console)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def long(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `host` section")],
    context: Annotated[int, typer.Option(min=64, help="tokens of a prompt")] = 98_304,
    batch: Annotated[str, typer.Option(help="batch sizes, ascending, with commas")] = "1,2,4",
    prompts: Annotated[int | None, typer.Option(min=1, help="which requests repeat; default: one each")] = None,
    steps: Annotated[int, typer.Option(min=8, help="decode steps measured at each batch")] = 32,
    seconds: Annotated[float, typer.Option(help="or as many as begin in so many seconds, 4 at least")] = 6.0,
    profiles: Annotated[str, typer.Option(help="ours, then its peer, with commas")] = "sampled,offloaded",
    turn: Annotated[int, typer.Option(help="tokens of a first turn, to time the second; 0: none")] = 32_768,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="a Chrome trace of a few steps goes there")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time contexts that outgrow the card: prefill, decode by batch, and the next turn of a conversation."""
    from bench.long_context import LongContextBenchmark, run_long_context_benchmark
    from bench.rows import GateError, report
    from gpu.profiles import ProfileError
    from server.config import load_deployment

    console = Console()
    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.host is None:
        raise typer.BadParameter(f"{config} has no `host` section", param_hint="CONFIG")
    batches, most = tuple(sorted(set(parse_batches(batch)))), deployment.scheduler.max_running
    if batches[-1] > most:
        raise typer.BadParameter(f"got {batches[-1]}; {config} has scheduler.max_running {most}", param_hint="--batch")
    names = tuple(profiles.split(","))
    benchmark = LongContextBenchmark(context, prompts or batches[-1], batches, steps, seconds, names, turn, trace)
    try:
        for rows in run_long_context_benchmark(benchmark, deployment, console):
            report(rows, json_file, console)  # a run that is cut keeps the profiles before
    except (GateError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def beside(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `host` section")],
    short: Annotated[int, typer.Option(min=1, help="short streams")] = 8,
    short_tokens: Annotated[int, typer.Option(min=1, help="of each one's prompt")] = 1024,
    long_streams: Annotated[int, typer.Option("--long", min=1, help="long streams")] = 4,
    long_tokens: Annotated[int, typer.Option(min=64, help="of each one's prompt")] = 98_304,
    profile: Annotated[str, typer.Option(help="of long streams")] = "sampled",
    seconds: Annotated[float, typer.Option(min=0.1, help="of a window")] = 5.0,
    json_file: JsonFile = None,
) -> None:
    """Time short streams, long streams and a long prefill, each alone and beside the others."""
    from bench.beside import BesideBenchmark, run_beside_benchmark
    from bench.rows import GateError, report
    from gpu.profiles import ProfileError
    from server.config import load_deployment

    console = Console()
    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.host is None:
        raise typer.BadParameter(f"{config} has no `host` section", param_hint="CONFIG")
    running, most = short + long_streams, deployment.scheduler.max_running
    if running > most:
        raise typer.BadParameter(f"got {running} streams; {config} has scheduler.max_running {most}")
    benchmark = BesideBenchmark(short, short_tokens, long_streams, long_tokens, profile, seconds)
    try:
        report(run_beside_benchmark(benchmark, deployment, console), json_file, console)
    except (GateError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def prefill(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment with a `host` section")],
    lengths: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "16384,98304",
    profiles: Annotated[str, typer.Option(help="with commas")] = "exact,sampled",
    turn: Annotated[int, typer.Option(help="tokens of a first turn, to time the next one; 0: none")] = 32_768,
    question: Annotated[int, typer.Option(min=1, help="new tokens of the next turn")] = 256,
    trace: Annotated[bool, typer.Option(help="trace a prompt of each length")] = True,
    json_file: JsonFile = None,
) -> None:
    """Time the first token of long prompts against their floor, and say where the rest of the time goes."""
    from bench.prefill import PrefillBenchmark, run_prefill_benchmark
    from bench.rows import GateError, report
    from gpu.profiles import ProfileError
    from server.config import load_deployment

    console = Console()
    warn_if_busy(console)
    deployment = load_deployment(config)
    if deployment.host is None:
        raise typer.BadParameter(f"{config} has no `host` section", param_hint="CONFIG")
    asked = tuple(sorted(set(parse_batches(lengths))))
    benchmark = PrefillBenchmark(asked, tuple(profiles.split(",")), turn, question, trace)
    try:
        for rows in run_prefill_benchmark(benchmark, deployment, console):
            report(rows, json_file, console)  # a run that is cut keeps the profiles before
    except (GateError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,8` to (1, 8). Raises BadParameter."""
    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        batches = ()
    if not batches or min(batches) < 1:
        raise typer.BadParameter(f"got {text!r}; wanted positive numbers with commas, like 1,8", param_hint="--batch")
    return batches


def warn_if_busy(console: Console) -> None:
    """Times of a machine that others use are theirs as much as ours."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY_LOAD * cores:
        console.print(
            f"warning: load {load:.1f} on {cores} cores before this began: numbers mean little", style="yellow"
        )


def run_http(
    config: Path, streams: int, prompt_tokens: int, tokens: int, rounds: int, threads: int | None, console: Console
) -> "list[Row]":
    """The HTTP benchmark on a deployment's file."""
    import torch

    from bench.engine import measure_floor_rates
    from bench.over_http import Floor, HttpBenchmark, run_http_benchmark
    from server.config import load_deployment
    from server.plan import resolve_plan
    from transfer.machine import probe_machine

    plan = resolve_plan(load_deployment(config), probe_machine())
    device = torch.device(plan.memory.device)
    weight_bytes = plan.architecture.num_weights_read_per_token * plan.memory.dtype_bytes
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
