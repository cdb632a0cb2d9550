"""Keep the list of runs that made a folder's weights, so that the record of a resumed run has all of them.

The invariant: the last run of a folder's list wrote its weights, and each other run's weights were the start of the
next.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LINEAGE = "training.json"


@dataclass(frozen=True)
class Run:
    """The record of one training run. layers: the layers of the weights that it began with, from 0, in order; None: all
    of them.
    """

    stage: str
    gpus: int
    minutes: float
    steps: int
    tokens: int
    text_tokens: int
    layers: tuple[int, ...] | None


def read_lineage(folder: Path) -> list[Run]:
    """Return the runs of a folder in order. Raises ValueError if the folder has no list of them."""
    path = folder / LINEAGE
    if not path.exists():
        raise ValueError(f"{folder}: has no {LINEAGE}; resume from a folder that training wrote")
    runs = json.loads(path.read_text(encoding="utf-8"))
    return [Run(**{**run, "layers": run["layers"] and tuple(run["layers"])}) for run in runs]


def write_lineage(folder: Path, runs: Sequence[Run]) -> None:
    """Replace the folder's list of runs."""
    text = json.dumps([asdict(run) for run in runs], indent=1)
    (folder / LINEAGE).write_text(text + "\n", encoding="utf-8")
