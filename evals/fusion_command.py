"""Run `tandem eval fusion`: policies that reuse documents, judged beside computing all of them.

Invariant: a run that is stopped or killed leaves the JSON of the batches that it finished, with all policies in each.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evals.options import (
    Device,
    Json,
    Lengths,
    Questions,
    Seconds,
    Seed,
    SentAs,
    Text,
    one_line_errors,
    parse_files,
    parse_lengths,
    parse_shares,
    parse_tasks,
)
from transfer.host_config import DocumentsConfig

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULTS = {name: field.default for name, field in DocumentsConfig.model_fields.items()}
SERVED_POLICY = "{policy}:select_layer={select_layer},seam_tokens={seam_tokens}".format(**_DEFAULTS)
"""What a deployment does that says nothing else; a policy's name alone is that of its paper."""


def fusion(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder or GGUF file of the model")],
    policies: Annotated[str, typer.Option("--policies", help="names with spaces between; settings as "
                                          "a3:select_layer=3,keep_tokens=1024,ratio=0.15")] =
        f"{SERVED_POLICY} a3 cacheblend legolink random pie full_reuse",
    ratios: Annotated[str, typer.Option("--ratios", help="of all tokens, computed again; commas between")] =
        "0.05,0.15,0.3,0.5",
    lengths: Lengths = "4096",
    names: Annotated[str, typer.Option("--tasks", help="names with commas; default: several of the form, or the "
                                       "datasets where some are given")] = "",
    form: Annotated[str, typer.Option("--form", help="reference (the reference model's own) or ruler")] = "reference",
    sent_as: SentAs = "auto",
    dataset: Annotated[list[str], typer.Option("--dataset", help="NAME=FILE, such as longbench/qasper=qasper.jsonl; "
                                               "repeatable")] = [],  # noqa: B006
    questions: Questions = [],  # noqa: B006
    text: Text = [],  # noqa: B006
    answer: Annotated[int | None, typer.Option("--answer", min=1, help="tokens of an answer at most; default: the "
                                               "task's own")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a length, of all tasks together")] = 40,
    maps: Annotated[int, typer.Option("--maps", min=0, help="prompts whose attention maps are compared")] = 4,
    chunk: Annotated[int, typer.Option("--chunk", min=16, help="tokens of a document's chunk")] = 512,
    rows: Annotated[str, typer.Option("--rows", help="bfloat16, float32 or int8")] = "bfloat16",
    seconds: Seconds = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_path: Json = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="write the picture of KL against the ratio here")] = None,
) -> None:  # fmt: skip
    """Compare policies that reuse documents' keys and values, in the engine that serves, with computing all of them.

    Prompts are written by the model's chat template, if it has one. Documents are cut into chunks, whose order is
    shuffled in generated tasks. KL: from vanilla's, of the next token, and along vanilla's
    answer up to where a policy's leaves it. Distance: of the question's attention maps from vanilla's, L2 over
    vanilla's norm, mean of layers behind the first. Lengths take turns, and all policies answer the same prompts.
    """
    with one_line_errors():
        from evals.cells import PromptSettings
        from evals.datasets import DATASETS
        from evals.fusion import TOGETHER, fusion_engine, fusion_rows, judge, parse_policies
        from evals.fusion_prompts import DEFAULT_TASKS, PromptPlan, prompts_ahead
        from evals.report.document import describe_run, finite, machine_name, write_document, write_text
        from evals.report.fusion_figure import draw_fusion
        from evals.report.table import open_console
        from evals.session import count_workers, exit_status, progress_bar, resolve_device
        from evals.stopping import stopping
        from evals.tasks import FORMS, RULER_TASKS

        if form not in FORMS:
            raise ValueError(f"--form: unknown {form!r}; known: {', '.join(FORMS)}")
        on, sizes, begin = resolve_device(device), parse_lengths(lengths), time.monotonic()
        files = parse_files("--dataset", dataset, list(DATASETS))
        asked_of = parse_files("--questions", questions, list(RULER_TASKS[-2:]))
        tasks = (*parse_tasks(names), *files) or DEFAULT_TASKS[form]
        labels = policies.split()
        runs = parse_policies(labels, parse_shares("--ratios", ratios))
        together = TOGETHER["cuda" if on.startswith("cuda") else "cpu"]
        asked = f"--lengths {lengths} --samples {samples} --ratios {ratios} --policies '{' '.join(labels)}'"
        if form != "reference" or names:
            asked = f"--form {form} --tasks {','.join(tasks)} --chunk {chunk} {asked}"
        told = {"model": str(model), "tasks": tasks, "chunk": chunk, "kept_as": rows, "form": form, "answer": answer,
                "text": [path.name for path in text]}  # fmt: skip

        def leave(found: list, reason: str | None) -> None:
            if json_path is not None:
                command = f"tandem eval fusion --model {model} {asked}"
                document = describe_run("fusion", command, seed, time.monotonic() - begin, machine_name(on), found)
                write_document(json_path, document | finite(told | {"cut": reason}))

        settings = PromptSettings(
            model, form, seed, tuple(text), tuple(asked_of.items()), tuple(files.items()), sent_as
        )
        plan, found = PromptPlan(settings, tasks, samples, chunk, answer), []
        num_batches = len(sizes) * len(runs) * -(-samples // together)
        with (
            stopping(seconds) as stop,
            prompts_ahead(plan, sizes, count_workers(len(sizes) * len(tasks), on)) as prompts_of,
            progress_bar(num_batches, "batches") as advance,
            fusion_engine(model, on, max(sizes), rows, chunk) as engine,
        ):
            prompts = {length: prompts_of(length) for length in sizes}
            for judged in judge(engine, model, prompts, runs, maps, advance, stop, together):
                found = [row for length in sizes for row in fusion_rows(judged[length], length)]
                leave(found, "under way")  # so that a run that is killed leaves its batches
        print_fusion(found, open_console())
        leave(found, stop.reason)
        if svg is not None:
            write_text(svg, draw_fusion(found))
        if status := exit_status(found, stop.reason):
            raise typer.Exit(status)


def print_fusion(rows: list, console: "Console") -> None:
    """Print a line for each length, policy and ratio, with columns of tasks."""
    from rich.table import Table

    from evals.fusion_report import render_policies

    for length in dict.fromkeys(row["length"] for row in rows):
        head, _, *lines = render_policies([row for row in rows if row["length"] == length])
        chunks = next(row.get("chunks") for row in rows if row["length"] == length)
        title = f"{length:,} tokens" + (f", {chunks:.0f} chunks" if chunks else "")
        table = Table(*(cell.strip() for cell in head.strip("| ").split(" | ")), title=title)
        for line in lines:
            table.add_row(*(cell.strip("` ") for cell in line[2:-2].split(" | ")))
        console.print(table)
