"""`python -m tests.mutants`: breaks a copy of the project, one fault at a time, and says which faults no test sees."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.faults import Fault, read_faults
from tests.mutants.tree import Tree
from tests.mutants.trial import BROKEN, KILLED, SKIPPED, SURVIVED, Trials, Verdict, share_out

PROJECT = Path(__file__).resolve().parents[2]
ORDER = (KILLED, SKIPPED, BROKEN, SURVIVED)  # what needs a reader stands last, where he looks
COLOURS = {KILLED: "green", SKIPPED: "yellow", BROKEN: "red", SURVIVED: "bold red"}


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Faults whose file or description matches, as 'cpu/*'; may be repeated.")
    ] = None,
    package: Annotated[list[str] | None, typer.Option(help="Faults of <package>.toml; may be repeated.")] = None,
    processes: Annotated[int, typer.Option("-j", help="Trees, and test runs at a time.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the table goes as JSON.")] = None,
    root: Annotated[Path, typer.Option(help="The project, whose faults are in tests/mutants.")] = PROJECT,
) -> None:
    """Applies each fault to a copy, runs the tests it names, and prints who saw it. Fails if one survives."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # both end what runs, and take the copies away
        signal.signal(ending, signal.default_int_handler)
    console = Console(width=None if os.isatty(1) else 200)
    try:
        faults = choose(read_faults(root / "tests" / "mutants"), package, only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not faults:
        raise typer.BadParameter(f"no fault matches --package {package} --only {only}")
    begin = time.monotonic()
    verdicts = try_all(root.resolve(), faults, processes, console)
    verdicts.sort(key=lambda verdict: ORDER.index(verdict.state))
    seconds = time.monotonic() - begin
    console.print(make_table(verdicts))
    console.print(summarise(verdicts, seconds))
    if json_file is not None:
        json_file.write_text(json.dumps(make_record(root, verdicts, seconds), indent=1) + "\n")
    raise typer.Exit(exit_status(verdicts))


def choose(faults: list[Fault], packages: list[str] | None, only: list[str] | None) -> list[Fault]:
    """Those of any of the packages that match any of the patterns; None: all."""
    return [
        fault
        for fault in faults
        if (not packages or fault.package in packages)
        and (not only or any(fnmatch(fault.file, glob) or fnmatch(fault.why, glob) for glob in only))
    ]


def try_all(root: Path, faults: list[Fault], processes: int, console: Console) -> list[Verdict]:
    verdicts: list[Verdict] = []

    def report(verdict: Verdict) -> None:
        verdicts.append(verdict)
        style = COLOURS[verdict.state]
        console.print(f"[{style}]{verdict.state}[/] {verdict.seconds:.0f} s  {escape(verdict.fault.why)}")

    shares = share_out(faults, processes)
    threads = max(1, (os.cpu_count() or 1) // len(shares))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(len(shares)) as pool:
        trials = [Trials(Tree(root, Path(folder).resolve() / str(index), threads)) for index in range(len(shares))]
        try:
            for done in [pool.submit(trial.run, share, report) for trial, share in zip(trials, shares, strict=True)]:
                done.result()
        finally:
            for trial in trials:
                trial.stop()
    return verdicts


def exit_status(verdicts: Iterable[Verdict]) -> int:
    return int(any(verdict.state in (SURVIVED, BROKEN) for verdict in verdicts))


def make_table(verdicts: Iterable[Verdict]) -> Table:
    table = Table("package", "fault", "state", "by which test, or why", "s")
    for verdict in verdicts:
        fault, style = verdict.fault, COLOURS[verdict.state]
        state, seconds = f"[{style}]{verdict.state}[/]", f"{verdict.seconds:.0f}"
        table.add_row(fault.package, escape(f"{fault.why} ({fault.file})"), state, escape(verdict.words), seconds)
    return table


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    return {state: sum(verdict.state == state for verdict in verdicts) for state in ORDER}


def summarise(verdicts: list[Verdict], seconds: float) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in count(verdicts).items() if number)
    return f"of {len(verdicts)}: {counts}; {seconds:.0f} s"


def make_record(root: Path, verdicts: list[Verdict], seconds: float) -> dict[str, object]:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "commit": asked.stdout.strip() or None,
        "seconds": round(seconds, 1),
        "cores": os.cpu_count(),
        **count(verdicts),
        "faults": [
            {**asdict(verdict.fault), "state": verdict.state, "words": verdict.words, "seconds": verdict.seconds}
            for verdict in verdicts
        ],
    }


if __name__ == "__main__":
    typer.run(main)
