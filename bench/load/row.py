"""Write a load test as a benchmark row, and its files.

The row has the fields of `bench.benchmark_rows.Row` and is read by it, but is written here, so that a client needs no
torch. A server seen over HTTP has no floor: what it must read is not known here, so `floor_ms` is null, `floor` says
why, and no machine's rates are given. If nothing completed, `ms` is null as well: the row is written all the same.
"""

import json
from pathlib import Path
from typing import Any

from bench.load.measure import LoadResult
from bench.load.notes import describe_settings

_FLOOR = "none: the server's weights and bandwidth are not known to a client"


def make_row(result: LoadResult) -> dict[str, Any]:
    """Return end-to-end latency as `ms` (median), p10 and p90; everything else is in `extras`, the settings in
    `config`.
    """
    summary = result.summary.to_json()
    e2el = summary["e2el"]
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
        "rates": {},
        "extras": {"load": summary, "notes": result.notes, "interrupted": result.interrupted},
        "config": describe_settings(result.plan, result.model, result.counting),
    }


def write_raw(path: Path, result: LoadResult) -> None:
    """Write one JSON object a request, with the arrival of each chunk in seconds after the start."""
    lines = [json.dumps(record.to_json()) + "\n" for record in result.records]
    path.write_text("".join(lines), encoding="utf-8")
