"""The runs that made a folder's weights, kept beside them, so that a run which resumes tells of all.

The invariant: the last run of a folder's list wrote its weights, and each run but the first began with those of the one
before.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LINEAGE = "training.json"


@dataclass(frozen=True)
class Run:
    """The record of one training run. layers: which of the layers before it began with, from 0; None: all, in their
    order.
    """

    stage: str
    gpus: int
    minutes: float
    steps: int
    tokens: int
    text_tokens: int
    layers: tuple[int, ...] | None


def read_lineage(folder: Path) -> list[Run]:
    """Return the runs of a folder, first one first. Raises ValueError where the folder does not tell them."""
    path = folder / LINEAGE
    if not path.exists():
        raise ValueError(f"{folder}: has no {LINEAGE}; resume from a folder that training wrote")
    runs = json.loads(path.read_text(encoding="utf-8"))
    return [Run(**{**run, "layers": run["layers"] and tuple(run["layers"])}) for run in runs]


def write_lineage(folder: Path, runs: Sequence[Run]) -> None:
    """Replace what the folder tells of its runs."""
    text = json.dumps([asdict(run) for run in runs], indent=1)
    (folder / LINEAGE).write_text(text + "\n", encoding="utf-8")
