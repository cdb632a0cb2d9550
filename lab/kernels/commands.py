"""Arguments of `python -m lab kernel ...`, turned into benchmarks of one operation each."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bench.machine_commands import JsonFile, Threads, parse_batches, warn_if_busy

if TYPE_CHECKING:
    import torch

    from bench.benchmark_rows import Row

app = typer.Typer(no_args_is_help=True, help="Measure one operation against its floor and a peer.")

Device = Annotated[Literal["auto", "cuda", "cpu"], typer.Option()]
Batch = Annotated[str, typer.Option(help="requests of a step, with commas")]


@app.command()
def lsh(
    keys: Annotated[int, typer.Option(min=1024, help="tokens of the context")] = 98_304,
    threads: Threads = None,
    bits: Annotated[int, typer.Option(min=1, max=16, help="of a code (the paper's K)")] = 10,
    tables: Annotated[int, typer.Option(min=2, max=512, help="hash tables (the paper's L)")] = 150,
    reps: Annotated[int, typer.Option(min=1, help="rounds")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Time a layer's attention in host memory: tables, lookups, sampled and exact rows."""
    from lab.kernels.lsh_kernel import LshBenchmark, lsh_rows
    from transfer.machine import count_physical_cores

    benchmark = LshBenchmark(keys, threads or count_physical_cores(), bits, tables, reps)
    run_kernel("cpu", json_file, lambda _, console: lsh_rows(benchmark, console))


