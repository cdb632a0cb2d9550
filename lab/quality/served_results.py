"""The set `served` of lab/RESULTS.md: serving profiles end to end, each at the settings that its method states.

Its rows stand beside those of methods in the reference decoder: the same tasks, prompts and definitions of what was
read. Nothing is resident (`host.resident_tokens: 0`), so that what is scored is the sample. Invariant: full attention
is always run, since differences are paired with it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.report.document import describe_run, finite, machine_name, write_document
from evals.score_rows import depth_rows, summarize
from evals.served_method import PREFIX
from evals.session import InProcess, count_workers, missing_rows, resolve_device
from evals.session import run as run_cells
from evals.stopping import Stop
from evals.store import Record
from gpu.methods.registry import list_methods
from gpu.model.architecture import read_architecture
from lab.quality.results import tasks_at
from transfer.host_config import HostConfig
from transfer.settings_model import Settings

SET = "served"
SHORT_PROMPTS, LONG_PROMPTS, LONG_TOKENS = 400, 200, 16_384
"""Prompts a task: below LONG_TOKENS, and from there on."""
LENGTHS_SERVED = "4096,16384"


def served_methods() -> tuple[str, ...]:
    """Return the built-in profiles, at each of the settings that their methods are scored at."""
    return tuple(
        f"{PREFIX}{name}" if method.shared_key is None else f"{PREFIX}{name}:{_listed(settings)}"
        for name, method in list_methods().items()
        for settings in method.scored
    )


def _listed(settings: Settings) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.model_dump(exclude_none=True).items())


def _hosts() -> list[HostConfig]:
    """Return the `host` sections that these methods are run with."""
    shared = [(method.shared_key, settings) for method in list_methods().values() for settings in method.scored]
    return [
        HostConfig(resident_tokens=0, residency="fixed", **({key: settings} if key else {})) for key, settings in shared
    ]


def served_cells(lengths: Sequence[int], samples: int | None, tasks: Sequence[str]) -> list[Cell]:
    """Return tasks: none for all that full attention can do at a length, but forced ones: a server chooses its own
    tokens.
    """
    cells = []
    for length in lengths:
        count = samples or (LONG_PROMPTS if length >= LONG_TOKENS else SHORT_PROMPTS)
        cells += [Cell(task, length, count, served_methods(), 0) for task in tasks or tasks_at(length)]
    return cells


def run_served(
    cells: list[Cell], command: str, settings: PromptSettings, device: str, resume: Path | None, out: Path, stop: Stop
) -> dict[str, Any]:
    """Run the set, write its JSON as it goes, and return it: rows, and what is missing where the run was cut."""
    from evals.serving import context_bytes, make_deployment

    on = resolve_device(device)
    begin, machine = time.monotonic(), machine_name(on)
    longest = max(cell.length_tokens for cell in cells)
    shape = read_architecture(settings.model)
    host = max(_hosts(), key=lambda host: context_bytes(host, shape, longest))  # memory is derived for this one
    deployment = make_deployment(settings.model, on, longest, host)

    def leave(records: list[Record], finished: int, reason: str | None = "under way") -> dict[str, Any]:
        run = describe_run(SET, command, settings.seed, time.monotonic() - begin, machine, summarize(records))
        run |= {"cells_finished": finished, "depths": finite(depth_rows(records)), "cut": reason}
        run |= {"missing": missing_rows(cells, records, reason)}
        write_document(out, run)
        return run

    how = InProcess(on, None, count_workers(len(cells), on), resume, deployment, stop)
    return leave(run_cells(cells, settings, how, leave), len(cells), stop.reason)
