"""The set `served` of docs/RESULTS.md: serving profiles end to end, with LSH sampling at the settings that serve.

Its rows stand beside those of methods in the reference decoder: the same tasks, prompts and definitions of what was
read. Nothing is resident (`host.resident_tokens: 0`), so that what is scored is the sample. It knows no engine.
Invariant: full attention is always run, since differences are paired with it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.report.document import finite, write_document
from evals.results import describe_run, machine_name, tasks_at
from evals.rows import depth_rows, summarize
from evals.served_method import PREFIX
from evals.session import InProcess, count_workers, missing_rows, resolve_device
from evals.session import run as run_cells
from evals.stopping import Stop
from evals.store import Record
from transfer.config import HostConfig, SampledConfig

SET = "served"
SETTINGS = ((10, 150), (10, 200))
"""(bits_per_table, num_tables): the paper's, and those tuned on the reference model."""
SHORT_PROMPTS, LONG_PROMPTS, LONG_TOKENS = 400, 200, 16_384
"""Prompts a task: below LONG_TOKENS, and from there on."""
LENGTHS_SERVED = "4096,16384"


def served_methods(settings: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """The exact profile, and sampling at each setting."""
    sampled = (f"{PREFIX}sampled:bits_per_table={bits},num_tables={tables}" for bits, tables in settings)
    return (f"{PREFIX}exact", *sampled)


def served_cells(lengths: Sequence[int], samples: int | None, tasks: Sequence[str]) -> list[Cell]:
    """tasks: none for all that full attention can do at a length, but forced ones: a server chooses its own tokens."""
    cells = []
    for length in lengths:
        count = samples or (LONG_PROMPTS if length >= LONG_TOKENS else SHORT_PROMPTS)
        cells += [Cell(task, length, count, served_methods(SETTINGS), 0) for task in tasks or tasks_at(length)]
    return cells


def run_served(
    cells: list[Cell], command: str, settings: PromptSettings, device: str, resume: Path | None, out: Path, stop: Stop
) -> dict[str, Any]:
    """Run the set, write its JSON as it goes, and return it: rows, and what is missing where the run was cut."""
    from evals.serving import make_deployment

    on = resolve_device(device)
    begin, machine = time.monotonic(), machine_name(on)
    longest = max(cell.length_tokens for cell in cells)
    largest = SampledConfig(num_tables=max(tables for _, tables in SETTINGS))  # memory is derived for these
    deployment = make_deployment(settings.model, on, longest, HostConfig(resident_tokens=0, sampled=largest))

    def leave(records: list[Record], finished: int, reason: str | None = "under way") -> dict[str, Any]:
        run = describe_run(SET, command, settings.seed, time.monotonic() - begin, machine, summarize(records))
        run |= {"cells_finished": finished, "depths": finite(depth_rows(records)), "cut": reason}
        run |= {"missing": missing_rows(cells, records, reason)}
        write_document(out, run)
        return run

    how = InProcess(on, None, count_workers(len(cells), on), resume, deployment, stop)
    return leave(run_cells(cells, settings, how, leave), len(cells), stop.reason)
