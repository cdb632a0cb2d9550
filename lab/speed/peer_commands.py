"""Run `python -m lab peers-serve`, `peers-llama` and `peers-table`: time both sides of a peer's rows, and join them."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

Rows = Annotated[str, typer.Option(help="names with commas, `short` or `all`")]


def peers_serve(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="a deployment")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="gets a JSON line for each row as it is done")],
    weights: Annotated[str, typer.Option(help="as the lines are to name them")] = "bf16",
    rows: Rows = "short",
    small: Annotated[bool, typer.Option("--small", help="all of it much smaller, to see that it runs")] = False,
    rate_of: Annotated[Path | None, typer.Option(help="the other side's rows, for the rate of arrivals")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-3, help="of arrivals a second; no row is wanted for it")] = None,
    start_seconds: Annotated[float, typer.Option(help="the server has to be ready")] = 400.0,
) -> None:
    """Time our server over HTTP at the peer's rows that the file does not have yet."""
    from bench.benchmark_rows import GateError
    from bench.server_process import serving
    from lab.speed import peer_rows as peers
    from lab.speed.token_load import LoadError, run_load
    from lab.speed.token_turns import TokenLoad

    console, done = Console(), peers.read_rows(file)
    try:
        wanted = [row for row in peers.choose_rows(rows, small, rate) if row.name not in done]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rows") from None
    if all(row.needs_rate for row in wanted) and (rate_of is None or peers.rate_of([file, rate_of]) is None):
        return

    def command(port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", "server.commands", "serve", str(config), *address]

    try:
        with serving(command, start_seconds) as url:
            asyncio.run(run_load(url, TokenLoad(8, 64, 8, seed=1)))
            for row in wanted:
                found = peers.rate_of([file, *([rate_of] if rate_of else [])]) if row.needs_rate else None
                if row.needs_rate and found is None:
                    continue
                loads = [row.with_repeat(number, found) for number in range(row.repeats)]
                summaries = [peers.summarise_row(row, asyncio.run(run_load(url, load))) for load in loads]
                line = peers.write_row(file, "tandem", weights, row, summaries)
                console.print(peers.describe_row(line), highlight=False, markup=False, soft_wrap=True)
    except (GateError, LoadError) as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def peers_llama(
    bench: Annotated[Path, typer.Argument(metavar="BENCH", help="llama.cpp's llama-bench")],
    model: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="written first, if it is not there")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="gets a JSON line for each row as it is done")],
    kv: Annotated[str, typer.Option(help="kind of keys and values: f16 or q8_0")] = "f16",
    rows: Rows = "",
    small: Annotated[bool, typer.Option("--small", help="all of it much smaller, a small model too")] = False,
    layers: Annotated[int, typer.Option(help="that lie on the card")] = 99,
    only_model: Annotated[bool, typer.Option("--only-model", help="write the model, and end")] = False,
) -> None:
    """Time llama.cpp at the peer's rows that the file does not have yet, each by a run of its own benchmark."""
    from lab.speed import peer_rows as peers
    from lab.speed.llama_rows import BenchError, time_row
    from lab.speed.random_gguf import SIZES, write_random_gguf

    if not model.exists():
        write_random_gguf(model, SIZES["small" if small else "llama-3.1-8b"])
    if only_model:
        return
    console, done = Console(), peers.read_rows(file)
    for row in peers.choose_rows(rows or ",".join(peers.OF_LLAMA_CPP), small, None):
        if row.name in done:
            continue
        try:
            summaries = [time_row(bench, model, row, kv, layers) for _ in range(row.repeats)]
        except BenchError as error:
            console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
        line = peers.write_row(file, "llama", kv, row, summaries)
        console.print(peers.describe_row(line), highlight=False, markup=False, soft_wrap=True)


def peers_table(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of files tandem-KIND.jsonl and PEER-KIND.jsonl")],
    peer: Annotated[str, typer.Option(help="the other side's files begin with it")] = "vllm",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the rows there")] = None,
) -> None:
    """Print both sides of every row, and the ratio of ours to theirs: below 1 we are faster."""
    from lab.speed.peer_rows import join_rows

    table = Table(box=None, pad_edge=False)
    for name in ("weights", "row", "metric", peer, "tandem", "ours/theirs"):
        table.add_column(name, justify="left" if name in ("weights", "row", "metric") else "right", no_wrap=True)
    told = []
    kinds = {path.stem.partition("-")[2] for side in ("tandem", peer) for path in folder.glob(f"{side}-*.jsonl")}
    for kind in sorted(kinds):
        for line in join_rows(folder / f"tandem-{kind}.jsonl", folder / f"{peer}-{kind}.jsonl"):
            told.append({"weights": kind} | line)
            sides = ["" if line[side] is None else f"{line[side]:.3f} {line['unit']}" for side in ("theirs", "ours")]
            ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
            table.add_row(kind, line["row"], line["metric"], *sides, ratio)
    Console(width=120).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"peer": peer, "rows": told}, indent=1) + "\n")
