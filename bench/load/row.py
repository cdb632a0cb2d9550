"""A load test as a benchmark row, and its files. Knows paths and JSON.

A server seen over HTTP has no floor: what it must read is not known here. So `floor_ms` is null and `floor` says why.
"""

import json
import platform
from pathlib import Path
from typing import Any

from bench.load.measure import LoadResult
from bench.load.notes import describe_settings

_FLOOR = "none: the server's weights and bandwidth are not known to a client"


def make_row(result: LoadResult) -> dict[str, Any]:
    """The row: end-to-end latency as `ms` (median), p10 and p90, and everything else under `load`."""
    e2el = result.summary.to_json()["e2el"]
    return {
        "name": "serve",
        "shape": result.plan.shape,
        "device": f"{result.model} at {result.plan.base_url}",
        "ms": e2el["p50"],
        "p10": e2el["p10"],
        "p90": e2el["p90"],
        "floor": _FLOOR,
        "floor_ms": None,
        "peer": None,
        "peer_ms": None,
        "rates": {"client": f"{platform.machine()} {platform.system()}"},
        "settings": describe_settings(result.plan, result.model, result.counting),
        "load": result.summary.to_json(),
        "notes": result.notes,
        "interrupted": result.interrupted,
    }


def write_raw(path: Path, result: LoadResult) -> None:
    """One JSON object a request, with the arrival of each chunk in seconds after the start."""
    lines = (json.dumps(record.to_json()) for record in result.records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
