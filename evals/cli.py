"""The `tandem eval` group. Each command imports what it runs when it runs, so that listing them is quick."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Judge quality: what an attention method keeps and what it loses.")

ModelFolder = Annotated[Path, typer.Option("--model", help="Hugging Face folder of the model")]
Methods = Annotated[list[str], typer.Option("--method", help="NAME[:key=value,...]; repeat to compare")]
Lengths = Annotated[str, typer.Option("--lengths", help="tokens of prompt and answer, commas between")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")]
Json = Annotated[Path | None, typer.Option("--json", help="write rows, configuration and seeds here")]
Html = Annotated[Path | None, typer.Option("--html", help="write one self-contained page here")]
Seed = Annotated[int, typer.Option("--seed", help="of prompts")]
Text = Annotated[list[Path], typer.Option("--text", help="UTF-8 text around the needles; default: generated prose")]
Batch = Annotated[int | None, typer.Option("--batch", help="prompts of the longest length that go together")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """The world's errors as one line on stderr and status 1."""
    from evals.methods.method import MethodError
    from gpu.architecture import ModelError

    try:
        yield
    except (MethodError, ModelError, OSError, ValueError, KeyError) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_lengths(text: str) -> list[int]:
    """`4096,16384` -> [4096, 16384]. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths: got {text!r}; wanted token counts with commas between, such as 4096,16384")
    return [int(part) for part in parts]


@app.command()
def tasks(
    model: ModelFolder,
    method: Methods = ["full"],  # noqa: B006
    names: Annotated[str, typer.Option("--tasks", help="names with commas between")] = "needle",
    lengths: Lengths = "4096",
    samples: Annotated[int, typer.Option("--samples", min=1, help="prompts a task and length")] = 32,
    form: Annotated[str, typer.Option("--form", help="reference (the reference model's own) or ruler")] = "reference",
    text: Text = [],  # noqa: B006
    forced: Annotated[int, typer.Option("--forced", min=0, help="feed so many tokens of full attention's answer and "
                                        "score the agreement with them; 0: free answers")] = 0,
    seed: Seed = 0,
    device: Device = "auto",
    batch: Batch = None,
    json_path: Json = None,
    html: Html = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="folder that keeps finished samples")] = None,
    url: Annotated[str | None, typer.Option("--url", help="ask this OpenAI-compatible server (with /v1); then a "
                                            "method is the name of an attention profile, or `default`")] = None,
    served_model: Annotated[str | None, typer.Option("--served-model", help="the server's model id")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="bearer key of the server")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="requests under way at once")] = 4,
) -> None:  # fmt: skip
    """Score methods on long-context tasks: rows of method, task, length, score and what was read."""
    with one_line_errors():
        from evals.cells import Cell, PromptSettings
        from evals.session import Outputs, count_workers, leave_results, resolve_device, run_in_process, run_on_server
        from evals.tasks import TASK_NAMES

        chosen = [name.strip() for name in names.split(",")]
        for name in chosen:
            if name not in TASK_NAMES:
                raise ValueError(f"--tasks: unknown {name!r}; known: {', '.join(TASK_NAMES)}")
        methods = tuple(dict.fromkeys(method))
        cells = [Cell(name, length, samples, methods, forced) for length in parse_lengths(lengths) for name in chosen]
        settings = PromptSettings(model, form, seed, tuple(text))
        configuration = {
            "model": str(model), "methods": list(methods), "tasks": chosen, "lengths": parse_lengths(lengths),
            "samples": samples, "form": form, "text": [str(path) for path in text], "forced": forced, "seed": seed,
            "url": url,
        }  # fmt: skip
        if url is not None:
            if forced:
                raise ValueError("--forced: needs the reference decoder; leave out --url or --forced")
            records = run_on_server(cells, settings, url, served_model, api_key, concurrency, resume)
        else:
            from evals.methods.registry import parse_method

            for label in methods:
                parse_method(label)
            on = resolve_device(device)
            configuration["device"] = on
            records = run_in_process(cells, settings, on, batch, count_workers(len(cells), on), resume, None)
        leave_results(records, Outputs(json_path, html, resume), configuration, seed)


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
    batch: Annotated[int, typer.Option("--batch", min=1, help="texts that go together")] = 8,
    json_path: Json = None,
) -> None:
    """Compare methods with full attention on the same text, token by token; `budget=0.02|0.05` spreads into a grid."""
    with one_line_errors():
        import torch
        from rich.console import Console

        from evals.fidelity import run_fidelity, spread_grid, text_prompts
        from evals.forward import load_decoder
        from evals.report.document import finite, write_document
        from evals.run import load_tokenizer
        from evals.session import progress_bar, resolve_device
        from evals.tasks.haystack import TextSource

        labels = list(dict.fromkeys(label for grid in method for label in spread_grid(grid)))
        on = resolve_device(device)
        decoder = load_decoder(model, torch.device(on), torch.bfloat16 if on.startswith("cuda") else torch.float32)
        tokenizer, sizes = load_tokenizer(model), parse_lengths(lengths)
        found: dict[str, list] = {"rows": [], "layers": []}
        with progress_bar(len(sizes) * -(-samples // batch), "batches") as advance:
            for length in sizes:
                prompts = text_prompts(tokenizer, TextSource(tuple(text)), length, samples, seed)
                pair = run_fidelity(decoder, prompts, labels, forced, batch, advance)
                for part, rows in zip(found, pair, strict=True):
                    found[part] += [{"length": length, **row} for row in rows]
        print_fidelity(found["rows"], found["layers"], Console())
        configuration = {"model": str(model), "methods": labels, "lengths": sizes, "samples": samples, "forced": forced,
                         "text": [str(path) for path in text], "device": on}  # fmt: skip
        if json_path is not None:
            write_document(json_path, finite({"configuration": configuration, "seeds": {"text": seed}, **found}))


def print_fidelity(rows: list, layers: list, console: "Console") -> None:
    """Two tables: what methods say, and what their layers lose."""
    from rich.table import Table

    said = Table("length", "method", "agreement", "KL (nats)", "perplexity", "keys scored", "bytes read")
    for row in rows:
        said.add_row(f"{row['length']:,}", row["method"], f"{100 * row['agreement']:.1f} %", f"{row['kl']:.4f}",
                     f"{row['perplexity']:.3f}", f"{100 * row['head_fraction']:.1f} %",
                     f"{100 * row['bytes_fraction']:.1f} %")  # fmt: skip
    lost = Table("length", "method", "layer", "relative error", "mass kept")
    for row in layers:
        lost.add_row(f"{row['length']:,}", row["method"], str(row["layer"]), f"{row['error']:.4f}",
                     f"{100 * row['mass_kept']:.1f} %")  # fmt: skip
    console.print(said, lost)


@app.command()
def results(
    quick: Annotated[bool, typer.Option("--quick", help="the set for two CPU cores, under an hour")] = False,
    full: Annotated[bool, typer.Option("--full", help="the set for one large GPU, 400 prompts a task")] = False,
    files: Annotated[list[Path], typer.Option("--from", help="render these runs instead of running")] = [],  # noqa: B006
    page: Annotated[Path, typer.Option("--page", help="Markdown page with the markers")] = Path("docs/RESULTS.md"),
    json_path: Annotated[Path, typer.Option("--json", help="where a run is written")] = Path("results.json"),
    model: ModelFolder = Path("deploy/models/reference"),
    lengths: Lengths = "4096,8192,16384",
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="fewer or more prompts than the set")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    text: Text = [],  # noqa: B006
    resume: Annotated[Path | None, typer.Option("--resume", help="folder that keeps finished samples")] = None,
) -> None:  # fmt: skip
    """Make the tables of docs/RESULTS.md again: run a named set, or render runs that were made elsewhere."""
    with one_line_errors():
        from evals import results as sets

        if quick + full + bool(files) != 1:
            raise ValueError("results: give one of --quick, --full and --from FILE")
        if not files:
            name = "quick" if quick else "full"
            cells = sets.cells_of(name, parse_lengths(lengths), samples)
            run_set(name, cells, model, seed, device, tuple(text), resume, json_path)
            files = [json_path]
        if page.exists():
            sets.write_tables(page, sets.read_runs(files))
            print(f"tables: {page}")
        else:
            print(f"tables: {page} is not here; render them with `tandem eval results --from {files[0]}`")


def run_set(
    name: str, cells: list, model: Path, seed: int, device: str, text: tuple[Path, ...], resume: Path | None, out: Path
) -> None:
    """Run a named set, print its estimate before and its time after, and write its JSON."""
    from evals import results as sets
    from evals.cells import PromptSettings
    from evals.report.document import write_document
    from evals.rows import summarize
    from evals.session import count_workers, resolve_device, run_in_process

    on = resolve_device(device)
    estimate = sets.estimate_seconds(name, cells)
    num = sum(cell.num_samples * len(cell.methods) for cell in cells)
    print(f"{name}: {len(cells)} tasks and lengths, {num} scored samples, about {estimate / 60:.0f} minutes "
          f"on {'two cores' if name == 'quick' else 'one H200'}; running on {on}", flush=True)  # fmt: skip
    begin = time.monotonic()
    settings = PromptSettings(model, "reference", seed, text)
    machine = sets.machine_name(on)

    def leave(records: list, finished: int) -> dict:
        """Write what is finished, so that a run that is stopped leaves it."""
        seconds = time.monotonic() - begin
        run = sets.describe_run(name, f"tandem eval results --{name}", seed, seconds, machine, summarize(records))
        run |= {"cells": len(cells), "cells_finished": finished}
        write_document(out, run)
        return run

    workers = count_workers(len(cells), on)
    run = leave(run_in_process(cells, settings, on, None, workers, resume, leave), len(cells))
    failures = sum(row["failures"] for row in run["rows"])
    print(json.dumps({"set": name, "seconds": run["seconds"], "estimate": round(estimate, 1), 
                      "rows": len(run["rows"]), "failures": failures, "json": str(out)}))  # fmt: skip
