"""Judge the memory of a soak, print its results, and write them as JSON."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.soak.processes import Trend, fit_trend
from bench.soak.soak_run import SoakResult

FLAT_BYTES = 50 * 2**20  # a leak of one request's rows (2 MB and more) passes it within some fifty requests
_COLUMNS = ("asked", "answered", "same", "level", "parted", "other", "lost at a kill", "refused meanwhile", 
            "queue full", "cancelled")  # fmt: skip
_HEADINGS = {"level": "parted where two tokens are level", "parted": "parted, not judged", "other": "wrong"}
_MIB = 2**20
_MOST_FAULTS = 20  # that are printed


def judge_memory(result: SoakResult) -> dict[str, Trend]:
    """Return the trend of each role over the second half of its samples; of engines, only the last one's.

    Growth beyond FLAT_BYTES is a fault.
    """
    fitted = {role: fit_trend(samples[len(samples) // 2 :]) for (role, _), samples in sorted(result.memory.items())}
    trends = {role: trend for role, trend in fitted.items() if trend is not None}
    for role, trend in trends.items():
        if trend.growth_bytes > FLAT_BYTES:
            size = f"{trend.growth_bytes / _MIB:,.0f} MiB in {trend.seconds:,.0f} s"
            result.blame(f"memory of the {role} grew by {size}, wanted at most {FLAT_BYTES / _MIB:.0f} MiB")
    return trends


def print_result(result: SoakResult, trends: dict[str, Trend], console: Console) -> None:
    """Print the requests by kind, memory, gauges at rest, and each broken promise."""
    requests = Table(title=f"{result.seconds:,.0f} s, {len(result.kills)} engines killed", title_justify="left")
    used = [name for name in _COLUMNS if name in ("asked", "answered") or any(c[name] for c in result.counts.values())]
    requests.add_column("requests", no_wrap=True)
    for name in used:
        requests.add_column(_HEADINGS.get(name, name), justify="right")
    for kind in sorted(result.counts):
        requests.add_row(kind, *(f"{result.counts[kind][name]:,}" for name in used))
    requests.add_row("all", *(f"{sum(c[name] for c in result.counts.values()):,}" for name in used))
    console.print(requests)
    for role, trend in trends.items():
        slope = f"{60 * trend.bytes_a_second / _MIB:+.2f} MiB a minute over {trend.seconds:,.0f} s"
        console.print(f"memory of the {role}: {trend.last_bytes / _MIB:,.0f} MiB, {slope}", highlight=False)
    held = ", ".join(f"{name.removeprefix('tandem_')} {value:,.0f}" for name, value in result.at_rest.items())
    console.print(f"at rest: {held}", highlight=False)
    if result.drafted[0]:
        console.print("drafted by the last engine: {:,} tokens, {:,} drawn".format(*result.drafted), highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    for fault, number in result.faults.most_common(_MOST_FAULTS):
        console.print(f"broken, {number} times: {fault}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not result.faults:
        console.print("every promise was kept", style="green")


def write_result(result: SoakResult, trends: dict[str, Trend], path: Path) -> None:
    """Write all results as one JSON object."""
    memory = {
        role: {"mib": round(one.last_bytes / _MIB, 1), "mib_a_minute": round(60 * one.bytes_a_second / _MIB, 3),
               "seconds": round(one.seconds, 1)} for role, one in trends.items()
    }  # fmt: skip
    tree = {
        "seconds": round(result.seconds, 1), "kills": len(result.kills),
        "requests": {kind: dict(counts) for kind, counts in sorted(result.counts.items())},
        "drafted": dict(zip(("proposed", "accepted"), result.drafted, strict=True)),
        "memory": memory, "at_rest": result.at_rest, "broken": dict(result.faults),
    }  # fmt: skip
    path.write_text(json.dumps(tree, indent=1) + "\n")
