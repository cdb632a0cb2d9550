"""The paper's figures of MAC-Attention from a run's rows, as SVG: what layers reuse (5), and what reuse errs (4).

The invariant: what has no hit is blank, never zero.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from evals.report.figures import GRID, HATCH, INK, STYLE, to_svg
from evals.score_rows import Row

SWEPT_TAU = 0.75
"""Of the lower row of figure 5, as in the paper; the nearest that there is."""

NUM_LAYERS_DRAWN = 6
SHARES = (("acceptance", "heads that found a match"), ("skipped_fraction", "of the context, skipped"))
LINES = mpl.colormaps["viridis"]
ERRORS = mpl.colormaps["magma_r"]


def layers_figure(layers: Sequence[Row], length: int, over: str) -> str | None:
    """Figure 5: acceptance (left) and skipped share (right) by layer; thresholds at the largest window above, windows
    at one threshold below. layers: of `lab.mac.run.pool_layers`. None where none is of this length and placement.
    """
    own = [row for row in layers if (row["length"], row["over"]) == (length, over) and row["layer"] is not None]
    if not own:
        return None
    capacity = max(row["capacity"] for row in own)
    tau = min({row["tau"] for row in own}, key=lambda one: (abs(one - SWEPT_TAU), one))
    sweeps = (
        ([row for row in own if row["capacity"] == capacity], "tau", f"K = {capacity}"),
        ([row for row in own if row["tau"] == tau], "capacity", f"tau = {tau:g}"),
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axes = figure.subplots(len(sweeps), len(SHARES), squeeze=False, sharex=True)
        for panels, (rows, swept, fixed) in zip(axes, sweeps, strict=True):
            for panel, (name, says) in zip(panels, SHARES, strict=True):
                _draw_sweep(panel, rows, swept, name)
                panel.set_title(f"{says}, {fixed}")
            panels[-1].legend(title=swept if swept == "tau" else "K, r", loc="center left", bbox_to_anchor=(1.01, 0.5))
        for panel in axes[-1]:
            panel.set_xlabel("layer")
        return to_svg(figure, f"reuse-{over}-{length}")


def _draw_sweep(panel: Any, rows: Sequence[Row], swept: str, name: str) -> None:
    values = sorted({row[swept] for row in rows})
    for place, value in enumerate(values):
        line = sorted((row for row in rows if row[swept] == value), key=lambda row: row["layer"])
        shares = [np.nan if row[name] is None else row[name] for row in line]
        label = f"{value:g}" if swept == "tau" else f"{value}, {line[0]['band']}"
        color = LINES(0.9 * place / max(1, len(values) - 1))
        panel.plot([row["layer"] for row in line], shares, color=color, marker="o", markersize=3, label=label)
    panel.set_ylim(-0.02, 1.02)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    panel.grid(axis="y", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)


def errors_figure(errors: Sequence[Row], length: int) -> str | None:
    """Figure 4: relative error of a head's output by how far back the match lies and by the band, a map a layer.

    errors: of `lab.mac.reuse_errors.measure_errors`. None where none is of this length.
    """
    own = [row for row in errors if row["length"] == length]
    if not own:
        return None
    every = sorted({row["layer"] for row in own})
    drawn = _spread(every, NUM_LAYERS_DRAWN)
    bands, gaps = sorted({row["band"] for row in own}), sorted({row["gap_begin"] for row in own})
    above = [row["error"] for row in own if row["error"] > 0]
    norm = LogNorm(min(above), max(above)) if above and min(above) < max(above) else None
    with mpl.rc_context(STYLE):
        columns = min(3, len(drawn))
        num_rows = -(-len(drawn) // columns)
        figure = Figure(figsize=(3.2 * columns + 0.8, 2.3 * num_rows), layout="constrained")
        axes = figure.subplots(num_rows, columns, squeeze=False)
        for panel in axes.flat[len(drawn) :]:
            panel.set_visible(False)
        for panel, layer in zip(axes.flat, drawn, strict=False):
            cells = np.full((len(bands), len(gaps)), np.nan)
            for row in own:
                if row["layer"] == layer:
                    cells[bands.index(row["band"]), gaps.index(row["gap_begin"])] = row["error"]
            edges = np.arange(len(gaps) + 1) - 0.5, np.arange(len(bands) + 1) - 0.5
            image = panel.pcolormesh(*edges, np.ma.masked_invalid(cells), cmap=ERRORS, norm=norm)
            panel.set_title(f"layer {layer}")
            panel.set_xticks(range(len(gaps)), [str(gap) for gap in gaps], fontsize=6.5)
            panel.set_yticks(range(len(bands)), [str(band) for band in bands])
            panel.patch.set(facecolor="white", edgecolor=HATCH, hatch="////", linewidth=0)
            panel.tick_params(length=0)
        for panel in axes[:, 0]:
            panel.set_ylabel("band r", color=INK)
        for panel in axes[-1]:
            panel.set_xlabel("positions back to the match, from")
        bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=24, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:g} %"))
        bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda error, _: ""))
        return to_svg(figure, f"reuse-errors-{length}")


def _spread(layers: Iterable[int], most: int) -> list[int]:
    """So many of them, the first and the last among them."""
    every = list(layers)
    if len(every) <= most:
        return every
    return [every[round(place * (len(every) - 1) / (most - 1))] for place in range(most)]
