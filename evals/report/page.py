"""Render one HTML page of a run: headline, figures, table, configuration. Nothing is loaded from elsewhere.

The invariant: the page has no script and no external reference, and shows the configuration that it was made from.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evals.paired import ADVISED_PROMPTS
from evals.report.document import finite
from evals.report.figures import depth_figure, layer_figure, quality_figure
from evals.report.table import NOT_APPLIED, most_lost, percent, row_order, with_range
from evals.score_rows import BASELINES, column_of

TEMPLATE = "page.html.j2"

Figures = tuple[str, str, Sequence[tuple[str, str]]]
"""A heading, an explanation, and figures, each a caption and its SVG."""

PARTS = ("rows", "depths", "layers", "fidelity")


def render_page(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    configuration: Mapping[str, Any],
    seeds: Mapping[str, int],
    fidelity: Sequence[Mapping[str, Any]] = (),
    figures: Sequence[Figures] | None = None,
) -> str:
    """Return the page as HTML.

    rows: of `evals.score_rows.summarize`. records: samples or their means by depth (score 0 to 1), for the heat maps.
    layers: `length, method, layer, error`. fidelity: rows of methods beside full attention. figures: replace those of
    quality against reads. All but one may be empty. Raises ValueError if both rows and fidelity are empty.
    """
    if not rows and not fidelity:
        raise ValueError("report: no rows; run at least one task")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(percent=percent, points=points_text, number=number_text)
    ordered = sorted((dict(row) for row in rows), key=row_order)
    tasks = sorted({row["task"] for row in rows})
    fewest = min((row["samples"] for row in rows), default=ADVISED_PROMPTS)
    places = sorted({(row.get("length", 0), row.get("text", "")) for row in layers})
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
        if figures is None and any(row.get("head_fraction") for row in rows)
        else [],
        figures=figures or [],
        depths=[(task, svg) for task in tasks if (svg := depth_figure(records, task))],
        layers=[
            (", ".join([*([f"{length:,} tokens"] if length else []), *([text] if text else [])]), svg)
            for number, (length, text) in enumerate(places)
            if (
                svg := layer_figure(
                    [row for row in layers if (row.get("length", 0), row.get("text", "")) == (length, text)],
                    f"layers-{number}",
                )
            )
        ],
        fidelity=[{"text": "", **row} for row in fidelity],
        configuration=json.dumps(finite(configuration), indent=2, ensure_ascii=False),
        seeds=", ".join(f"{name} {seed}" for name, seed in seeds.items()),
    )


def page_of_documents(title: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """Render one page from the JSON of several runs: of tasks, of fidelity, or of published datasets."""
    parts = {name: [row for document in documents for row in document.get(name, [])] for name in PARTS}
    tables: dict[bool, list[Any]] = {True: [], False: parts["fidelity"]}
    for row in parts["rows"]:
        tables["task" in row].append(row)
    seeds = {name: seed for document in documents for name, seed in seeds_of(document).items()}
    told = [{name: value for name, value in document.items() if name not in PARTS} for document in documents]
    depths = [{**row, "score": row["score"] / 100} for row in parts["depths"]]
    configuration = told[0] if len(told) == 1 else {f"run {place}": one for place, one in enumerate(told, start=1)}
    return render_page(title, tables[True], depths, parts["layers"], configuration, seeds, tables[False])


def seeds_of(document: Mapping[str, Any]) -> dict[str, int]:
    """Return the seeds of a run's JSON."""
    return dict(document["seeds"]) if "seeds" in document else {"prompts": document["seed"]}


def points_text(row: Mapping[str, Any]) -> str:
    """Return how many points the row loses at most, such as `loses 2.4 at most`; empty if not known."""
    lost = most_lost(row)
    return "" if lost is None else f"loses {lost:.1f} at most"


def shown_row(row: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row with its formatted texts, and `opens`: whether it begins a new group of task and length."""
    place = column_of(row), row["length"]
    opens = before is None or (column_of(before), before["length"]) != place
    high = row.get("difference_high")
    return row | {
        "opens": opens,
        "task": place[0],
        "score_text": with_range(row["score"], row.get("low"), row.get("high"), ""),
        "difference_text": NOT_APPLIED
        if row.get("applied") is False
        else with_range(row.get("difference"), row.get("difference_low"), high, "+"),
        "worse": high is not None and high < 0,
        "full": row["method"] in BASELINES,
    }


def number_text(value: float | None, digits: int) -> str:
    """Return the number, or `-` where it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"
