"""Draw the figures of a report as inline SVG: quality against reads, needle depth against length, error a layer.

The invariant: a method has the same colour and marker in every figure, and a cell without samples is blank, never zero.
"""

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from evals.score_rows import BASELINES, column_of

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7b61c4", "#b8860b", "#56b4e9", "#8c564b", "#4d4d4d", "#e0488b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
INK, MUTED, GRID, HATCH = "#1c1e21", "#6b7178", "#e4e6e9", "#c9ccd1"
SCORE_COLORS = LinearSegmentedColormap.from_list("score", ["#fbe9d9", "#f2b880", "#6aa7c8", "#1f5f8b", "#0b2f4a"])
NUM_DEPTH_BINS = 10
PANEL_WIDTH, PANEL_HEIGHT = 3.1, 2.25
HEAT_COLUMNS, HEAT_WIDTH, HEAT_HEIGHT = 7, 1.3, 1.55
STYLE = {
    "font.size": 8.5, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "text.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "hatch.linewidth": 0.6,
}  # fmt: skip

Row = Mapping[str, Any]


def family(method: str) -> str:
    """Return the method's name without its settings; a serving profile is a family of its own."""
    return method if method.startswith("profile:") else method.split(":")[0]


def family_of(row: Row) -> str:
    """Return the family that a row names, or else its method's."""
    return row.get("family") or family(row["method"])


