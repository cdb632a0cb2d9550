"""Write a load test as a benchmark row, and its files.

The row has the fields of `bench.benchmark_rows.Row`, which can read it, but it is written here so that a client needs
no torch. A server behind HTTP has no floor, because the bytes that it must read are not known here: `floor_ms` is null,
`floor` says why, and there are no machine's rates. If nothing completed, `ms` is null, but the row is still written.
"""

import json
from pathlib import Path
from typing import Any

from bench.load.measure import LoadResult
from bench.load.notes import describe_settings

_FLOOR = "none: the server's weights and bandwidth are not known to a client"


def make_row(result: LoadResult) -> dict[str, Any]:
    """Return the row of a result. `ms` (median), p10 and p90 are of the end-to-end latency.

    All other figures are in `extras`, the settings in `config`.
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
    """Write one JSON object for each request, with the arrival of each chunk in seconds after the start."""
    lines = [json.dumps(record.to_json()) + "\n" for record in result.records]
    path.write_text("".join(lines), encoding="utf-8")
