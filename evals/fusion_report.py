"""Markdown of what policies that reuse documents did: a line a policy and ratio, tasks across.

It refuses to know how they were run. Invariant: a table is made of rows alone, so any run's rows give its page's lines.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.rows import Row
from gpu.fusion.plan import get_policy
from scheduler.fusion_labels import parse_fusions

RATIO = 0.15
"""At which the policy that is shipped is chosen."""


def render_fusion(run: Mapping[str, Any]) -> str:
    """A run, a table for each length."""
    lines = [f"`{run['command']}` on {run['machine']}, {run['date']}, {run['seconds'] / 60:.0f} minutes."]
    for length in sorted({row["length"] for row in run["rows"]}):
        own = [row for row in run["rows"] if row["length"] == length]
        lines += [
            "",
            f"### {length:,} tokens, {own[0]['prompts']} prompts{_chunks(own[0])}",
            "",
            *render_policies(own),
            *render_distances(own, RATIO),
        ]
    if least := least_diverging(run["rows"], RATIO):
        lines += [
            "",
            f"The least KL of the next token at r = {RATIO:g}: {_name_rows(least)}. Of those within its interval the "
            f"one that computes least: {_name_rows(shipped(run['rows'], RATIO))}.",
        ]
    return "\n".join(lines)


def render_policies(rows: Sequence[Row]) -> list[str]:
    """One length."""
    tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if task != "all"]
    columns = [
        "policy", "r", "KL of the next token", "less than `random`", "KL along the answer", "distance of maps", "score",
        *tasks,
    ]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        if row["task"] != "all":
            continue
        same = {one["task"]: one for one in rows if (one["policy"], one["ratio"]) == (row["policy"], row["ratio"])}
        spared = row.get("kl_spared")
        cells = [
            f"`{row['policy']}`",
            "" if row["ratio"] is None else f"{row['ratio']:g}",
            _with_error(row["kl"], row["kl_error"]),
            "" if spared is None else _with_error(spared, row["spared_error"]),
            _with_error(row["kl_along"], row["along_error"]),
            "" if mean_distance(row) is None else f"{mean_distance(row):.3f}",
            _score(row),
            *(_score(same[task]) if task in same else "" for task in tasks),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render_distances(rows: Sequence[Row], ratio: float) -> list[str]:
    """One length at this ratio: how far attention maps are from vanilla's after recovery, by layer (A3, figure 3)."""
    shown = [
        row
        for row in rows
        if row["task"] == "all" and row["ratio"] in (ratio, None) and any(row.get("distances") or ())
    ]
    if not shown:
        return []
    layers = range(1, len(shown[0]["distances"]))
    lines = ["", f"Distance of attention maps by layer, r = {ratio:g}; layer 0 is computed in full by all of them.", ""]
    lines += [f"| policy | {' | '.join(map(str, layers))} |", "|" + "---|" * (len(layers) + 1)]
    for row in shown:
        cells = [f"{row['distances'][layer]:.3f}" for layer in layers]
        lines.append(f"| `{row['policy']}` | {' | '.join(cells)} |")
    return lines


def least_diverging(rows: Sequence[Row], ratio: float) -> list[Row]:
    """Of rows of all tasks at this ratio, those with the least KL of the next token at each length."""
    found: dict[int, Row] = {}
    for row in rows:
        if row["task"] == "all" and row["ratio"] == ratio:
            found[row["length"]] = min(row, found.get(row["length"], row), key=lambda one: one["kl"])
    return list(found.values())


def shipped(rows: Sequence[Row], ratio: float) -> list[Row]:
    """At each length: of those whose KL is within the interval of the least one's, the one that computes least; the
    first of several. An interval of its own brings none nearer: it is widest where a policy fails most.
    """
    found = []
    for least in least_diverging(rows, ratio):
        most = least["kl"] + (least["kl_error"] or 0.0)
        near = [
            row for row in rows
            if (row["task"], row["length"], row["ratio"]) == ("all", least["length"], ratio) and row["kl"] <= most
        ]  # fmt: skip
        found.append(min(near, key=lambda row: full_layers(row["policy"])))
    return found


def full_layers(label: str) -> int:
    """That a policy computes in full."""
    (fusion,) = parse_fusions(label, [RATIO])
    return fusion.select_layer if get_policy(fusion.policy).looks else 0


def mean_distance(row: Row) -> float | None:
    """Of attention maps, over the layers behind the first, which none of them touches."""
    far = row.get("distances")
    return sum(far[1:]) / len(far[1:]) if far else None


def _name_rows(rows: Sequence[Row]) -> str:
    return ", ".join(f"`{row['policy']}` at {row['length']:,} tokens ({row['kl']:.4f})" for row in rows)


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _chunks(row: Row) -> str:
    count = row.get("chunks")
    return f" of {count:.1f} chunks" if count else ""


def _score(row: Row) -> str:
    """`97.5, -2.0 (-4.5 … +0.4)`: beside vanilla's on the same prompts."""
    if row["score"] is None:
        return ""
    gap = row.get("difference")
    apart = "" if gap is None else f", {gap:+.1f} ({row['difference_low']:+.1f} … {row['difference_high']:+.1f})"
    return f"{row['score']:.1f}{apart}"