def styles_of(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Return (colour, marker) of each method family except full attention, in the order of the families' names."""
    families = sorted({family_of(row) for row in rows} - set(BASELINES))
    return {
        name: (COLORS[place % len(COLORS)], MARKERS[(place + place // len(COLORS)) % len(MARKERS)])
        for place, name in enumerate(families)
    }


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element, with the same bytes for the same data.

    Ids get the figure's name as a prefix, so that several figures fit one page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def new_figure(num_rows: int, num_columns: int, legend_inches: float) -> tuple[Figure, np.ndarray]:
    """Return a grid of panels with room for a legend above; axes [rows, columns]."""
    height = num_rows * PANEL_HEIGHT + legend_inches
    figure = Figure(figsize=(max(num_columns * PANEL_WIDTH, 5.2), height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - legend_inches / height))  # type: ignore[union-attr]
    return figure, axes


def quality_figure(rows: Sequence[Row], read: str, name: str | None = None) -> str:
    """Plot score against what was read, tasks down and lengths across.

    read: `head_fraction` or `bytes_fraction`, the (log) axis; rows without it are left out. Full attention is the
    dashed line with its 95 % band. name: of the figure, if a page has several of one kind.
    """
    known = [row for row in rows if row.get(read) and family_of(row) not in BASELINES]
    tasks, lengths = sorted({column_of(row) for row in rows}), sorted({row["length"] for row in rows})
    styles = styles_of(rows)
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(len(tasks), len(lengths), legend_inches(len(styles) + 1, len(lengths)))
        for (down, task), (across, length) in (
            (one, other) for one in enumerate(tasks) for other in enumerate(lengths)
        ):
            panel = axes[down, across]
            here = [row for row in known if column_of(row) == task and row["length"] == length]
            exact = [r for r in rows if column_of(r) == task and r["length"] == length and r["method"] in BASELINES]
            quality_panel(panel, here, exact, styles, read)
            panel.set_title(f"{task} · {length:,}")
            panel.set_xlabel("share read" if down == len(tasks) - 1 else "")
            panel.set_ylabel("score" if across == 0 else "")
        draw_legend(figure, styles, len(lengths))
        return to_svg(figure, name or f"quality-{read.split('_')[0]}")


def legend_inches(num_entries: int, num_columns: int) -> float:
    """Return the height of the legend in inches."""
    return 0.12 + 0.19 * -(-num_entries // legend_columns(num_columns))


def legend_columns(num_columns: int) -> int:
    """Return the number of entries in a line of the legend."""
    return max(4, 3 * num_columns)


def draw_legend(figure: Figure, styles: Mapping[str, tuple[str, str]], num_columns: int) -> None:
    """Draw the methods' colours and markers, and full attention's line, above the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1, label="full attention")]
    handles += [
        Line2D([], [], color=color, marker=marker, markersize=4.5, linewidth=1.2, label=name)
        for name, (color, marker) in styles.items()
    ]
    figure.legend(handles=handles, loc="upper left", ncols=legend_columns(num_columns), borderaxespad=0.2)


def quality_panel(
    panel: Any, here: Sequence[Row], exact: Sequence[Row], styles: Mapping[str, tuple[str, str]], read: str
) -> None:
    """Draw one panel: a line a method family over its settings, in the order of what they read."""
    if exact:
        if exact[0].get("low") is not None:
            panel.axhspan(exact[0]["low"], exact[0]["high"], color=GRID, linewidth=0, zorder=0)
        panel.axhline(exact[0]["score"], color=INK, linestyle=(0, (4, 2)), linewidth=1)
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in here:
        lines[family_of(row)].append((row[read], row["score"]))
    for name, points in lines.items():
        color, marker = styles[name]
        xs, ys = zip(*sorted(points), strict=True)
        panel.plot(xs, ys, color=color, marker=marker, markersize=4.5, linewidth=1.2, clip_on=False, alpha=0.9)
    panel.set_xscale("log")
    panel.set_ylim(-2, 102)
    panel.set_yticks([0, 25, 50, 75, 100])
    panel.grid(axis="y", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def depth_figure(records: Sequence[Row], task: str) -> str | None:
    """Draw heat maps of a task, one for each method: needle depth (down), length (across), the mean score as colour.

    records: samples with `method, task, length, depth, score` (0 to 1). Returns None if no sample has a depth.
    """
    placed = [record for record in records if record["task"] == task and record.get("depth") is not None]
    if not placed:
        return None
    methods = sorted({record["method"] for record in placed}, key=lambda method: (method not in BASELINES, method))
    lengths = sorted({record["length"] for record in placed})
    columns = min(HEAT_COLUMNS, len(methods))
    with mpl.rc_context(STYLE):
        num_rows = -(-len(methods) // columns)
        figure = Figure(figsize=(columns * HEAT_WIDTH + 0.9, num_rows * HEAT_HEIGHT + 0.1), layout="constrained")
        axes = figure.subplots(num_rows, columns, squeeze=False)
        for place, panel in enumerate(axes.flat):
            if place >= len(methods):
                panel.set_visible(False)
                continue
            means = depth_means([record for record in placed if record["method"] == methods[place]], lengths)
            edges = np.arange(len(lengths) + 1) - 0.5, np.arange(NUM_DEPTH_BINS + 1) - 0.5
            cells = np.ma.masked_invalid(means)
            image = panel.pcolormesh(
                *edges, cells, cmap=SCORE_COLORS, vmin=0, vmax=100, edgecolor="white", linewidth=0.4
            )
            panel.invert_yaxis()
            panel.set_title(wrapped(methods[place]), fontsize=6.8, fontweight="normal")
            panel.set_xticks(range(len(lengths)), [short_length(length) for length in lengths])
            first = place % columns == 0
            ticks = [-0.5, NUM_DEPTH_BINS / 2 - 0.5, NUM_DEPTH_BINS - 0.5]
            panel.set_yticks(ticks, ["start", "middle", "end"] if first else [""] * 3)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            panel.patch.set(facecolor="white", edgecolor=HATCH, hatch="////", linewidth=0)
        bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 1.3 / num_rows), aspect=14, pad=0.02, anchor=(0.0, 1.0))
        bar.outline.set_visible(False)
        bar.set_ticks([0, 50, 100])
        return to_svg(figure, f"depth-{re.sub('[^a-z0-9]', '-', task.lower())}")


def depth_means(records: Sequence[Row], lengths: Sequence[int]) -> np.ndarray:
    """Return the mean scores in points, float64 `[depth bins, lengths]`; NaN where there is no sample."""
    sums, counts = np.zeros((2, NUM_DEPTH_BINS, len(lengths)))
    for record in records:
        cell = min(int(record["depth"] * NUM_DEPTH_BINS), NUM_DEPTH_BINS - 1), lengths.index(record["length"])
        sums[cell] += 100 * record["score"]
        counts[cell] += 1
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def short_length(length: int) -> str:
    """Return `16K` for 16384."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"


def wrapped(method: str) -> str:
    """Return a method's text with its settings on lines of their own."""
    name, _, settings = method.partition(":")
    return name + "".join(f"\n{part}" for part in settings.split(",") if part)


def layer_figure(layers: Sequence[Row], name: str) -> str | None:
    """Draw the relative error of attention outputs by layer (log axis), a line for each method; None without rows.

    layers: `method, layer, error`; errors above 0.
    """
    known = [row for row in layers if row["error"] and np.isfinite(row["error"])]
    if not known:
        return None
    methods = sorted({row["method"] for row in known})
    styles = styles_of(known)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 3.4), layout="constrained")
        panel = figure.subplots()
        for method in methods:
            points = sorted((row["layer"], row["error"]) for row in known if row["method"] == method)
            color, marker = styles.get(family(method), (INK, "o"))
            place = [other for other in methods if family(other) == family(method)].index(method)
            style = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))[place % 4]
            panel.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, linewidth=1.2,
                       linestyle=style, label=method)  # fmt: skip
        panel.set_yscale("log")
        panel.grid(axis="y", color=GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.set_xticks(sorted({row["layer"] for row in known}))
        panel.set_xlabel("layer")
        panel.set_ylabel("relative error of attention output")
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
        return to_svg(figure, name)
