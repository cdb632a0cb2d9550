"""Run `python -m lab results`: a named set, or the tables of runs that were made elsewhere.

A run that is stopped leaves the JSON of the cells that it finished.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from evals.options import (
    Device,
    Html,
    ModelFolder,
    Resume,
    Seconds,
    Seed,
    Text,
    one_line_errors,
    parse_lengths,
    parse_tasks,
)


def results(
    quick: Annotated[bool, typer.Option("--quick", help="the set for two CPU cores, under an hour")] = False,
    full: Annotated[bool, typer.Option("--full", help="the set for one large GPU, 400 prompts a task")] = False,
    served: Annotated[bool, typer.Option("--served", help="the set of serving profiles, for one large GPU")] = False,
    files: Annotated[list[Path], typer.Option("--from", help="render these runs instead of running")] = [],  # noqa: B006
    page: Annotated[Path, typer.Option("--page", help="Markdown page with the markers")] = Path("lab/RESULTS.md"),
    json_path: Annotated[Path, typer.Option("--json", help="where a run is written")] = Path("results.json"),
    html: Html = None,
    model: ModelFolder = Path("deploy/models/reference"),
    lengths: Annotated[str | None, typer.Option("--lengths", help="tokens of prompt and answer, commas between; "
                                                "default: 4096,8192,16384; served: 4096,16384")] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="run only these of the set, commas between")] = "",
    only: Annotated[list[str], typer.Option("--methods", help="run only these of the set beside full attention, such "
                                            "as 'sampled*'; repeatable")] = [],  # noqa: B006
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="fewer or more prompts than the set")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    text: Text = [],  # noqa: B006
    resume: Resume = None,
    seconds: Seconds = None,
) -> None:  # fmt: skip
    """Make the tables of lab/RESULTS.md again: run a named set, or render runs that were made elsewhere.

    Exit status: 0; 1: a sample failed (it counts with score 0, and its reason is shown); 3: cut.
    """
    with one_line_errors():
        from lab.quality import results as sets

        if quick + full + served + bool(files) != 1:
            raise ValueError("results: give one of --quick, --full, --served and --from FILE")
        status = 0
        if served:
            status = run_served_set(tasks, lengths, samples, model, seed, device, tuple(text), resume, seconds,
                                    json_path)  # fmt: skip
            files = [json_path]
        elif not files:
            name = "quick" if quick else "full"
            cells = sets.cells_of(name, parse_lengths(lengths or "4096,8192,16384"), samples, only, parse_tasks(tasks))
            command = " ".join([f"python -m lab results --{name}", *(f"--methods '{pattern}'" for pattern in only),
                                *([f"--tasks {tasks}"] if tasks else ()),
                                *(f"--text {path.name}" for path in text)])  # fmt: skip
            status = run_set(name, command, cells, model, seed, device, tuple(text), resume, seconds, json_path)
            files = [json_path]
        if page.exists():
            sets.write_tables(page, sets.read_runs(files))
            print(f"tables: {page}")
        else:
            print(f"tables: {page} is not here; render them with `python -m lab results --from {files[0]}`")
        if html is not None:
            from evals.report.document import write_text
            from evals.report.page import page_of_documents

            documents = [json.loads(file.read_text()) for file in files]
            write_text(html, page_of_documents("Results", documents))
            print(f"page: {html}")
        if status:
            raise typer.Exit(status)


def run_served_set(
    tasks: str, lengths: str | None, samples: int | None, model: Path, seed: int, device: str, text: tuple[Path, ...],
    resume: Path | None, seconds: float | None, out: Path,
) -> int:  # fmt: skip
    """Run the set of serving profiles and return the exit status."""
    from evals.cells import PromptSettings
    from evals.report.table import open_console, print_table
    from evals.session import exit_status
    from evals.stopping import stopping
    from lab.quality import served_results as served

    chosen = parse_tasks(tasks)
    sizes = parse_lengths(lengths or served.LENGTHS_SERVED)
    cells = served.served_cells(sizes, samples, chosen)
    texts = [("--text", path.name) for path in text]
    given = [("--lengths", lengths), ("--tasks", tasks), ("--samples", samples), *texts]
    command = " ".join(["python -m lab results --served", *(f"{name} {value}" for name, value in given if value)])
    with stopping(seconds) as stop:
        run = served.run_served(
            cells, command, PromptSettings(model, "reference", seed, text), device, resume, out, stop
        )
    print_table(run["rows"], open_console())
    failures = sum(row["failures"] for row in run["rows"])
    print(json.dumps({"set": served.SET, "seconds": run["seconds"], "rows": len(run["rows"]), "failures": failures,
                      "cut": run["cut"], "missing": len(run["missing"]), "json": str(out)}))  # fmt: skip
    return exit_status(run["rows"], run["cut"])


def run_set(
    name: str, command: str, cells: list[Any], model: Path, seed: int, device: str, text: tuple[Path, ...],
    resume: Path | None, seconds: float | None, out: Path,
) -> int:  # fmt: skip
    """Run a named set, print its estimate before and its time after, write its JSON as it goes; the exit status.

    The closing comparison with full attention's distributions is of runs that were not cut.
    """
    from evals.cells import PromptSettings
    from evals.fidelity_run import FidelityRun, run_comparisons
    from evals.report.document import describe_run, finite, machine_name, write_document
    from evals.score_rows import depth_rows, summarize
    from evals.session import InProcess, count_workers, exit_status, missing_rows, resolve_device
    from evals.session import run as run_cells
    from evals.stopping import stopping
    from evals.store import Record
    from lab.quality import results as sets

    on = resolve_device(device)
    estimate = sets.estimate_seconds(name, cells)
    num = sum(cell.num_samples * len(cell.methods) for cell in cells)
    print(f"{name}: {len(cells)} tasks and lengths, {num} scored samples, about {estimate / 60:.0f} minutes "
          f"on {'two cores' if name == 'quick' else 'one H200'}; running on {on}", flush=True)  # fmt: skip
    begin, machine = time.monotonic(), machine_name(on)

    def leave(records: list[Record], finished: int, reason: str | None = "under way") -> dict[str, Any]:
        """Write what is finished, so that a run that is stopped leaves it."""
        run = describe_run(name, command, seed, time.monotonic() - begin, machine, summarize(records))
        run |= {"cells": len(cells), "cells_finished": finished, "depths": finite(depth_rows(records)), "cut": reason}
        run |= {"missing": missing_rows(cells, records, reason)}
        write_document(out, run)
        return run

    settings = PromptSettings(model, "reference", seed, text)
    with stopping(seconds) as stop:
        how = InProcess(on, None, count_workers(len(cells), on), resume, None, stop)
        records = run_cells(cells, settings, how, leave)
        run = leave(records, len(cells), stop.reason)
    labels = [label for label in cells[0].methods if label != "full" and sets.decodes(label)]
    if labels and run["cut"] is None:
        texts, forced, batch = sets.FIDELITY[name]
        compared = FidelityRun(model, labels, sorted({cell.length_tokens for cell in cells}), texts, forced, text, seed,
                               on, batch, None)  # fmt: skip
        found = finite(run_comparisons(compared))
        run |= {"layers": found["layers"], "fidelity": found["rows"], "seconds": round(time.monotonic() - begin, 1)}
        write_document(out, run)
    failures = sum(row["failures"] for row in run["rows"])
    print(json.dumps({"set": name, "seconds": run["seconds"], "estimate": round(estimate, 1), "cut": run["cut"],
                      "rows": len(run["rows"]), "failures": failures, "json": str(out)}))  # fmt: skip
    return exit_status(run["rows"], run["cut"])
