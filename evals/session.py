"""One run of cells from beginning to end: model, store, progress bar, and what it leaves: table, JSON, HTML.

It ties the runner to files and the terminal and knows no method and no metric. Invariant: what is written was computed
from the store's records, so a run that was stopped and resumed leaves the same as one that was not.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evals.cells import Cell, PromptSettings
from evals.report.document import make_document, write_document, write_text
from evals.report.table import print_table
from evals.rows import Row, summarize
from evals.store import Record, Store

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


def run_in_process(
    cells: Sequence[Cell], settings: PromptSettings, device: str, batch: int | None, workers: int, resume: Path | None,
    leave: Callable[[list[Record], int], None] | None,
) -> list[Record]:  # fmt: skip
    """Run cells in the reference decoder and return their records, those of earlier runs of the folder included.

    `leave` gets the records so far and the number of finished cells after each cell.
    """
    import torch

    from evals.forward import load_decoder
    from evals.run import load_tokenizer, prompts_of, run_cells

    on_cuda = device.startswith("cuda")
    dtype = torch.bfloat16 if on_cuda else torch.float32
    decoder = load_decoder(settings.model, torch.device(device), dtype)
    tokenizer = load_tokenizer(settings.model)
    batch_tokens = BATCH_TOKENS["cuda" if on_cuda else "cpu"]
    if batch is not None:
        batch_tokens = batch * max(cell.length_tokens for cell in cells)
    records: dict[str, Record] = {}
    total = sum(cell.num_samples * len(cell.methods) for cell in cells)
    with open_store(resume) as store, progress_bar(total, "samples") as advance:

        def keep(record: Record) -> None:
            store.add(record)
            records[record.key] = record
            advance()

        def found(key: str) -> None:
            records[key] = store[key]
            advance()

        prompts = prompts_of(cells, settings, workers)
        pace = Pace(len(cells), leave)

        def finished(cell: Cell) -> None:
            pace(cell, list(records.values()))

        run_cells(decoder, tokenizer, prompts, settings.seed, store, batch_tokens, found, keep, finished)
    return list(records.values())


def run_on_server(
    cells: Sequence[Cell], settings: PromptSettings, url: str, model: str | None, api_key: str | None,
    concurrency: int, resume: Path | None,
) -> list[Record]:  # fmt: skip
    """Run cells on an OpenAI-compatible server. The methods of a cell are names of its attention profiles.

    `default` asks for none. What the server reads is not known here, so fractions are missing.
    """
    from evals.clients import Endpoint, ask_all
    from evals.metrics import score
    from evals.run import prompts_of
    from evals.store import sample_key
    from evals.tasks import CODE_VERSION

    records: list[Record] = []
    name = model or settings.model.resolve().name
    total = sum(cell.num_samples * len(cell.methods) for cell in cells)

    async def ask_cell(cell: Cell, samples: list[Any], store: Store | Forgetful, advance: Any) -> None:
        for profile in cell.methods:
            extra = {} if profile == "default" else {"attention_profile": profile}
            keys = {
                sample.sample_id: sample_key(
                    profile, {"url": url, **extra}, sample, cell.length_tokens, settings.seed, name, CODE_VERSION
                )
                for sample in samples
            }
            for sample in samples:
                if keys[sample.sample_id] in store:
                    records.append(store[keys[sample.sample_id]])
                    advance()
            missing = [sample for sample in samples if keys[sample.sample_id] not in store]
            endpoint = Endpoint(url, name, "completions" if settings.form == "reference" else "chat", api_key,
                                concurrency, 4, 600.0, extra)  # fmt: skip
            async for reply in ask_all(endpoint, missing, None):
                sample = reply.sample
                value = 0.0 if reply.failure else score(sample.metric, reply.text, sample.answers, sample.meta)
                identity = {
                    "method": "full" if profile in ("default", "exact") else profile,
                    "settings": {"url": url, "attention_profile": profile},
                    "task": cell.task,
                    "length": cell.length_tokens,
                    "metric": sample.metric,
                }
                key = keys[sample.sample_id]
                record = Record(key, identity, sample.sample_id, value, reply.text, reply.failure, sample.depth, {})
                store.add(record)
                records.append(record)
                advance()

    with open_store(resume) as store, progress_bar(total, "samples") as advance:
        for cell, prompts in prompts_of(cells, settings, 0):
            asyncio.run(ask_cell(cell, [prompt.sample for prompt in prompts], store, advance))
    return records


def leave_results(records: Sequence[Record], outputs: Outputs, configuration: dict[str, Any], seed: int) -> list[Row]:
    """Print the table, write JSON and HTML where asked, and return the rows."""
    rows = summarize(records)
    print_table(rows, Console())
    if outputs.json is not None:
        write_document(outputs.json, make_document(rows, configuration, {"prompts": seed}))
    if outputs.html is not None:
        from evals.report.page import render_page

        flat = [{**record.cell, **asdict(record), **record.measured} for record in records]
        write_text(outputs.html, render_page("Quality against what is read", rows, flat, [], configuration,
                                             {"prompts": seed}))  # fmt: skip
    return rows


def count_workers(num_cells: int, device: str) -> int:
    """Processes that make prompts: one a cell where the device is not the CPU that they would run on."""
    return min(num_cells, max(1, (os.cpu_count() or 1) - 1)) if device.startswith("cuda") and num_cells > 1 else 0
