"""One run of cells from beginning to end: model, store, progress bar, and what it leaves: table, JSON, HTML.

It ties the runner to files and the terminal and knows no method and no metric. Invariant: what is written was computed
from the store's records, so a run that was stopped and resumed leaves the same as one that was not.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evals.cells import Cell, PromptSettings
from evals.report.document import finite, make_document, write_document, write_text
from evals.report.table import open_console, print_table
from evals.rows import Row, depth_rows, summarize
from evals.serving import profile_of
from evals.store import Ledger, Record, Store

if TYPE_CHECKING:
    from evals.served import Server
    from server.config import Deployment

BATCH_TOKENS = {"cuda": 1 << 20, "cpu": 1 << 14}
STORE_FILE = "records.jsonl"


@dataclass(frozen=True)
class Outputs:
    """Where a run leaves its results; None: nowhere. resume: the folder of the store, kept between runs."""

    json: Path | None
    html: Path | None
    resume: Path | None


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Any]:
    """A function to call once a record."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


class Forgetful(dict[str, Record]):
    """A store in memory: a run that nobody asked to keep does not wait for the disk at every sample."""

    def add(self, record: Record) -> None:
        self[record.key] = record


@contextmanager
def open_store(resume: Path | None) -> Iterator[Store | Forgetful]:
    """The store of a folder, or one that is forgotten afterwards."""
    if resume is None:
        yield Forgetful()
        return
    with Store(resume / STORE_FILE) as store:
        yield store


def resolve_device(device: str) -> str:
    """`auto` is cuda where there is one."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


class Pace:
    """Prints a line on stderr as each cell ends, and hands on the records so far: what a stopped run leaves."""

    def __init__(self, num_cells: int, leave: Callable[[list[Record], int], None] | None) -> None:
        self._num_cells, self._leave, self._done, self._begin = num_cells, leave, 0, time.monotonic()
        self._last = self._begin

    def __call__(self, cell: Cell, records: Sequence[Record]) -> None:
        now = time.monotonic()
        self._done += 1
        own = [one for one in records if (one.cell["task"], one.cell["length"]) == (cell.task, cell.length_tokens)]
        print(f"cell {self._done}/{self._num_cells}: task={cell.task} length={cell.length_tokens} "
              f"methods={len(cell.methods)} samples={cell.num_samples} "
              f"failures={sum(one.failure is not None for one in own)} "
              f"seconds={now - self._last:.1f} elapsed={now - self._begin:.1f}",
              file=sys.stderr, flush=True)  # fmt: skip
        self._last = now
        if self._leave is not None:
            self._leave(list(records), self._done)


@dataclass(frozen=True)
class InProcess:
    """How cells run in this process. batch: prompts of the longest length that go together; None: by the device.

    workers: processes that make prompts. resume: the folder of the store; None: nothing is kept. deployment: of the
    engine that runs serving profiles; None: what the machine gives, and no host tier.
    """

    device: str
    batch: int | None
    workers: int
    resume: Path | None
    deployment: "Deployment | None" = None


def run(
    cells: Sequence[Cell],
    settings: PromptSettings,
    how: InProcess,
    leave: Callable[[list[Record], int], None] | None,
) -> list[Record]:
    """Run cells and return their records, those of earlier runs of the folder included.

    Methods run in the reference decoder, then serving profiles in the engine; only one of the two is loaded at a time.
    `leave` gets the records so far and the number of finished cells after each cell.
    """
    profiles = {one for cell in cells for one in cell.methods if profile_of(one, how.deployment)}
    parts = [
        (run_part, [replace(cell, methods=own) for cell in cells if (own := tuple(filter(wanted, cell.methods)))])
        for run_part, wanted in (
            (_run_methods, lambda one: one not in profiles),
            (_run_profiles, profiles.__contains__),
        )
    ]
    with open_ledger(cells, sum(len(own) for _, own in parts), how.resume, leave) as (ledger, records):
        for run_part, own in parts:
            if own:
                run_part(own, settings, how, ledger)
    return list(records.values())


def run_remotely(
    cells: Sequence[Cell], settings: PromptSettings, server: "Server", resume: Path | None
) -> list[Record]:
    """Run cells on a server and return their records."""
    from evals.served import run_on_server

    with open_ledger(cells, len(cells), resume, None) as (ledger, records):
        run_on_server(cells, settings, server, ledger)
    return list(records.values())


@contextmanager
def open_ledger(
    cells: Sequence[Cell], num_parts: int, resume: Path | None, leave: Callable[[list[Record], int], None] | None
) -> Iterator[tuple[Ledger, dict[str, Record]]]:
    """A ledger over the store of a folder, and the run's records by key as they come."""
    records: dict[str, Record] = {}
    total = sum(cell.num_samples * len(cell.methods) for cell in cells)
    with open_store(resume) as store, progress_bar(total, "samples") as advance:
        pace = Pace(num_parts, leave)

        def keep(record: Record) -> None:
            store.add(record)
            records[record.key] = record
            advance()

        def found(key: str) -> None:
            records[key] = store[key]
            advance()

        yield Ledger(store, found, keep, lambda cell: pace(cell, list(records.values()))), records


def _run_methods(cells: Sequence[Cell], settings: PromptSettings, how: InProcess, ledger: Ledger) -> None:
    import torch

    from evals.forward import load_decoder
    from evals.run import load_tokenizer, prompts_of, run_cells

    on_cuda = how.device.startswith("cuda")
    decoder = load_decoder(settings.model, torch.device(how.device), torch.bfloat16 if on_cuda else torch.float32)
    batch_tokens = BATCH_TOKENS["cuda" if on_cuda else "cpu"]
    if how.batch is not None:
        batch_tokens = how.batch * max(cell.length_tokens for cell in cells)
    prompts = prompts_of(cells, settings, how.workers)
    run_cells(decoder, load_tokenizer(settings.model), prompts, settings, batch_tokens, ledger)


def _run_profiles(cells: Sequence[Cell], settings: PromptSettings, how: InProcess, ledger: Ledger) -> None:
    from evals.run import load_tokenizer, prompts_of
    from evals.served import run_profiles
    from evals.serving import load_serving_engine
    from gpu.architecture import read_architecture

    longest = max(cell.length_tokens for cell in cells)
    prompts = prompts_of(cells, settings, how.workers)
    shape = read_architecture(settings.model)
    with load_serving_engine(settings.model, how.device, longest, how.deployment) as engine:
        run_profiles(engine, load_tokenizer(settings.model), shape, prompts, settings, ledger)


def leave_results(records: Sequence[Record], outputs: Outputs, configuration: dict[str, Any], seed: int) -> list[Row]:
    """Print the table, write JSON and HTML where asked, and return the rows."""
    rows = summarize(records)
    print_table(rows, open_console())
    if outputs.json is not None:
        depths = finite(depth_rows(records))
        write_document(outputs.json, make_document(rows, configuration, {"prompts": seed}, depths=depths))
    if outputs.html is not None:
        from evals.report.page import render_page

        flat = [{**record.cell, **asdict(record), **record.measured} for record in records]
        write_text(outputs.html, render_page("Quality against what is read", rows, flat, [], configuration,
                                             {"prompts": seed}))  # fmt: skip
    return rows


def count_workers(num_cells: int, device: str) -> int:
    """Processes that make prompts: one a cell where the device is not the CPU that they would run on."""
    return min(num_cells, max(1, (os.cpu_count() or 1) - 1)) if device.startswith("cuda") and num_cells > 1 else 0
