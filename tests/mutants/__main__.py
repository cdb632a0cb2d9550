"""`python -m tests.mutants`: put each fault into a copy of the project and report those that no test sees."""

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.fault_trial import BROKEN, KILLED, SKIPPED, SURVIVED, Trials, Verdict, share_out
from tests.mutants.faults import Fault, read_faults
from tests.mutants.tree import Tree

PROJECT = Path(__file__).resolve().parents[2]
ORDER = (KILLED, SKIPPED, BROKEN, SURVIVED)  # survivors are printed last
COLOURS = {KILLED: "green", SKIPPED: "yellow", BROKEN: "red", SURVIVED: "bold red"}


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Faults whose file or description matches, as 'cpu/*'; may be repeated.")
    ] = None,
    processes: Annotated[int, typer.Option("-j", help="Trees, and test runs at a time.", min=1)] = 2,
    root: Annotated[Path, typer.Option(help="The project, whose faults are in tests/mutants.")] = PROJECT,
) -> None:
    """Apply each fault to a copy, run the tests that it names, and print which saw it. Fail if one survives."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # both end the tests and remove the copies
        signal.signal(ending, signal.default_int_handler)
    console = Console(width=None if os.isatty(1) else 200)
    try:
        faults = choose(read_faults(root / "tests" / "mutants"), only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not faults:
        raise typer.BadParameter(f"no fault matches --only {only}")
    begin = time.monotonic()
    verdicts = try_all(root.resolve(), faults, processes, console)
    verdicts.sort(key=lambda verdict: ORDER.index(verdict.state))
    seconds = time.monotonic() - begin
    console.print(make_table(verdicts))
    console.print(summarise(verdicts, seconds))
    raise typer.Exit(exit_status(verdicts))


def choose(faults: list[Fault], only: list[str] | None) -> list[Fault]:
    """Return the faults whose file or description matches any of the patterns; all if there are none."""
    if not only:
        return faults
    return [fault for fault in faults if any(fnmatch(text, glob) for glob in only for text in (fault.file, fault.why))]


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


def summarise(verdicts: list[Verdict], seconds: float) -> str:
    counts = Counter(verdict.state for verdict in verdicts)
    words = ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
    return f"of {len(verdicts)}: {words}; {seconds:.0f} s"


if __name__ == "__main__":
    typer.run(main)
