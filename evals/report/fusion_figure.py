"""Draw the figure of `tandem eval fusion`: KL along the answer against the share of tokens that is computed again.

Each length has a panel, each policy with its settings a line. A policy without a ratio is a level line.
"""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from evals.report.figures import COLORS, GRID, INK, MARKERS, STYLE, new_figure, to_svg
from evals.score_rows import Row

AIM = 0.05
"""KL in nats that a default must stay below."""


def draw_fusion(rows: Sequence[Row]) -> str:
    """Draw the rows over all tasks, and return an `<svg>` element."""
    known = [row for row in rows if row["task"] == "all" and row["policy"] != "vanilla" and row["kl_along"]]
    lengths, labels = sorted({row["length"] for row in known}), list(dict.fromkeys(line_of(row) for row in known))
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(1, max(1, len(lengths)), 0.2 + 0.2 * -(-len(labels) // 2))
        for panel, length in zip(axes[0], lengths, strict=False):
            own = [row for row in known if row["length"] == length]
            for place, label in enumerate(labels):
                color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
                points = sorted((row["ratio"], row["kl_along"]) for row in own
                                if line_of(row) == label and row["ratio"] is not None)  # fmt: skip
                for row in own:
                    if line_of(row) == label and row["ratio"] is None:
                        panel.axhline(row["kl_along"], color=color, linewidth=1.2)
                if points:
                    panel.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4.5, linewidth=1.2)
            panel.axhline(AIM, color=INK, linestyle=(0, (4, 2)), linewidth=1)
            chunks = own[0].get("chunks")
            panel.set_title(f"{length:,} tokens" + (f", {chunks:.1f} chunks" if chunks else ""))
            panel.set_yscale("log")
            panel.grid(axis="y", color=GRID, linewidth=0.6)
            panel.set_xlabel("share computed again")
        axes[0, 0].set_ylabel("KL along the answer (nats)")
        draw_labels(figure, labels)
        return to_svg(figure, "fusion")


def line_of(row: Row) -> str:
    """Return the policy's label with its settings, without the ratio, which is the other axis."""
    name, _, settings = row["policy"].partition(":")
    others = [part for part in settings.split(",") if part and not part.startswith("ratio=")]
    return f"{name}:{','.join(others)}" if others else str(name)


def draw_labels(figure: Figure, labels: Sequence[str]) -> None:
    """Draw the legend above the panels: the lines' colours and markers, and the line of AIM."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1, label=f"{AIM:g} nats")]
    handles += [
        Line2D([], [], color=COLORS[place % len(COLORS)], marker=MARKERS[place % len(MARKERS)], markersize=4.5,
               linewidth=1.2, label=label)
        for place, label in enumerate(labels)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="upper left", ncols=2, borderaxespad=0.2)
