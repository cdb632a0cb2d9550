"""Run `python -m lab mac`: options, the folder of a run, its tables and its page."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from evals.options import Device, Lengths, ModelFolder, Seconds, Seed, Text, one_line_errors, parse_lengths, parse_tasks

JSON_FILE, PAGE_FILE, TABLES_FILE = "mac.json", "report.html", "report.md"


def mac(
    model: ModelFolder = Path("deploy/models/reference"),
    out: Annotated[Path, typer.Option("--out", help="folder of the run: its samples, so that the same command goes on "
                                      "where it stopped, and mac.json")] = Path("mac"),
    report: Annotated[bool, typer.Option("--report", help="write report.html and report.md there, too")] = False,
    lengths: Lengths = "4096,16384",
    taus: Annotated[str, typer.Option("--taus", help="thresholds, commas between")] = "0.3,0.45,0.6,0.75,0.9",
    share: Annotated[float | None, typer.Option("--share", min=0.001, max=1, help="max_prefix_share of all of them; "
                                                "1: as in the paper; default: as it is served")] = None,
    windows: Annotated[str, typer.Option("--windows", help="CAPACITY:BAND (the paper's K and r), commas between")] =
        "256:64,512:128,1024:256",
    over: Annotated[str, typer.Option("--over", help="what heads that miss read: exact, sampled or both, with a "
                                      "comma")] = "exact,sampled",
    tasks: Annotated[str, typer.Option("--tasks", help="with short answers")] =
        "word_needle,many_needles,facts_one_hop,facts_two_hops",
    long: Annotated[str, typer.Option("--long", help="with long answers: the engine gives them, methods in the "
                                      "reference decoder are fed the right ones, token by token")] =
        "long_list,continue",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="of a right answer that are fed, at most")] = 320,
    samples: Annotated[int, typer.Option("--samples", min=0, help="prompts a task and length, in the reference "
                                         "decoder, beside other methods")] = 32,
    forced_samples: Annotated[int, typer.Option("--forced-samples", min=0, help="whose answers are fed")] = 16,
    served_samples: Annotated[int, typer.Option("--served-samples", min=0, help="end to end, by the engine")] = 16,
    alone: Annotated[bool, typer.Option("--alone", help="no other methods beside it")] = False,
    error_steps: Annotated[int, typer.Option("--error-steps", min=0, help="tokens that errors by gap and band are "
                                             "taken from; 0: none")] = 256,
    error_texts: Annotated[int, typer.Option("--error-texts", min=1, help="of how many texts a length")] = 2,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="prompts of the longest length that go together "
                                              "in the reference decoder")] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="parts of the run at a time; default: 12 "
                                                  "on a GPU, 1 elsewhere")] = None,
    text: Text = [],  # noqa: B006
    seed: Seed = 0,
    device: Device = "auto",
    seconds: Seconds = None,
) -> None:  # fmt: skip
    """Score MAC-Attention over thresholds, windows and placements: quality against KV read, and what layers reuse.

    The engine's own MAC answers freely, end to end; the reference decoder runs the same match, seeds and summaries
    beside full attention and other methods at about equal reads. Exit status: 0; 1: a sample failed; 3: cut.
    """
    with one_line_errors():
        from evals.cells import PromptSettings
        from evals.report.document import describe_run, machine_name, write_document, write_text
        from evals.report.table import open_console, print_table
        from evals.run import form_of
        from evals.session import exit_status, resolve_device
        from evals.tuning.command import parse_window
        from gpu.methods.mac.settings import MacSettings
        from lab.mac.grid import BESIDE, OVERS, spread
        from lab.mac.parts import Asked
        from lab.mac.report import make_page, render_reused
        from lab.mac.run import SET, run_all
        from lab.quality.results import render_run

        on = resolve_device(device)
        on_cuda = on.startswith("cuda")
        used_share = MacSettings().max_prefix_share if share is None else share
        settings = spread(
            parse_taus("--taus", taus),
            used_share,
            [parse_window(window) for window in windows.split(",")],
            parse_overs(over, OVERS),
        )
        asked = Asked(
            PromptSettings(model, form_of(model), seed, tuple(text)), on, tuple(settings), () if alone else BESIDE,
            tuple(parse_lengths(lengths)), tuple(parse_tasks(tasks)), tuple(parse_tasks(long)), tokens, samples,
            forced_samples, served_samples, error_texts,
            error_steps, batch or (16 if on_cuda else 1),
        )  # fmt: skip
        found = run_all(asked, out, processes or (12 if on_cuda else 1), seconds)
        given = [("--model", str(model)), ("--lengths", lengths), ("--taus", taus), ("--share", f"{used_share:g}"),
                 ("--windows", windows),
                 ("--over", over), ("--samples", str(samples)), ("--forced-samples", str(forced_samples)),
                 ("--served-samples", str(served_samples)), *(("--text", path.name) for path in text)]  # fmt: skip
        command = shlex.join(["python", "-m", "lab", "mac", *(word for pair in given for word in pair)])
        run = describe_run(SET, command, seed, found["seconds"], machine_name(on), found["rows"])
        run |= {name: found[name] for name in ("layers", "errors", "cut", "failed")}
        write_document(out / JSON_FILE, run)
        if not run["rows"]:
            print_cut(run, out)
            raise typer.Exit(1 if run["failed"] else exit_status([], run["cut"]))
        console = open_console()
        print_table(run["rows"], console)
        console.print("\n".join(render_reused(run)), highlight=False, markup=False, soft_wrap=True)
        if report:
            asked_for = {"command": command, "machine": run["machine"], "date": run["date"], "seconds": run["seconds"],
                         "cut": run["cut"]}  # fmt: skip
            write_text(out / PAGE_FILE, make_page(run, asked_for))
            write_text(out / TABLES_FILE, render_run(run) + "\n")
            print(f"report: {out / PAGE_FILE}, {out / TABLES_FILE}")
        print_cut(run, out)
        status = 1 if run["failed"] else exit_status(run["rows"], run["cut"])
        if status:
            raise typer.Exit(status)


def print_cut(run: dict[str, Any], out: Path) -> None:
    """The run in one line of JSON."""
    failures = sum(row["failures"] for row in run["rows"])
    for part, why in run["failed"].items():
        print(f"failed: {part}: {why}", file=sys.stderr)
    print(json.dumps({"set": run["set"], "seconds": run["seconds"], "rows": len(run["rows"]), "failures": failures,
                      "cut": run["cut"], "json": str(out / JSON_FILE)}))  # fmt: skip


def parse_taus(option: str, text: str) -> list[float]:
    """Parse `0.3,0.45` to [0.3, 0.45]; empty where nothing is named. Raises ValueError."""
    try:
        taus = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        taus = [-1.0]
    if not all(0 <= tau < 1 for tau in taus):
        raise ValueError(f"{option}: got {text!r}; wanted thresholds of 0 and more, below 1, with commas between")
    return sorted(set(taus))


def parse_overs(text: str, known: tuple[str, ...]) -> list[str]:
    """Raise ValueError for another placement than these."""
    overs = [part.strip() for part in text.split(",") if part.strip()]
    if not overs or not set(overs) <= set(known):
        raise ValueError(f"--over: got {text!r}; wanted {' or '.join(known)}, or both with a comma")
    return list(dict.fromkeys(overs))
