"""Run `python -m lab load-timeline` and `load-simulated`: where a load's time goes, measured and simulated."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lab.speed.load_simulation import DeviceTimes, Outcome
    from lab.speed.token_turns import TokenLoad

Streams = Annotated[int, typer.Option(min=1, help="requests open at once")]
Requests = Annotated[int | None, typer.Option(min=1, help="requests in all; default: as many as streams")]
Tokens = Annotated[int, typer.Option(min=1, help="of each prompt")]
Answer = Annotated[int, typer.Option(min=1, help="tokens of each answer")]
Rate = Annotated[float | None, typer.Option(min=1e-3, help="arrivals a second, Poisson; default: all at once")]
Turns = Annotated[int, typer.Option(min=1, help="of each chat, whose prefix comes again")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all of it there")]

_WIDTH = 160  # of tables where the output is no terminal
_COLUMNS = ("simulated", "seconds", "tokens/s", "prefill", "decode", "few rows", "first ms", "99 %", "token ms", "99 %",
            "gap 99 %", "longest")  # fmt: skip
_LARGE_CHUNK = 16_384  # tokens of a unit where an 8B has room for them
FAVOURS = ("latency", "auto", "throughput")


def load_timeline(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment")],
    streams: Streams = 64,
    requests: Requests = None,
    tokens: Tokens = 1000,
    answer: Answer = 256,
    rate: Rate = None,
    turns: Turns = 1,
    trace: Annotated[float, typer.Option(min=0, help="seconds of kernels to trace, in another run of the load")] = 0.0,
    trace_after: Annotated[float, typer.Option(min=0, help="seconds after that run's begin")] = 0.2,
    start_seconds: Annotated[float, typer.Option(help="the server has to be ready")] = 400.0,
    json_file: Json = None,
) -> None:
    """Serve a load, and print where its time goes: device, gaps, units, steps by batch, host and requests' stages."""
    from bench.benchmark_rows import GateError
    from lab.speed.load_timeline import TimelineRun, run_timeline
    from lab.speed.timeline_page import print_timeline
    from lab.speed.token_load import LoadError
    from lab.speed.token_turns import TokenLoad

    console = _console()
    load = TokenLoad(requests or streams, tokens, answer, streams, rate, turns)
    try:
        told = run_timeline(TimelineRun(config, load, trace, trace_after, start_seconds)).told()
    except (GateError, LoadError) as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None
    print_timeline(told, console)
    times = measured_times(told)
    if times is not None:
        console.print(f"simulated with what this run measured: {times}", highlight=False, soft_wrap=True)
        _print_simulated(config, load, times, console)
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=1) + "\n")


def load_simulated(
    shape: Annotated[str, typer.Option(help="a named shape, or a deployment's file")] = "llama-3.1-8b",
    streams: Streams = 64,
    requests: Requests = None,
    tokens: Tokens = 1000,
    answer: Answer = 256,
    rate: Rate = None,
    turns: Turns = 1,
    seed: Annotated[int, typer.Option(help="of arrivals")] = 0,
    prompt_rate: Annotated[float, typer.Option(help="prompt tokens a second")] = 27_000,
    decode_ms: Annotated[
        tuple[float, float, float],
        typer.Option(metavar="ONE MANY WEIGHTS", help="of a step of one row, of 64, and of reading the weights"),
    ] = (5.4, 7.1, 4.8),
    unit_ms: Annotated[float, typer.Option(help="of a unit beside its tokens")] = 0.15,
) -> None:
    """Simulate a load with the engine's own scheduler on a device with stated times, and with one that mixes steps."""
    from lab.speed.load_simulation import DeviceTimes
    from lab.speed.token_turns import TokenLoad

    one_s, most_s, weights_s = (1e-3 * ms for ms in decode_ms)
    times = DeviceTimes(prompt_rate, 1e-3 * unit_ms, one_s, most_s, weights_s)
    config = Path(shape) if Path(shape).exists() else shape
    load = TokenLoad(requests or streams, tokens, answer, streams, rate, turns, seed)
    _print_simulated(config, load, times, _console())


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def measured_times(told: dict[str, Any]) -> "DeviceTimes | None":
    """Return the device's times as a timeline has them; None where it has no unit, or no step of one row count."""
    from lab.speed.load_simulation import DeviceTimes

    units, decode = told["units"], told["decode"]
    if not units["prompt tokens/s"] or not decode:
        return None
    few, many = (min(decode, key=lambda row: row["mean rows"]), max(decode, key=lambda row: row["mean rows"]))
    slope = 0.0
    if many["mean rows"] > few["mean rows"]:
        slope = max(0.0, (many["median_ms"] - few["median_ms"]) / (many["mean rows"] - few["mean rows"]))
    one_ms = max(few["median_ms"] - slope * (few["mean rows"] - 1), 1e-3)
    one_s = 1e-3 * one_ms
    return DeviceTimes(units["prompt tokens/s"], 0.0, one_s, one_s + 63e-3 * slope, weights_s=0.8 * one_s)


def _print_simulated(config: Path | str, load: "TokenLoad", times: "DeviceTimes", console: Console) -> None:
    from gpu.model.architecture import load_architecture
    from gpu.model.named_shapes import named_shape
    from lab.speed.load_simulation import simulate
    from lab.speed.mixed_steps import simulate_mixed
    from scheduler.engine_config import SchedulerConfig
    from server.deployment import load_deployment

    if isinstance(config, str):
        architecture, given = named_shape(config), SchedulerConfig()
    else:
        deployment = load_deployment(config)
        architecture, given = load_architecture(deployment.model), deployment.scheduler
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "simulated" else "right", no_wrap=True)
    for favour in FAVOURS:
        chunk = 2048 if favour == "latency" else _LARGE_CHUNK
        tree = {"prefix_cache": load.turns > 1, "max_running": given.max_running, "favour": favour,
                "max_queue": max(load.requests, given.max_queue), "prefill": {"chunk_tokens": chunk}}  # fmt: skip
        told = simulate(SchedulerConfig.model_validate(tree), architecture, load, times)
        table.add_row(favour, *_cells(told))
    mixed = simulate_mixed(architecture.num_layers, load, times, _LARGE_CHUNK, given.max_running)
    table.add_row("mixed steps", *_cells(mixed))
    console.print(table)


def _cells(told: "Outcome") -> list[str]:
    from lab.speed.token_turns import summarise_turns

    summary = summarise_turns(told.turns)
    firsts, tokens, (_, gap_ms, longest_ms) = (
        [1e3 * summary[f"{name}_s_{kind}"] for kind in ("p50", "p99", "most")] for name in ("first", "token", "gap")
    )
    return [
        f"{told.seconds:.3f}", f"{summary['tokens_per_s']:,.0f}", f"{told.prefill_s:.3f}", f"{told.decode_s:.3f}",
        f"{told.num_few_rows}, {told.few_rows_s:.2f} s", f"{firsts[0]:.1f}", f"{firsts[1]:.1f}",
        f"{tokens[0]:.2f}", f"{tokens[1]:.2f}", f"{gap_ms:.1f}", f"{longest_ms:.0f}",
    ]  # fmt: skip
