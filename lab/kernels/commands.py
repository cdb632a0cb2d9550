"""Define the commands of `python -m lab kernel ...`, each of which benchmarks one operation."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from bench.machine_commands import JsonFile, parse_batches, warn_if_busy

if TYPE_CHECKING:
    import torch

    from bench.benchmark_rows import Row

app = typer.Typer(no_args_is_help=True, help="Measure one operation against its floor and a peer.")

Device = Annotated[Literal["auto", "cuda", "cpu"], typer.Option()]
Batch = Annotated[str, typer.Option(help="requests of a step, with commas")]


@app.command("host-experts")
def host_experts(
    shape: Annotated[str, typer.Option(help="a named shape of a mixture of experts")] = "qwen3-30b-a3b",
    weights: Annotated[
        Literal["fp8", "int8", "int4", "Q8_0", "Q6_K", "Q4_0", "Q4_K"] | None,
        typer.Option(help="rounded to this, or as a GGUF file's; default: bf16"),
    ] = None,
    memory_gib: Annotated[float, typer.Option(help="of the card, all included")] = 23.0,
    on_card: Annotated[int | None, typer.Option(min=0, help="experts of a layer; default: what the plan says")] = None,
    batch: Batch = "1,4",
    prompts: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "4096,16384",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="of a prefill unit")] = 2048,
    steps: Annotated[int, typer.Option(min=8, help="decode steps of a round")] = 32,
    ways: Annotated[str, typer.Option(help="fetch, compute, or both with a comma: what steps do")] = "fetch,compute",
    threads: Annotated[int | None, typer.Option(min=1, help="of the CPU that computes; default: its cores")] = None,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time steps and prompts of a mixture of experts that does not fit the device's memory.

    Experts in host memory are fetched, against the link's floor, or computed by the CPU, against host memory's.
    """
    from lab.kernels.host_expert_steps import HostExpertsBenchmark, host_expert_rows, parse_ways

    asked = HostExpertsBenchmark(
        shape, weights, memory_gib, on_card, tuple(parse_batches(batch)), tuple(parse_batches(prompts)), chunk_tokens,
        steps, parse_ways(ways), threads,
    )  # fmt: skip
    run_kernel(device, json_file, lambda resolved, console: host_expert_rows(asked, resolved, console))


@app.command("host-queries")
def host_queries(
    tokens: Annotated[int, typer.Option(min=256, help="of a layer, whole multiples of 32,768 beyond 65,536")] = 98304,
    threads: Annotated[int, typer.Option(min=1)] = 16,
    rows: Annotated[Literal["bfloat16", "int8"], typer.Option()] = "bfloat16",
) -> None:
    """Time attention of 1 to 16 queries over one read of an 8B model's rows in host memory, beside torch and floors."""
    from lab.kernels.host_queries import measure

    measure(tokens, threads, rows)


@app.command("layer-experts")
def layer_experts(
    batch: Annotated[str, typer.Option(help="rows of a request, with commas")] = "1,4,8,16",
    threads: Annotated[int | None, typer.Option(min=1, help="of the CPU; default: its cores")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the experts of one layer on the CPU, in integers and in floats, against the rate of its memory."""
    from lab.kernels.layer_experts import LayerBenchmark, layer_rows
    from transfer.machine import count_physical_cores

    asked = LayerBenchmark(tuple(parse_batches(batch)), threads or count_physical_cores())
    run_kernel("cpu", json_file, lambda device, console: layer_rows(asked, console))


def run_kernel(
    device: str, json_file: Path | None, measure_rows: "Callable[[torch.device, Console], list[Row]]"
) -> None:
    """Measure on the requested device, and report. A wrong result is reported without a number, with status 1."""
    import torch

    from bench.benchmark_rows import GateError, report
    from gpu.model.spec import ModelError

    console = Console(stderr=True)
    warn_if_busy(console)
    try:
        report(measure_rows(torch.device(_resolve(device)), console), json_file, Console())
    except (GateError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _resolve(device: str) -> str:
    """Return `cuda` for `auto` if there is a GPU, else `cpu`."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
