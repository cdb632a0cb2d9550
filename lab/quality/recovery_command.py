"""Run `python -m lab recovery`: how much of the exact attention predicted blocks hold, beside other methods'
choices.
"""

import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evals.options import (
    Device,
    Json,
    Lengths,
    ModelFolder,
    Seconds,
    Seed,
    Text,
    one_line_errors,
    parse_lengths,
    parse_tasks,
)
from lab.quality.predicted_defaults import EVERY, HISTORY, NEVER, ROTATE, SINK, UNREAD

if TYPE_CHECKING:
    from rich.console import Console

    from evals.score_rows import Row


def recovery(
    model: ModelFolder,
    weights: Annotated[list[Path], typer.Option(
        "--weights", exists=True, dir_okay=False, help="a predictor's file; repeat to compare"
    )],
    lengths: Lengths = "4096",
    budgets: Annotated[str, typer.Option("--budgets", help="tokens that a query head reads, with commas")] =
        "256,512,1024,2048",
    names: Annotated[str, typer.Option("--tasks", help="names with commas, `text` (running text) among "
                                          "them; default: text")] = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a task and length")] = 1,
    steps: Annotated[int, typer.Option("--steps", min=1, help="last queries, which stand for decode steps")] = 64,
    group: Annotated[str, typer.Option("--group", help="before, after, apart, with commas")] =
        "before,apart",
    block: Annotated[str, typer.Option("--block", help="tokens (the paper's b), with commas")] = "16",
    history: Annotated[str, typer.Option("--history", help="steps (the paper's H: 64), with commas")] = f"{HISTORY}",
    calibrate: Annotated[str, typer.Option("--calibrate", help="steps (the paper's M: 5), with commas")] = f"{NEVER}",
    stored: Annotated[str, typer.Option("--stored", help="float32, bfloat16 or uint8, with commas")] = "uint8",
    rotate: Annotated[str, typer.Option("--rotate", help="one block in so many calibrated a step, with commas; "
                                           "nothing: none, as in the paper")] = f"{ROTATE}",
    unread: Annotated[str, typer.Option("--unread", help="of blocks that were not read the history has: zero (the "
                                           "paper's), last, with commas")] = UNREAD,
    sink: Annotated[str, typer.Option("--sink", help="first tokens that predicted reads always, with commas")] =
        f"{SINK}",
    every: Annotated[str, typer.Option("--every", help="steps between two predictions (the paper's: 1), with commas")] =
        f"{EVERY}",
    heads: Annotated[str, typer.Option("--heads", help="who chooses in the others: apart, together; nothing: "
                                          "no others")] = "apart,together",
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
    seconds: Seconds = None,
    json_path: Json = None,
) -> None:  # fmt: skip
    """Compare the share of attention that predicted blocks hold with other methods' choices, at equal budgets.

    Predicted blocks are chosen with the settings that serve, where no option says otherwise.
    Full attention runs once; its last queries stand for decode steps. A task's prompts end with their answers. The
    first lengths and tasks come first; what a run that is cut has finished stands in its JSON. Exit status: 0; 3: cut
    before the end.
    """
    with one_line_errors():
        import torch

        from evals.forward import load_decoder
        from evals.options import parse_numbers
        from evals.report.document import finite, write_document
        from evals.report.table import open_console
        from evals.session import progress_bar, resolve_device
        from evals.stopping import RunCut, stopping
        from lab.quality.recovery import Ablation, labels_of, measure, pool
        from lab.quality.recovery_prompts import TEXT, recovery_prompts

        on, sizes, tasks = resolve_device(device), parse_lengths(lengths), parse_tasks(names, (TEXT,)) or [TEXT]
        tried = Ablation(
            tuple(group.split(",")),
            tuple(parse_numbers("--block", block)),
            tuple(parse_numbers("--history", history)),
            tuple(parse_numbers("--calibrate", calibrate)),
            tuple(stored.split(",")),
            tuple(parse_numbers("--rotate", rotate) if rotate else [0]),
            tuple(parse_numbers("--every", every)),
            tuple(unread.split(",")),
            tuple(parse_numbers("--sink", sink)),
        )
        chosen = heads.split(",") if heads else []
        files, tokens = [str(path) for path in weights], parse_numbers("--budgets", budgets)
        decoder = load_decoder(model, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        configuration = {
            "model": str(model), "weights": files, "lengths": sizes, "tasks": tasks, "budgets": tokens, "steps": steps,
            "samples": samples, "device": on, "text": [path.name for path in text],
        }  # fmt: skip
        layers: list[Row] = []
        rows: list[Row] = []
        with (
            progress_bar(len(sizes) * len(tasks) * decoder.architecture.num_layers, "layers") as advance,
            stopping(seconds) as stop,
        ):
            try:
                for length, task in product(sizes, tasks):
                    stop.check()
                    prompts = recovery_prompts(model, task, length, samples, seed, tuple(text))
                    found = measure(
                        decoder, prompts, tokens, steps, lambda size: labels_of(size, files, tried, chosen), advance
                    )
                    layers += [{"length": length, "task": task, **row} for row in found]
                    rows = pool(layers, ("length", "task", "budget", "method"))
                    if json_path is not None:
                        document = {
                            "configuration": configuration,
                            "seeds": {"text": seed},
                            "rows": rows,
                            "layers": layers,
                        }
                        write_document(json_path, finite(document))
            except RunCut as cut:
                print(f"recovery: cut before {task} at {length:,}: {cut}", file=sys.stderr)
        if rows:
            print_recovery(rows, tokens, open_console())
        if stop.reason is not None:
            raise typer.Exit(3)


def print_recovery(rows: "list[Row]", budgets: list[int], console: "Console") -> None:
    """A line for each length, task and method, a column for each budget; then means over lengths and tasks.

    The last column: rows of KV that the heads of a group read together, where each for itself may read the budget.
    """
    from rich.table import Table

    from lab.quality.recovery import pool

    table = Table("length", "task", "method", *(f"{budget:,} tokens" for budget in budgets), "KV rows / budget")
    means = [{"length": 0, "task": "mean", **row} for row in
             pool([{**row, "prompts": 1} for row in rows], ("budget", "method"))]  # fmt: skip
    several = len({(row["length"], row["task"]) for row in rows}) > 1
    shown = [*rows, *(means if several else [])]
    for length, task, method in dict.fromkeys((row["length"], row["task"], row["method"]) for row in shown):
        own = [row for row in shown if (row["length"], row["task"], row["method"]) == (length, task, method)]
        shares = {row["budget"]: row["recovery"] for row in own}
        reads = sum(row["kv_rows"] / row["budget"] for row in own) / len(own)
        table.add_row(f"{length:,}" if length else "all", task, method,
                      *(f"{100 * shares[budget]:.2f} %" for budget in budgets), f"{reads:.2f}")  # fmt: skip
    console.print(table)
