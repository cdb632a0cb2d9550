"""Arguments of `python -m lab load-weights`, turned into a benchmark."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from bench.machine_commands import JsonFile, warn_if_busy


def load_weights(
    folder: Annotated[Path, typer.Argument(help="where the checkpoint is written, and removed from again")],
    random_weights: Annotated[str, typer.Option(help="a named shape")] = "llama-3.1-8b",
    shards: Annotated[int, typer.Option(min=1, help="files of it")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option()] = "auto",
    weights: Annotated[Literal["fp8", "int8", "int4"] | None, typer.Option(help="rounded to this on the way")] = None,
    json_file: JsonFile = None,
) -> None:
    """Write a checkpoint of random weights, and load it, beside the rate at which the page cache is read."""
    import torch

    from bench.benchmark_rows import GateError, report
    from gpu.model.architecture import ModelError
    from lab.speed.load_weights import run_load_weights

    console = Console()
    warn_if_busy(console)
    resolved = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        row = run_load_weights(folder, random_weights, shards, rounds, resolved, console, weights)
        report([row], json_file, console)
    except (GateError, ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
