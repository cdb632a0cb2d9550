"""Name the commands of `tandem eval`. Each command imports what it runs when it runs, so that listing them is quick."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evals.fusion_command import fusion
from evals.judge_command import judge
from evals.options import (
    ApiKey,
    Batch,
    Concurrency,
    Config,
    Device,
    Html,
    Json,
    Lengths,
    Methods,
    ModelFolder,
    Questions,
    Resume,
    Seconds,
    Seed,
    SentAs,
    ServedModel,
    Text,
    Url,
    check_methods,
    one_line_errors,
    parse_files,
    parse_lengths,
    parse_tasks,
    read_deployment,
)

if TYPE_CHECKING:
    from rich.console import Console

    from evals.store import Record

SEEN_FROM_OUTSIDE = (
    "A profile runs end to end, so its errors a layer, the mass it kept and what it read are not known; its KL is over "
    "its most likely tokens, with all others as one. `generated`: tokens that its own decode steps chose."
)

DEFAULT_TASKS = {"reference": "needle", "ruler": "niah_single_2"}

app = typer.Typer(no_args_is_help=True, help="Judge quality: what an attention method keeps and what it loses.")
app.command()(judge)
app.command()(fusion)


@app.command()
def tasks(
    model: ModelFolder,
    method: Methods = ["full"],  # noqa: B006
    names: Annotated[str | None, typer.Option("--tasks", help="names with commas between; default: needle in the "
                                              "reference form and niah_single_2 in RULER's, or the datasets where "
                                              "some are given")] = None,
    lengths: Lengths = "4096",
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a task and length")] = 32,
    form: Annotated[str, typer.Option("--form", help="how prompts are worded: reference (for the reference "
                                      "model), ruler (for any other) or auto, by the model's vocabulary")] = "auto",
    sent_as: SentAs = "auto",
    dataset: Annotated[list[str], typer.Option("--dataset", help="NAME=FILE, such as longbench/qasper=qasper.jsonl; "
                                               "also longbench_v2, infinitebench/NAME, gsm8k; repeatable")] = [],  # noqa: B006
    questions: Questions = [],  # noqa: B006
    text: Text = [],  # noqa: B006
    forced: Annotated[int, typer.Option("--forced", min=0, help="feed so many tokens of full attention's answer and "
                                        "score the agreement with them; 0: free answers")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
    config: Config = None,
    batch: Batch = None,
    json_path: Json = None,
    html: Html = None,
    resume: Resume = None,
    seconds: Seconds = None,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 4,
) -> None:  # fmt: skip
    """Score methods on long-context tasks and datasets: rows of method, task, length, score and what was read.

    Exit status: 0; 1: a sample failed (it counts with score 0, and its reason is shown); 3: cut before the end.
    """
    with one_line_errors():
        from evals.cells import Cell, PromptSettings
        from evals.datasets import DATASETS
        from evals.run import form_of
        from evals.session import (
            InProcess,
            Outputs,
            count_workers,
            exit_status,
            leave_results,
            resolve_device,
            run,
            run_remotely,
            write_rows,
        )
        from evals.stopping import stopping
        from evals.tasks import RULER_TASKS

        files = parse_files("--dataset", dataset, list(DATASETS))
        wording = form_of(model) if form == "auto" else form
        asked = names if names is not None else "" if files else DEFAULT_TASKS[wording]
        chosen = [*parse_tasks(asked), *files]
        question_files = parse_files("--questions", questions, list(RULER_TASKS[-2:]))
        settings = PromptSettings(model, wording, seed, tuple(text), tuple(question_files.items()),
                                  tuple(files.items()), sent_as)  # fmt: skip
        sizes, deployment = parse_lengths(lengths), read_deployment(config, url)
        labels = tuple(dict.fromkeys(method))
        configuration = {
            "model": str(model), "tasks": chosen, "lengths": sizes, "samples": samples, "form": wording,
            "sent_as": sent_as, "text": [path.name for path in text], "forced": forced, "seed": seed, "url": url,
            "config": str(config) if config is not None else None,
            "datasets": {name: str(path) for name, path in files.items()},
            "questions": {name: str(path) for name, path in question_files.items()},
        }  # fmt: skip
        if url is not None:
            from evals.served import named_methods, server_of

            if forced:
                raise ValueError("--forced: needs the reference decoder; leave out --url or --forced")
            labels = named_methods([label for label in labels if label != "full"] or ["default"])
            server = server_of(url, served_model, model, api_key, concurrency)
        else:
            check_methods(list(labels), deployment)
            configuration["device"] = on = resolve_device(device)
        configuration["methods"] = list(labels)
        cells = [Cell(name, length, samples, labels, forced) for length in sizes for name in chosen]
        outputs = Outputs(json_path, html, resume)
        with stopping(seconds) as stop:

            def leave(records: "list[Record]", _: int) -> None:
                write_rows(cells, records, json_path, configuration, seed, "under way")

            if url is not None:
                records = run_remotely(cells, settings, server, resume, leave, stop)
            else:
                how = InProcess(on, batch, count_workers(len(cells), on), resume, deployment, stop)
                records = run(cells, settings, how, leave)
        rows = leave_results(cells, records, outputs, configuration, seed, stop.reason)
        status = exit_status(rows, stop.reason)
        if status:
            raise typer.Exit(status)


@app.command()
def fidelity(
    model: ModelFolder,
    method: Methods,
    lengths: Lengths = "4096",
    samples: Annotated[int, typer.Option("--samples", min=1, help="texts a length")] = 8,
    forced: Annotated[int, typer.Option("--forced", min=1, help="tokens at a text's end that are compared")] = 64,
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
    config: Config = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="texts that go together")] = 8,
    json_path: Json = None,
    html: Html = None,
    seconds: Seconds = None,
    url: Url = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
) -> None:
    """Compare methods or serving profiles with full attention on the same text, token by token.

    `budget=0.02|0.05` expands into a grid. A profile runs end to end, so errors of its layers are not known.

    Exit status: 0; 1: a text failed; 3: cut before the end, with the rows that are finished.
    """
    with one_line_errors():
        from evals.fidelity import spread_grid
        from evals.fidelity_run import FidelityRun, run_comparisons
        from evals.report.document import finite, write_document, write_text
        from evals.report.table import open_console, print_failures
        from evals.served import named_methods, probe_server, server_of
        from evals.session import exit_status, resolve_device
        from evals.stopping import stopping

        labels = list(dict.fromkeys(label for grid in method for label in spread_grid(grid)))
        server, deployment = None, read_deployment(config, url)
        if url is not None:
            labels, server = list(named_methods(labels)), server_of(url, served_model, model, api_key, 1)
            probe_server(server, labels)
        else:
            check_methods(labels, deployment)
        on, sizes = resolve_device(device), parse_lengths(lengths)
        asked = FidelityRun(model, labels, sizes, samples, forced, tuple(text), seed, on, batch, server, deployment)
        with stopping(seconds) as stop:
            found = run_comparisons(asked, stop)
        print_fidelity(found["rows"], found["layers"], open_console())
        print_failures(found["rows"], open_console())
        configuration = {"model": str(model), "methods": labels, "lengths": sizes, "samples": samples, "forced": forced,
                         "text": [path.name for path in text], "device": on, "url": url,
                         "config": str(config) if config is not None else None}  # fmt: skip
        document = finite({"configuration": configuration, "seeds": {"text": seed}, **found, "cut": stop.reason})
        if json_path is not None:
            write_document(json_path, document)
        if html is not None and found["rows"]:
            from evals.report.page import page_of_documents

            write_text(html, page_of_documents("Beside full attention", [document]))
        status = exit_status(found["rows"], stop.reason)
        if status:
            raise typer.Exit(status)


def print_fidelity(rows: list, layers: list, console: "Console") -> None:
    """Print two tables: each method's predictions beside full attention's, and the errors of its layers."""
    from rich.table import Table

    from evals.report.page import number_text
    from evals.report.table import percent

    said = Table("text", "length", "method", "failed", "agreement", "KL (nats)", "perplexity", "generated: agreement",
                 "KL", "keys scored", "bytes read", "read", "error a layer: mean", "worst")  # fmt: skip
    for row in rows:
        place = [row[name] for name in ("text", "length", "method")]
        errors = [one["error"] for one in layers if [one[name] for name in ("text", "length", "method")] == place]
        said.add_row(row["text"], f"{row['length']:,}", row["method"], str(row.get("failures", 0)),
                     percent(row["agreement"]), number_text(row["kl"], 4), number_text(row["perplexity"], 3),
                     percent(row.get("agreement_generated")), number_text(row.get("kl_generated"), 4),
                     percent(row["head_fraction"]), percent(row["bytes_fraction"]),
                     percent(row.get("read_fraction")),
                     percent(sum(errors) / len(errors) if errors else None),
                     percent(max(errors, default=None)))  # fmt: skip
    console.print(said)
    if any("kl_over" in row for row in rows):
        console.print(SEEN_FROM_OUTSIDE, highlight=False)
    if not layers:
        return
    lost = Table("text", "length", "method", "layer", "relative error", "mass kept")
    for row in layers:
        lost.add_row(row["text"], f"{row['length']:,}", row["method"], str(row["layer"]), f"{row['error']:.4f}",
                     f"{100 * row['mass_kept']:.1f} %")  # fmt: skip
    console.print(lost)


@app.command()
def page(
    files: Annotated[list[Path], typer.Argument(help="JSON of `tasks`, `fidelity` and `results` runs")],
    html: Annotated[Path, typer.Option("--html", help="the page to write")],
    title: Annotated[str, typer.Option("--title", help="its headline")] = "Quality against what is read",
) -> None:
    """Write one HTML page of several runs: quality against reads, needle depths, errors a layer, rows."""
    with one_line_errors():
        from evals.report.document import write_text
        from evals.report.page import page_of_documents

        write_text(html, page_of_documents(title, [json.loads(file.read_text()) for file in files]))
        print(f"page: {html}")
