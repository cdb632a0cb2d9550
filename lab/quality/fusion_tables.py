"""Write the tables of lab/RESULTS.md about policies that reuse documents."""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.fusion_report import render_policies
from evals.score_rows import Row
from gpu.fusion.fusion_plan import get_policy
from scheduler.fusion_labels import parse_fusions

RATIO = 0.15
"""At which the policy that is shipped is chosen."""


def render_fusion(run: Mapping[str, Any]) -> str:
    """Return a run, a table for each length."""
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


def _name_rows(rows: Sequence[Row]) -> str:
    return ", ".join(f"`{row['policy']}` at {row['length']:,} tokens ({row['kl']:.4f})" for row in rows)


def _chunks(row: Row) -> str:
    count = row.get("chunks")
    return f" of {count:.1f} chunks" if count else ""
