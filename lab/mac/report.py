"""What a run of MAC-Attention says: tables in Markdown, and one page with its figures.

Invariant: whatever is shown is in the document.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.aims import Aim, render_aim
from evals.report.figures import quality_figure
from evals.report.page import Figures, render_page
from evals.report.table import percent
from evals.score_rows import Row
from lab.mac.figures import errors_figure, layers_figure

LONG = "long_list"
MAC_AIM = Aim(("mac:", "profile:mac-"), (LONG,), 16_384, 0.1, ())
"""Answers of 256 tokens and more, with 90 % of the reads of a query head left out."""

FREE = "needles and facts by exact match, long lists by lines at their place, passages by words"


def render_aims(rows: Sequence[Row]) -> list[str]:
    """Return Markdown, of free answers; empty where none was measured."""
    return render_aim(rows, MAC_AIM)


def render_layers(layers: Sequence[Row]) -> list[str]:
    """Return Markdown: what profiles reused, a line a setting and length, all layers together, and their range."""
    lines = [
        "| length | over | K, r | tau | share | accepted | by layer | refused | skipped | by layer "
        "| whole groups | KV rows read | gap | age |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in layers:
        if row["layer"] is not None:
            continue
        own = [one for one in layers if (one["method"], one["length"]) == (row["method"], row["length"])]
        shown = [percent(row["acceptance"]), _range(own, "acceptance"), percent(row.get("refused")),
                 percent(row["skipped_fraction"]),
                 _range(own, "skipped_fraction"), percent(row["whole_groups"]), percent(row["kv_read"]),
                 _positions(row["gap"]), _positions(row["age"])]  # fmt: skip
        place = f"{row['length']:,} | {row['over']} | {row['capacity']}, {row['band']} | {row['tau']:g}"
        place += f" | {row.get('share', 1):g}"
        lines.append(f"| {place} | {' | '.join(shown)} |")
    return lines if len(lines) > 2 else []


def _range(rows: Sequence[Row], name: str) -> str:
    shares = [row[name] for row in rows if row["layer"] is not None and row[name] is not None]
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" if shares else "-"


def _positions(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def render_errors(errors: Sequence[Row]) -> list[str]:
    """Return Markdown: relative error of a head's output by band and gap, a mean over layers, weighted by hits."""
    lengths = sorted({row["length"] for row in errors})
    gaps, bands = sorted({row["gap_begin"] for row in errors}), sorted({row["band"] for row in errors})
    lines = []
    for length in lengths:
        lines += ["", f"Relative error of a head's output, {length:,} tokens, by the band (down) and the positions "
                  "back to the match:", "",
                  "| r | " + " | ".join(f"{gap} to {2 * gap - 1}" for gap in gaps) + " |",
                  "|---|" + "---|" * len(gaps)]  # fmt: skip
        for band in bands:
            own = [row for row in errors if (row["length"], row["band"]) == (length, band)]
            means = [_mean_error([row for row in own if row["gap_begin"] == gap]) for gap in gaps]
            lines.append(f"| {band} | {' | '.join(means)} |")
    return lines[1:]


def _mean_error(rows: Sequence[Row]) -> str:
    hits = sum(row["hits"] for row in rows)
    return f"{100 * sum(row['hits'] * row['error'] for row in rows) / hits:.2f} %" if hits else ""


def render_reused(run: Mapping[str, Any]) -> list[str]:
    """Return Markdown of what a run says beside its scores."""
    parts = (
        ("Within the aim", render_aims(run["rows"])),
        ("What layers reuse", render_layers(run["layers"])),
        ("What reuse errs", render_errors(run["errors"])),
    )
    return [line for title, lines in parts if lines for line in ("", f"### {title}", "", *lines)]


def make_page(run: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    """Return the page as HTML. Raises ValueError for a run without rows."""
    rows, layers = run["rows"], run["layers"]
    decoded = [row for row in rows if not row["method"].startswith("profile:")]
    served = [row for row in rows if row["method"].startswith("profile:")]
    lengths = sorted({row["length"] for row in layers})
    overs = list(dict.fromkeys(row["over"] for row in layers))
    figures: list[Figures] = [
        (
            "Quality against KV bytes read",
            "The union of what a KV head's query heads read, once, and of a ring its queries and summaries, over what "
            f"full attention reads. Free answers: {FREE}; token_accuracy and agreement: right answers are fed, and the "
            "next token is the right one, or full attention's. A line is a window (K:r), its points are thresholds.",
            [
                (says, quality_figure(found, "bytes_fraction", f"quality-{name}"))
                for says, name, found in (
                    ("in the reference decoder, beside other methods", "decoder", decoded),
                    ("served, by the engine's own counts", "served", served),
                )
                if found
            ],
        ),
        (
            "What layers reuse",
            "Served, by the engine's own counts (the paper's figure 5): query heads that found a match, and cells of "
            "their contexts that these took over, misses as zero.",
            [
                (f"over {over}, {length:,} tokens", drawn)
                for over in overs
                for length in lengths
                if (drawn := layers_figure(layers, length, over))
            ],
        ),
        (
            "What reuse errs",
            "Relative error of a head's output beside full attention's on the same query (the paper's figure 4): the "
            "band's cells in front of a match are read again. Chains of matches are in it; hatched: no match so far.",
            [
                (f"{length:,} tokens", drawn)
                for length in sorted({row["length"] for row in run["errors"]})
                if (drawn := errors_figure(run["errors"], length))
            ],
        ),
    ]
    kept = [one for one in figures if one[2]]
    return render_page("MAC-Attention", rows, [], [], configuration, {"prompts": run["seed"]}, figures=kept)