@app.command()
def momo(
    lengths: Annotated[str, typer.Option(help="tokens of prompts, with commas")] = "32768,65536,131072,262144",
    unit_tokens: Annotated[int, typer.Option(min=128, help="queries of a unit")] = 8192,
    selections: Annotated[str, typer.Option(help="k of the selections that are compared on the longest prompt, with "
                                            "commas; empty: none")] = "16,64,128,256",
    settings: Annotated[list[str], typer.Option("--set", help="SETTING=VALUE of the method; repeatable")] = [],  # noqa: B006
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time MOMO's prefill of a layer, part by part, beside dense attention, and what its selections take."""
    from gpu.methods.momo.settings import MomoSettings
    from lab.kernels.momo_prefill import momo_rows, selection_rows

    tokens = parse_batches(lengths)
    given = dict(setting.split("=", 1) for setting in settings)
    try:
        method = MomoSettings.model_validate(given)
    except ValueError as error:
        print(f"error: --set: {error}", file=sys.stderr)
        raise typer.Exit(1) from None

    def rows(resolved: "torch.device", console: Console) -> "list[Row]":
        found = momo_rows(tokens, unit_tokens, method, resolved, console)
        ks = parse_batches(selections) if selections else ()
        return found + selection_rows(max(tokens), unit_tokens, ks, method, resolved, console)

    run_kernel(device, json_file, rows)


@app.command()
def mac(
    lengths: Annotated[str, typer.Option(help="tokens of contexts, with commas")] = "32768,65536,131072,262144",
    batch: Batch = "1,8,32",
    rates: Annotated[str, typer.Option(help="shares of heads that hit, with commas")] = "0,0.5,0.8,0.9,0.95,1",
    gaps: Annotated[Literal["head", "group", "both"], typer.Option(help="what hits and gaps are drawn for")] = "both",
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    capacity: Annotated[int, typer.Option(min=2, help="entries of a ring (the paper's K)")] = 1024,
    band: Annotated[int, typer.Option(min=1, help="cells before a match that are read again (the paper's r)")] = 256,
    outs: Annotated[Literal["float32", "bfloat16"], typer.Option(help="summaries in the ring")] = "float32",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time MAC-Attention of a decode layer, part by part, by hit rate, beside plain attention."""
    from lab.kernels.mac_attention import Shape, mac_rows

    shared = {"head": (False,), "group": (True,), "both": (False, True)}[gaps]
    shares = [float(rate) for rate in rates.split(",")]
    tokens, batches = parse_batches(lengths), parse_batches(batch)

    def rows(resolved: "torch.device", console: Console) -> "list[Row]":
        import torch

        shape = Shape(heads, kv_heads, capacity, band, getattr(torch, outs))
        return mac_rows(shape, tokens, batches, shares, shared, resolved, console)

    run_kernel(device, json_file, rows)


@app.command("mac-steps")
def mac_steps(
    shape: Annotated[str, typer.Option(help="a named shape; weights are random")] = "llama-3.1-8b",
    context: Annotated[int, typer.Option(min=2048, help="tokens of each context, all on the card")] = 131_072,
    batch: Annotated[int, typer.Option(min=1, help="contexts")] = 3,
    rates: Annotated[str, typer.Option(help="shares of heads that hit, with commas")] = "0.9,0.95,1",
    steps: Annotated[int, typer.Option(min=8, help="decode steps measured at each")] = 64,
) -> None:
    """Time whole decode steps with MAC-Attention off and on, on a GPU; the last line is JSON."""
    import json
    from dataclasses import asdict

    import torch

    from gpu.model.architecture import named_shape
    from lab.kernels.mac_decode import time_steps

    if not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device; steps are timed on a GPU")
    shares = [float(rate) for rate in rates.split(",")]
    times = time_steps(named_shape(shape), context, batch, shares, {}, steps)
    table = Table("hits asked", "counted", "whole groups", "KV read", "step, ms", "times faster than without")
    for one in times:
        asked = "no MAC" if one.asked is None else f"{one.asked:.0%}"
        table.add_row(asked, f"{one.hits:.1%}", f"{one.whole_groups:.1%}", f"{one.read:.1%}", f"{one.median_ms:.2f}",
                      f"{times[0].median_ms / one.median_ms:.2f}")  # fmt: skip
    Console().print(table)
    print(json.dumps({"shape": shape, "context": context, "batch": batch, "rows": [asdict(one) for one in times]}))


@app.command("predicted-steps")
def predicted_steps(
    weights: Annotated[Path, typer.Option(help="a predictor")] = Path("deploy/predictors/reference.safetensors"),
    shape: Annotated[str, typer.Option(help="a named shape; the model's weights are random")] = "llama-3.1-8b",
    cells: Annotated[str, typer.Option(help="tokens of each context : tokens that a KV head reads of its middle x "
                                       "contexts, with commas; the first ones matter most")] = "32768:2048x1",
    turnovers: Annotated[str, typer.Option(help="shares of blocks that change from step to step")] = "0.05,0.2,0.5",
    replay: Annotated[Path | None, typer.Option(help="a model's selections, of `python -m lab selections`, at the "
                                                "largest budget or more")] = None,
    steps: Annotated[int, typer.Option(min=8, help="decode steps measured of each")] = 24,
    trace: Annotated[Path | None, typer.Option(help="a Chrome trace of the first cell's steps as they serve; beside it "
                                               "`.lanes.json`, with a lane each for what overlaps")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="nothing is begun after so many")] = None,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time whole decode steps over predicted blocks, fetched in several ways; on the CPU device, see that they run."""
    from lab.kernels.predicted_decode import parse_cells
    from lab.kernels.predicted_run import Asked, run_cells
    from lab.kernels.predicted_ways import SelectionsError, read_selections

    try:
        asked = Asked(
            shape, parse_cells(cells), weights, [float(share) for share in turnovers.split(",")], steps,
            None if replay is None else read_selections(replay), trace, seconds,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    try:
        run_cells(asked, _resolve(device), json_file, Console(width=120, highlight=False))
    except SelectionsError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


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
    """Time steps and prompts of a mixture whose experts do not fit the card: fetched beside the link's floor, computed
    by the CPU beside that of host memory.
    """
    from lab.kernels.host_experts import HostExpertsBenchmark, host_expert_rows, parse_ways

    asked = HostExpertsBenchmark(
        shape, weights, memory_gib, on_card, tuple(parse_batches(batch)), tuple(parse_batches(prompts)), chunk_tokens,
        steps, parse_ways(ways), threads,
    )  # fmt: skip
    run_kernel(device, json_file, lambda resolved, console: host_expert_rows(asked, resolved, console))


def run_kernel(
    device: str, json_file: Path | None, measure_rows: "Callable[[torch.device, Console], list[Row]]"
) -> None:
    """Measure on the device that was asked for and report; a wrong result ends with status 1 and no number."""
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
    """Return `cuda` for `auto` where there is one, else `cpu`."""
    import torch

    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
