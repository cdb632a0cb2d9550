"""Summarise records of single samples as rows: one for each method, task and length, with its interval.

Invariants: a failed sample stays in its row with score 0 and is counted. A row's difference from full attention is
paired, over the samples that both have.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from evals.paired import FEWEST_PROMPTS, Paired, mean_interval, paired_interval
from evals.store import Record
from gpu.methods.registry import list_shares

FRACTIONS = ("head_fraction", "bytes_fraction", "head_fraction_all_layers", "bytes_fraction_all_layers")
READ = "read_fraction"
"""Known of some methods: rows read that are not of sink, window or dense layers."""
BASELINES = ("full", "profile:exact")
"""The methods that rows are paired with: full attention in the reference decoder or, without that, the engine's."""
KL = "kl"
"""Measured of answers that are fed: KL(full attention || method) over the answer's tokens, in nats."""

APPLIED = "applied"
"""Measured: 1 if the method left out, moved, sampled or reused any key; 0 if it read exactly as full attention."""

DIGITS = 6
"""Digits to which differences are rounded before equal ones are counted."""

NUM_DEPTHS = 10
MOST_REASONS = 3

Row = dict[str, Any]


def summarize(records: Iterable[Record]) -> list[Row]:
    """Return rows of `method, settings, task, length, samples, score, head_fraction, bytes_fraction` and these fields.

    `score`: in points, 0 to 100; `low` to `high` is its 95 % interval. `difference` (`difference_low` to `_high`): from
    full attention, paired on the same samples; None if that did not run. `losses`, `gains`: the prompts that differ, if
    scores are 0 or 1. `interval`: how the intervals were made (`evals.paired`). `differences`: the paired differences
    in points, each with its number of prompts, which `evals.aims` pools. `applied`: false if the method had no effect
    in the whole cell; None: unknown. Fractions are means over samples; None if unknown (failures, a server). `reasons`:
    why samples failed, with counts.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[json.dumps(record.cell, sort_keys=True)].append(record)
    exact: dict[str, dict[str, float]] = {}
    for baseline in BASELINES:
        for members in groups.values():
            if members[0].cell["method"] == baseline:
                scores = {record.sample_id: record.score for record in members}
                exact.setdefault(_place(members[0].cell), scores)
    return [_row(members, exact.get(_place(members[0].cell), {})) for members in groups.values()]


PLACE = ("task", "length", "metric", "text", "seed")


def _place(cell: dict[str, Any]) -> str:
    """Return a key that is equal for rows that can be compared."""
    return json.dumps({key: cell.get(key) for key in PLACE}, sort_keys=True)


FED = ("agreement", "token_accuracy")
"""Metrics of answers that are fed to the methods token by token."""


def column_of(row: Row) -> str:
    """Return the column's name in tables and figures: the task, with its metric if answers were fed."""
    return f"{row['task']} ({row['metric']})" if row.get("metric") in FED else str(row["task"])


def _row(members: Sequence[Record], exact: dict[str, float]) -> Row:
    scores = [record.score for record in members]
    both = [record for record in members if record.sample_id in exact]
    interval = mean_interval(scores) if len(scores) >= FEWEST_PROMPTS else None
    gap: Paired | None = None
    points = [round(100 * (record.score - exact[record.sample_id]), DIGITS) for record in both]
    if len(both) >= FEWEST_PROMPTS:
        gap = paired_interval([record.score for record in both], [exact[record.sample_id] for record in both])
    return {
        **members[0].cell,
        "samples": len(members),
        "failures": sum(record.failure is not None for record in members),
        "reasons": count_reasons(record.failure for record in members),
        "score": 100 * sum(scores) / len(scores),
        "low": max(0.0, interval.low) if interval else None,
        "high": min(100.0, interval.high) if interval else None,
        "difference": gap.mean if gap else None,
        "difference_low": gap.low if gap else None,
        "difference_high": gap.high if gap else None,
        "losses": gap.losses if gap else None,
        "gains": gap.gains if gap else None,
        "interval": (gap or interval).kind if gap or interval else None,
        "differences": sorted([value, count] for value, count in Counter(points).items()),
        "applied": _applied(members),
        KL: mean_known([record.measured.get(KL) for record in members]),
        **{
            name: mean_known([record.measured.get(name) for record in members])
            for name in (*FRACTIONS, READ, *list_shares())
        },
    }


def _applied(members: Sequence[Record]) -> bool | None:
    told = [record.measured[APPLIED] for record in members if APPLIED in record.measured]
    return any(told) if told and members[0].cell["method"] not in BASELINES else None


def count_reasons(failures: Iterable[str | None]) -> dict[str, int]:
    """Return the reasons of failures with their counts: the MOST_REASONS most frequent, in that order."""
    return dict(Counter(one for one in failures if one is not None).most_common(MOST_REASONS))


def depth_rows(records: Iterable[Record]) -> list[Row]:
    """Return `method, task, length, depth, samples, score` (points) by tenths of the context.

    depth: the middle of the tenth. Samples without a depth are left out, failures count with score 0.
    """
    places: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        if record.depth is not None:
            tenth = min(int(record.depth * NUM_DEPTHS), NUM_DEPTHS - 1)
            cell = record.cell
            places[cell["method"], cell["task"], cell["length"], tenth].append(record.score)
    return [
        {"method": method, "task": task, "length": length, "depth": (tenth + 0.5) / NUM_DEPTHS,
         "samples": len(scores), "score": 100 * sum(scores) / len(scores)}
        for (method, task, length, tenth), scores in sorted(places.items())
    ]  # fmt: skip


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are neither None nor NaN; None if there are none."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else None
