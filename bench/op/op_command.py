"""Run `tandem bench op NAME`."""

import sys
from importlib import import_module
from typing import Annotated, Literal

import typer
from rich.console import Console

from bench.machine_commands import JsonFile, Threads, parse_batches, warn_if_busy

OPERATIONS = {
    "linear": "bench.op.linear:linear_cases",
    "output": "bench.op.linear:output_cases",
    "attention": "bench.op.attention:decode_cases",
    "prefill": "bench.op.attention:prefill_cases",
    "indexed": "bench.op.indexed:indexed_cases",
}
"""The function that makes each operation's cases."""


def op(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(OPERATIONS)}")],
    shape: Annotated[str, typer.Option(help="a named shape; weights and rows are random")] = "llama-3.1-8b",
    batch: Annotated[str, typer.Option(help="rows of a step, with commas")] = "1,8",
    tokens: Annotated[int, typer.Option(min=1, help="of a context or prompt")] = 32_768,
    kinds: Annotated[str, typer.Option(help="formats of weights or rows, methods, with commas; default: "
                                            "the operation's own")] = "",
    rows: Annotated[str, typer.Option(help="of `indexed`: how rows are stored: bfloat16, int8 or int4")] = "",
    bits: Annotated[str, typer.Option(help="of `indexed`: bits of keys and values in the index, as 4,2")] = "",
    share: Annotated[str, typer.Option(help="of `indexed`: share of the tokens that a KV head reads, as 0.02")] = "",
    threads: Threads = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option()] = "auto",
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time one operation of the engine against its floor and a peer."""
    import torch

    from bench.benchmark_rows import GateError, report
    from bench.op.frame import Asked, time_cases
    from gpu.model.spec import ModelError
    from transfer.machine import count_physical_cores

    if name not in OPERATIONS:
        raise typer.BadParameter(f"got {name}; wanted one of {', '.join(OPERATIONS)}", param_hint="NAME")
    own = {option: value for option, value in {"rows": rows, "bits": bits, "share": share}.items() if value}
    if own and name != "indexed":
        raise typer.BadParameter(f"is of `indexed`, got {name}; leave it out", param_hint=f"--{next(iter(own))}")
    console = Console(stderr=True)
    warn_if_busy(console)
    on = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    named = tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
    asked = Asked(shape, parse_batches(batch), tokens, named, threads or count_physical_cores(), on, own)
    module, _, function = OPERATIONS[name].partition(":")
    try:
        cases = getattr(import_module(module), function)(asked)
        report(time_cases(cases, asked, console), json_file, Console())
    except (GateError, ModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
