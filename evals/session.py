"""Run cells from beginning to end: load the model, open the store, show progress, and write the results.

Invariant: results are computed from the store's records, so a run that was stopped and resumed writes the same as one
that was not.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evals.cells import Cell, PromptSettings
from evals.report.document import finite, make_document, write_document, write_text
from evals.report.table import open_console, print_table
from evals.score_rows import Row, depth_rows, summarize
from evals.served_method import group_by_deployment
from evals.stopping import RunCut, Stop
from evals.store import Ledger, Record, Store

if TYPE_CHECKING:
    import torch

    from evals.forward import ReferenceDecoder
    from evals.served import Server
    from server.deployment import Deployment

BATCH_TOKENS = {"cuda": 1 << 20, "cpu": 1 << 14}
STORE_FILE = "records.jsonl"
LEAVE_EVERY_S = 30.0
FAILED, CUT = 1, 3
"""Exit statuses of a run that still wrote its results (2 is a wrong command line)."""


@dataclass(frozen=True)
class Outputs:
    """Paths of a run's results; None: not written. resume: the folder of the store, kept between runs."""

    json: Path | None
    html: Path | None
    resume: Path | None


@contextmanager
def progress_bar(total: int, what: str) -> Iterator[Any]:
    """Show a progress bar, and yield a function that advances it by one record."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


class Forgetful(dict[str, Record]):
    """A store in memory, for a run that need not be resumed and so does not wait for the disk at every sample."""

    def add(self, record: Record) -> None:
        self[record.key] = record


@contextmanager
def open_store(resume: Path | None) -> Iterator[Store | Forgetful]:
    """Yield the store in the folder `resume`; without a folder, a store in memory."""
    if resume is None:
        yield Forgetful()
        return
    with Store(resume / STORE_FILE) as store:
        yield store


def resolve_device(device: str) -> str:
    """Return `cuda` for `auto` where there is one, else `cpu`."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


class Pace:
    """Prints a line on stderr as each cell ends, and passes on the records so far, for a run that is stopped."""

    def __init__(self, num_cells: int, leave: Callable[[list[Record], int], None] | None) -> None:
        self._num_cells, self._leave, self._done, self._begin = num_cells, leave, 0, time.monotonic()
        self._last = self._left = self._begin

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
        self._leave_all(records)

    def leave_now_and_then(self, records: Mapping[str, Record]) -> None:
        """Pass on the records if the last time was LEAVE_EVERY_S seconds ago, so that a killed process loses little."""
        if time.monotonic() - self._left > LEAVE_EVERY_S:
            self._leave_all(list(records.values()))

    def _leave_all(self, records: Sequence[Record]) -> None:
        if self._leave is not None:
            self._leave(list(records), self._done)
        self._left = time.monotonic()


@dataclass(frozen=True)
class InProcess:
    """How cells run in this process.

    batch: prompts of the longest length that run together; None: by the device. workers: processes that make prompts.
    resume: the folder of the store; None: nothing is kept. deployment: of the engine that runs serving profiles; None:
    one made for the machine, without a host tier. stop: when to end before all is done; None: never.
    """

    device: str
    batch: int | None
    workers: int
    resume: Path | None
    deployment: "Deployment | None" = None
    stop: Stop | None = None


def run(
    cells: Sequence[Cell],
    settings: PromptSettings,
    how: InProcess,
    leave: Callable[[list[Record], int], None] | None,
) -> list[Record]:
    """Run cells and return their records, including those of earlier runs in the store's folder.

    Methods run in the reference decoder, then serving profiles in an engine; only one of them is loaded at a time.
    `leave` is called with the records so far and the number of finished cells, after each cell and from time to time.
    A run that is cut (`how.stop`) returns the finished records.
    """
    groups = group_by_deployment(list(dict.fromkeys(one for cell in cells for one in cell.methods)), how.deployment)
    served = {one for _, profiles in groups for one in profiles}
    parts: list[tuple[Callable[..., None], list[Cell]]] = [
        (_run_methods, _cells_with(cells, lambda one: one not in served)),
        *(
            (partial(_run_profiles, deployment, profiles), _cells_with(cells, profiles.__contains__))
            for deployment, profiles in groups
        ),
    ]
    num_parts = sum(len(own) for _, own in parts)
    with open_ledger(cells, num_parts, how.resume, leave, how.stop) as (ledger, records):
        for run_part, own in parts:
            if own:
                run_part(own, settings, how, ledger)
    return list(records.values())


def _cells_with(cells: Sequence[Cell], wanted: Callable[[str], bool]) -> list[Cell]:
    """Return the cells with wanted methods, reduced to these."""
    return [replace(cell, methods=own) for cell in cells if (own := tuple(filter(wanted, cell.methods)))]


def run_remotely(
    cells: Sequence[Cell],
    settings: PromptSettings,
    server: "Server",
    resume: Path | None,
    leave: Callable[[list[Record], int], None] | None,
    stop: Stop | None,
) -> list[Record]:
    """Run cells on a server and return their records. Raises ProbeError for a server that does not answer at all."""
    from evals.served import run_on_server

    with open_ledger(cells, len(cells), resume, leave, stop) as (ledger, records):
        run_on_server(cells, settings, server, ledger)
    return list(records.values())


