"""Cells of steps over predicted blocks, one after the other while there is time: tables, and rows as they come.

Invariants: what was measured before a run was cut is in its tables and its file; contexts of one length are filled
once, weights drawn once.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from gpu.load import RANDOM_SEED
from gpu.model.architecture import named_shape
from gpu.weights.drawing import random_weights
from lab.kernels.predicted_decode import Cell, Contexts, Measured, measure, measure_link
from lab.kernels.predicted_tables import AIMS, tabulate, tabulate_aims


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of `python -m lab kernel predicted-steps`; seconds: nothing is begun after so many, None:
    everything is.
    """

    shape: str
    cells: Sequence[Cell]
    weights: Path
    turnovers: Sequence[float]
    steps: int
    selections: np.ndarray | None
    trace: Path | None
    seconds: float | None


def run_cells(asked: Asked, device_name: str, json_file: Path | None, console: Console) -> None:
    """Print tables as cells end, what the aims are about behind them, and last all rows as JSON, unless they go to
    `json_file`, one by one. Raises SelectionsError for selections that do not fit.
    """
    ends = float("inf") if asked.seconds is None else time.monotonic() + asked.seconds
    device = torch.device(device_name)
    shape, dtype = named_shape(asked.shape), torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = random_weights(shape, RANDOM_SEED, dtype, device, lambda fraction: None)
    rate = measure_link(device)
    console.print(f"{asked.shape} on {device.type}, link {rate / 1e9:.1f} GB/s")
    opened: dict[int, Contexts] = {}
    found: dict[Cell, list[Measured]] = {}

    def keep() -> str:
        rows = [{**cell._asdict(), **asdict(one)} for cell, own in found.items() for one in own]
        peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
        text = json.dumps({"shape": asked.shape, "link_gb_s": rate / 1e9, "peak_gib": peak, "rows": rows})
        if json_file is not None:
            json_file.write_text(text, encoding="utf-8")
        return text

    try:
        for number, cell in enumerate(asked.cells):
            if time.monotonic() >= ends:
                console.print(f"time is over before {cell}")
                break
            if cell.context not in opened:
                most = max(one.batch for one in asked.cells if one.context == cell.context)
                opened[cell.context] = Contexts(shape, cell.context, most, weights)
            own = found.setdefault(cell, [])
            trace = asked.trace if number == 0 else None
            ways = measure(
                opened[cell.context], asked.weights, cell, asked.turnovers, asked.steps, asked.selections, trace
            )
            for one in ways:
                own.append(one)
                keep()
                if time.monotonic() >= ends:
                    ways.close()
                    console.print(f"time is over in {cell}")
                    break
            console.print(tabulate(own, rate, str(cell)))
        console.print(AIMS)
        console.print(tabulate_aims(found, rate))
    finally:
        for contexts in opened.values():
            contexts.shutdown()
    rows = keep()
    if json_file is None:
        print(rows)
