"""Read the arguments of the laboratory's benchmarks of streams."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.context_commands import Config, failures_told, load_with_host
from bench.machine_commands import JsonFile, warn_if_busy


def beside(
    config: Config,
    short: Annotated[int, typer.Option(min=1, help="short streams")] = 8,
    short_tokens: Annotated[int, typer.Option(min=1, help="of each one's prompt")] = 1024,
    long_streams: Annotated[int, typer.Option("--long", min=1, help="long streams")] = 4,
    long_tokens: Annotated[int, typer.Option(min=64, help="of each one's prompt")] = 98_304,
    profile: Annotated[str, typer.Option(help="of long streams")] = "sampled",
    seconds: Annotated[float, typer.Option(min=0.1, help="of a window")] = 5.0,
    json_file: JsonFile = None,
) -> None:
    """Time short streams, long streams and a long prefill, each alone and beside the others."""
    from bench.benchmark_rows import report
    from lab.speed.beside import BesideBenchmark, run_beside_benchmark

    console = Console()
    deployment = load_with_host(config, console)
    running, most = short + long_streams, deployment.scheduler.max_running
    if running > most:
        raise typer.BadParameter(f"got {running} streams; {config} has scheduler.max_running {most}")
    benchmark = BesideBenchmark(short, short_tokens, long_streams, long_tokens, profile, seconds)
    with failures_told():
        report(run_beside_benchmark(benchmark, deployment, console), json_file, console)


def constrained(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="a deployment; random weights get a made-up vocabulary")
    ],
    streams: Annotated[int, typer.Option(min=1, help="that are held to a schema, and as many beside them")] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="of each stream")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="times that both kinds take turns")] = 3,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Time streams that are held to a JSON schema beside streams that are not, against all of them free."""
    from bench.benchmark_rows import report
    from lab.speed.constrained import ConstrainedBenchmark, run_constrained_benchmark
    from server.deployment import load_deployment

    console = Console()
    warn_if_busy(console)
    benchmark = ConstrainedBenchmark(streams, tokens, prompt_tokens, rounds, temperature)
    with failures_told():
        report(run_constrained_benchmark(benchmark, load_deployment(config), console), json_file, console)
