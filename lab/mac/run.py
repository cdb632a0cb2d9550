"""A run of `python -m lab mac`: prompts, then parts, several at a time, then one document of all that they left.

Invariant: the document follows from what the folder holds, so a run that was cut, or split over several calls with the
same options, ends with the same as one that was not.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, signal
from typing import Any

import torch

from evals.cells import Cell
from evals.methods.method import MethodError
from evals.report.document import finite
from evals.run import make_prompts
from evals.score_rows import Row, mean_known, summarize
from evals.session import STORE_FILE
from evals.stopping import RunCut, stopping
from evals.store import Record, Store
from gpu.memory.plan import PlanError
from lab.mac.grid import by_label
from lab.mac.parts import Asked, Done, Part, Prompts, parts_of, run_part
from transfer.host_tier import HostMemoryError

SET = "mac"
LOOK_EVERY_S = 0.5


def run_all(asked: Asked, folder: Path, processes: int, seconds: float | None) -> dict[str, Any]:
    """Run what the folder lacks, and say all that it has: `rows`, `layers`, `errors`, why it was `cut`, what `failed`.

    processes: parts at a time; 1: in this process. seconds: to end after, with what is finished by then.
    """
    begin = time.monotonic()
    parts = parts_of(asked)
    prompts = make_all(asked, processes)
    print(f"{len(prompts)} tasks and lengths, prompts made after {time.monotonic() - begin:.1f} s; {len(parts)} parts",
          file=sys.stderr, flush=True)  # fmt: skip
    left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begin))
    done: list[Done] = []
    for one in _run_parts(parts, asked, prompts, folder, processes, left):
        print(f"part {len(done) + 1}/{len(parts)}: {one.name}: {len(one.records)} records"
              + (f", cut: {one.reason}" if one.reason else "") + (f", failed: {one.failure}" if one.failure else "")
              + f", {time.monotonic() - begin:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
        done.append(one)
    ended = {one.name: one for one in done}
    done = [complete(part, ended.get(part.name), folder) for part in parts]
    records = list({record.key: record for one in done for record in one.records}.values())
    told = by_label(asked.settings)
    rows = [row | told.get(row["method"], {}) for row in summarize(records)]
    reasons = [one.reason for one in done if one.reason is not None]
    return finite(
        {
            "seconds": round(time.monotonic() - begin, 1),
            "rows": sorted(rows, key=_by_reads(rows)),
            "layers": pool_layers(records, told),
            "errors": [row for one in done for row in one.errors],
            "cut": reasons[0] if reasons else None,
            "failed": {one.name: one.failure for one in done if one.failure is not None},
        }
    )


def _run_parts(
    parts: Sequence[Part], asked: Asked, prompts: Prompts, folder: Path, processes: int, seconds: float | None
) -> Iterator[Done]:
    """Yield parts as they end. Of a run that is cut, those that had begun."""
    until = None if seconds is None else time.time() + seconds
    if processes == 1:
        for part in parts:
            one = _run_until(part, asked, _of(part, prompts), folder, until)
            yield one
            if one.reason is not None:
                return
        return
    with stopping(seconds) as stop, _pool(processes) as pool:
        pending: set[Future[Done]] = {
            pool.submit(_run_until, part, asked, _of(part, prompts), folder, until) for part in parts
        }
        while pending:
            try:
                stop.check()
            except RunCut:
                pending = {future for future in pending if not future.cancel()}
                for process in active_children():
                    process.terminate()  # a wish to a part that runs; nothing to others
            ended, pending = wait(pending, LOOK_EVERY_S, FIRST_COMPLETED)
            yield from (future.result() for future in ended)


def _run_until(part: Part, asked: Asked, prompts: Prompts, folder: Path, until: float | None) -> Done:
    """In a process of its own, whose start took some of the time. What it cannot bear is told, with where it was if
    that is a fault of ours; others go on.
    """
    try:
        return run_part(part, asked, prompts, folder, None if until is None else max(0.0, until - time.time()))
    except Exception as error:
        if not isinstance(error, (HostMemoryError, MethodError, PlanError, torch.OutOfMemoryError)):
            traceback.print_exc()
        return Done(part.name, failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def complete(part: Part, done: Done | None, folder: Path) -> Done:
    """With what earlier calls left of a part that did not come to its end, or did not begin (None)."""
    done = done or Done(part.name, reason="did not begin")
    path = folder / part.name / STORE_FILE
    if (done.reason is None and done.failure is None) or not path.exists():
        return done
    with Store(path) as store:
        return replace(done, records=[one for one in store if one.cell["method"] in part.labels])


def _of(part: Part, prompts: Prompts) -> Prompts:
    """Return what the part asks for."""
    most = {(cell.task, cell.length_tokens): 0 for cell in (*part.cells, *part.forced)}
    for cell in (*part.cells, *part.forced):
        most[cell.task, cell.length_tokens] = max(most[cell.task, cell.length_tokens], cell.num_samples)
    return {place: prompts[place][:count] for place, count in most.items()}


def _pool(processes: int) -> ProcessPoolExecutor:
    """Start a pool that ignores signals: this process decides, but for a part that runs, which ends at TERM."""
    return ProcessPoolExecutor(processes, get_context("spawn"), _ignore_signals)


def _ignore_signals() -> None:
    for number in (SIGINT, SIGTERM):
        signal(number, SIG_IGN)


def make_all(asked: Asked, processes: int) -> Prompts:
    """As many prompts of each task and length as any way of running them takes."""
    places: dict[tuple[str, int], int] = {}
    for length in asked.lengths:
        for tasks, samples in ((asked.tasks, asked.samples), (asked.long, asked.forced_samples)):
            for task in tasks:
                places[task, length] = max(places.get((task, length), 0), samples, asked.served_samples)
    cells = [Cell(task, length, count, (), 0) for (task, length), count in places.items()]
    if processes == 1:
        made = [make_prompts(cell, asked.prompts) for cell in cells]
    else:
        with _pool(min(len(cells), os.cpu_count() or 1)) as pool:
            made = list(pool.map(make_prompts, cells, [asked.prompts] * len(cells)))
    return dict(zip(places, made, strict=True))


def pool_layers(records: Sequence[Record], told: dict[str, dict[str, Any]]) -> list[Row]:
    """Return what profiles reused, a row a setting, length and layer, and one of all layers (`layer` None): means over
    tasks of `acceptance, refused, skipped_fraction, gap, age, whole_groups, kv_read`; `tasks`: how many.
    """
    cells: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for record in records:
        if record.layers:
            place = record.cell["method"], record.cell["length"]
            cells.setdefault(place, {})[record.cell["task"]] = record.layers
    rows = []
    for (method, length), by_task in cells.items():
        names = list(next(iter(by_task.values())))
        by_name = {
            name: [mean_known(of_layer) for of_layer in zip(*(one[name] for one in by_task.values()), strict=True)]
            for name in names
        }
        same = {"method": method, "length": length, "tasks": len(by_task), **told[method]}
        for layer in range(len(by_name[names[0]])):
            rows.append({**same, "layer": layer, **{name: by_name[name][layer] for name in names}})
        rows.append({**same, "layer": None, **{name: mean_known(by_name[name]) for name in names}})
    return rows


def _by_reads(rows: Sequence[Row]) -> Callable[[Row], tuple[Any, ...]]:
    """Return length, then full attention, then methods by what they read there over all tasks, so that equal reads
    stand together.
    """
    reads = {
        (row["length"], row["method"]): mean_known(
            [one["bytes_fraction"] for one in rows if (one["length"], one["method"]) == (row["length"], row["method"])]
        )
        for row in rows
    }
    return lambda row: (row["length"], row["method"] != "full", -(reads[row["length"], row["method"]] or 0.0),
                        row["method"])  # fmt: skip
