"""Write the JSON document of a run: rows with the resolved configuration and seeds that made them.

The invariant: a run can be repeated from its document alone, and the document never has NaN or infinity, which JSON
lacks. An unknown number is null.
"""

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROW_FIELDS = (
    "method", "settings", "task", "length", "samples", "score", "failures", "head_fraction", "bytes_fraction",
)  # fmt: skip


def make_document(
    rows: Sequence[Mapping[str, Any]], configuration: Mapping[str, Any], seeds: Mapping[str, int], **more: Any
) -> dict[str, Any]:
    """Return {configuration, seeds, rows, ...more} as JSON values. Raises ValueError for a row without one of
    ROW_FIELDS.
    """
    for row in rows:
        missing = [name for name in ROW_FIELDS if name not in row]
        if missing:
            raise ValueError(f"row {row.get('method')}/{row.get('task')}: no {', '.join(missing)}")
    return finite({"configuration": dict(configuration), "seeds": dict(seeds), "rows": list(rows), **more})


def finite(value: Any) -> Any:
    """Return the value with NaN and infinities as None, paths as text, tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader sees the old or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document as indented JSON. Raises ValueError for NaN and infinities."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def describe_run(name: str, command: str, seed: int, seconds: float, machine: str, rows: list[Any]) -> dict[str, Any]:
    """Return the JSON document of a run, dated today."""
    return finite(
        {
            "set": name,
            "command": command,
            "seed": seed,
            "seconds": round(seconds, 1),
            "machine": machine,
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
    )


def machine_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
