"""One self-contained HTML page of a run: headline, figures, table, configuration. Nothing is loaded from elsewhere.

It knows rows and records as `evals.rows` and the runner make them. The invariant: the page has no script and no
external reference, and says what it was made from.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evals.paired import ADVISED_PROMPTS
from evals.report.document import finite
from evals.report.figures import depth_figure, layer_figure, quality_figure
from evals.report.table import percent, points_lost, row_order, with_range

TEMPLATE = "page.html.j2"


def render_page(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    configuration: Mapping[str, Any],
    seeds: Mapping[str, int],
) -> str:
    """The page as HTML.

    rows: of `evals.rows.summarize`. records: samples, for the heat maps; may be empty. layers: `method, layer, error`;
    may be empty. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("report: no rows; run at least one task")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(percent=percent, points=points_text)
    ordered = sorted((dict(row) for row in rows), key=row_order)
    tasks = sorted({row["task"] for row in rows})
    fewest = min(row["samples"] for row in rows)
    return environment.get_template(TEMPLATE).render(
        title=title,
        rows=[shown_row(row, before) for row, before in zip(ordered, [None, *ordered], strict=False)],
        num_methods=len({row["method"] for row in rows}),
        tasks=tasks,
        lengths=[f"{length:,}" for length in sorted({row["length"] for row in rows})],
        num_samples=sum(row["samples"] for row in rows),
        num_failures=sum(row["failures"] for row in rows),
        fewest=fewest,
        advised=ADVISED_PROMPTS,
        quality=[
            ("keys scored a query head", quality_figure(rows, "head_fraction")),
            ("bytes", quality_figure(rows, "bytes_fraction")),
        ]
        if any(row.get("head_fraction") for row in rows)
        else [],
        depths=[(task, svg) for task in tasks if (svg := depth_figure(records, task))],
        layers=layer_figure(layers),
        configuration=json.dumps(finite(configuration), indent=2, ensure_ascii=False),
        seeds=", ".join(f"{name} {seed}" for name, seed in seeds.items()),
    )


def points_text(row: Mapping[str, Any]) -> str:
    """What the row is within of full attention, such as `within 2.4`."""
    lost = points_lost(row)
    return "" if lost is None else f"within {lost:.1f}"


def shown_row(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its texts, and whether it opens a new group of task and length."""
    opens = before is None or (before["task"], before["length"]) != (row["task"], row["length"])
    high = row.get("difference_high")
    return row | {
        "opens": opens,
        "score_text": with_range(row["score"], row.get("low"), row.get("high"), ""),
        "difference_text": with_range(row.get("difference"), row.get("difference_low"), high, "+"),
        "worse": high is not None and high < 0,
        "full": row["method"] == "full",
    }