@contextmanager
def open_ledger(
    cells: Sequence[Cell],
    num_parts: int,
    resume: Path | None,
    leave: Callable[[list[Record], int], None] | None,
    stop: Stop | None,
) -> Iterator[tuple[Ledger, dict[str, Record]]]:
    """Yield a ledger over the store in the folder `resume`, and the run's records by key, which grow as they come.

    If the run is cut, the context ends without an error and `stop` has the reason; without a `stop`, RunCut is raised.
    """
    records: dict[str, Record] = {}
    total = sum(cell.num_samples * len(cell.methods) for cell in cells)
    with open_store(resume) as store, progress_bar(total, "samples") as advance:
        pace = Pace(num_parts, leave)

        def put(record: Record) -> None:
            store.add(record)
            records[record.key] = record

        def keep(record: Record) -> None:
            put(record)
            advance()
            pace.leave_now_and_then(records)

        def found(key: str) -> None:
            records[key] = store[key]
            advance()

        def check() -> None:
            if stop is not None:
                stop.check()

        try:
            yield Ledger(store, found, keep, put, check, lambda cell: pace(cell, list(records.values()))), records
        except RunCut as cut:
            if stop is None:
                raise
            stop.reason = str(cut)
            print(f"cut: {cut}; what is finished is kept", file=sys.stderr, flush=True)


def _run_methods(cells: Sequence[Cell], settings: PromptSettings, how: InProcess, ledger: Ledger) -> None:
    from evals.run import prompts_of, run_cells
    from evals.tokenizer import load_tokenizer

    decoder = _load_decoder(settings, how.device)
    batch_tokens = BATCH_TOKENS["cuda" if how.device.startswith("cuda") else "cpu"]
    if how.batch is not None:
        batch_tokens = how.batch * max(cell.length_tokens for cell in cells)
    with closing(prompts_of(cells, settings, how.workers)) as prompts:
        run_cells(decoder, load_tokenizer(settings.model), prompts, settings, batch_tokens, ledger)


def _load_decoder(settings: PromptSettings, device: str) -> "ReferenceDecoder":
    import torch

    from evals.forward import load_decoder

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return load_decoder(settings.model, torch.device(device), dtype)


def _run_profiles(
    deployment: "Deployment | None",
    profiles: dict[str, str],
    cells: Sequence[Cell],
    settings: PromptSettings,
    how: InProcess,
    ledger: Ledger,
) -> None:
    from evals.distributions import full_logprobs
    from evals.run import prompts_of
    from evals.served import Exact, run_profiles
    from evals.serving import load_serving_engine
    from evals.tokenizer import load_tokenizer
    from gpu.model.architecture import read_architecture

    longest = max(cell.length_tokens for cell in cells)
    shape = read_architecture(settings.model)
    exact: Exact | None = None
    if any(cell.forced_tokens for cell in cells):
        decoder = _load_decoder(settings, how.device)

        def exact(prompt: list[int], tokens: list[int]) -> "torch.Tensor":
            return full_logprobs(decoder, prompt, tokens, 1)[1:]

    with (
        closing(prompts_of(cells, settings, how.workers)) as prompts,
        load_serving_engine(settings.model, how.device, longest, deployment) as engine,
    ):
        run_profiles(engine, load_tokenizer(settings.model), shape, prompts, profiles, settings, ledger, exact)


def leave_results(
    cells: Sequence[Cell],
    records: Sequence[Record],
    outputs: Outputs,
    configuration: dict[str, Any],
    seed: int,
    reason: str | None,
) -> list[Row]:
    """Print the table, write the JSON and HTML that were asked for, and return the rows.

    reason: why the run was cut, or None.
    """
    rows = summarize(records)
    print_table(rows, open_console())
    write_rows(cells, records, outputs.json, configuration, seed, reason)
    if outputs.html is not None and rows:
        from evals.report.page import render_page

        flat = [{**record.cell, **asdict(record), **record.measured} for record in records]
        write_text(outputs.html, render_page("Quality against what is read", rows, flat, [], configuration,
                                             {"prompts": seed}))  # fmt: skip
    return rows


def write_rows(
    cells: Sequence[Cell],
    records: Sequence[Record],
    path: Path | None,
    configuration: dict[str, Any],
    seed: int,
    reason: str | None,
) -> None:
    """Write the JSON of the finished records to `path`, if it is given.

    `cut` and `missing` name what an interrupted run lacks.
    """
    if path is not None:
        left = {"depths": finite(depth_rows(records)), "cut": reason, "missing": missing_rows(cells, records, reason)}
        write_document(path, make_document(summarize(records), configuration, {"prompts": seed}, **left))


def missing_rows(cells: Sequence[Cell], records: Sequence[Record], reason: str | None) -> list[Row]:
    """Return the cells for which an interrupted run has too few samples: `task, length, method, samples, asked`."""
    if reason is None:
        return []
    have = Counter((one.cell["task"], one.cell["length"], one.cell["method"]) for one in records)
    return [
        {"task": cell.task, "length": cell.length_tokens, "method": method, "samples": count, "asked": cell.num_samples}
        for cell in cells
        for method in cell.methods
        if (count := have[cell.task, cell.length_tokens, method]) < cell.num_samples
    ]


def exit_status(rows: Sequence[Row], reason: str | None) -> int:
    """Return FAILED if a sample failed, else CUT if the run was cut before its end, else 0."""
    return FAILED if any(row.get("failures") for row in rows) else CUT if reason is not None else 0


def count_workers(num_cells: int, device: str) -> int:
    """Return the number of processes that make prompts: one for each cell, but none if the CPU is the device."""
    return min(num_cells, max(1, (os.cpu_count() or 1) - 1)) if device.startswith("cuda") and num_cells > 1 else 0
