"""Draw the pictures of the report, each as one SVG element.

Times on axes are seconds on the run's clock.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.load.records import RequestRecord

INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"
WAIT, PREFILL, DECODE, FAILED = "#cbd5e1", "#f59e0b", "#2563eb", "#dc2626"
_SERIES = ("#2563eb", "#7c3aed", "#0d9488", "#ea580c")
_GANTT_ROWS = 250
_CACHED = LinearSegmentedColormap.from_list("cached", [DECODE, "#a855f7", PREFILL])
_NO_IDS = {"Date": None, "Creator": None, "Format": None, "Type": None}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tandem",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
}


def draw_cdfs(records: Sequence[RequestRecord]) -> str:
    """Draw cumulative shares of TTFT, TPOT, inter-token and end-to-end latency, with p50, p90 and p99 marked."""
    done = [record for record in records if record.outcome == "completed"]
    panels = (
        ("time to first token", [record.ttft_s for record in done]),
        ("time per output token", [record.tpot_s for record in done if record.tpot_s is not None]),
        ("inter-token latency", [gap for record in done for gap in record.gaps_s]),
        ("end to end", [record.e2el_s for record in done]),
    )
    with _figure(11, 2.9) as figure:
        for place, (title, values_s) in enumerate(panels):
            axes = figure.add_subplot(1, 4, place + 1)
            _draw_cdf(axes, np.sort(values_s), _SERIES[place])
            axes.set_title(title)
            axes.set_yticks([0, 0.5, 0.9, 1], ["0", "50 %", "90 %", "100 %"] if place == 0 else [""] * 4)
        return _to_svg(figure)


def draw_timeline(records: Sequence[RequestRecord], wall_s: float) -> str:
    """Draw output chunks per second, requests open, and requests due and failed, over the run."""
    buckets = np.linspace(0, max(wall_s, 1e-3), 81)
    width_s = buckets[1] - buckets[0]
    chunks = np.concatenate([np.zeros(0), *(np.asarray(record.chunk_times_s) for record in records)])
    rate = np.histogram(chunks, buckets)[0] / width_s
    rate = np.append(rate, rate[-1])
    fine = np.linspace(0, max(wall_s, 1e-3), 400)
    sent = np.sort([record.sent_s for record in records if record.outcome != "skipped"])
    ended = np.sort([record.end_s for record in records if record.outcome != "skipped"])
    open_now = np.searchsorted(sent, fine, side="right") - np.searchsorted(ended, fine, side="right")
    failed = [record.end_s for record in records if record.outcome == "failed"]
    with _figure(11, 3.6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        upper.fill_between(buckets, rate, step="post", color=DECODE, alpha=0.18, linewidth=0)
        upper.step(buckets, rate, where="post", color=DECODE, linewidth=1.5)
        upper.set_title("output chunks per second")
        lower.fill_between(fine, open_now, color="#7c3aed", alpha=0.18, linewidth=0)
        lower.plot(fine, open_now, color="#7c3aed", linewidth=1.5)
        lower.set_title("requests open")
        lower.plot(failed, np.zeros(len(failed)), "x", color=FAILED, clip_on=False, zorder=5, label="failed")
        if failed:
            lower.legend(loc="upper right")
        lower.set_xlabel("seconds")
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, wall_s)
        return _to_svg(figure)


def draw_requests(records: Sequence[RequestRecord]) -> str:
    """Draw a row for each of the first 250 requests: waiting in the client, until the first token, streaming."""
    shown = sorted((record for record in records if record.outcome != "skipped"), key=lambda record: record.due_s)
    shown = shown[:_GANTT_ROWS]
    rows = np.arange(len(shown))
    due = np.asarray([record.due_s for record in shown])
    sent = np.asarray([record.sent_s for record in shown])
    end = np.asarray([record.end_s for record in shown])
    first = np.asarray([record.chunk_times_s[0] if record.chunk_times_s else record.end_s for record in shown])
    lost = np.asarray([record.outcome != "completed" for record in shown], dtype=bool)
    with _figure(11, min(5.0, 1.6 + 0.03 * len(shown))) as figure:
        axes = figure.add_subplot()
        width = max(0.8, min(6.0, 200 / max(len(shown), 1)))
        for begin, stop, colour, label in (
            (due, sent, WAIT, "not yet sent"),
            (sent, first, PREFILL, "until the first token"),
            (first, end, DECODE, "streaming"),
        ):
            axes.hlines(rows, begin, stop, color=colour, linewidth=width, label=label)
        axes.plot(end[lost], rows[lost], "x", color=FAILED, markersize=5, label="failed or unfinished")
        handles, labels = axes.get_legend_handles_labels()
        count = 4 if lost.any() else 3
        place: Any = {"ncols": 4, "loc": "lower left", "bbox_to_anchor": (0, 1.0)}
        legend = axes.legend(handles[:count], labels[:count], **place)
        for line in legend.get_lines()[:3]:
            line.set_linewidth(6)
        axes.set_ylim(len(shown) + 1, -2)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")
        axes.set_xlim(left=0)
        return _to_svg(figure)


def draw_ttft_against_prompt(records: Sequence[RequestRecord]) -> str:
    """Draw time to first token against prompt tokens; the colour is the share of the prompt that was cached."""
    done = [record for record in records if record.outcome == "completed"]
    lengths = np.asarray([record.prompt_tokens or record.asked_tokens or 0 for record in done])
    ttft = np.asarray([record.ttft_s for record in done])
    cached = np.asarray([(record.cached_tokens or 0) / max(record.prompt_tokens or 1, 1) for record in done])
    with _figure(11, 3.4) as figure:
        axes = figure.add_subplot()
        unit, scale = _pick_unit(ttft)
        colours: Any = {"cmap": _CACHED, "vmin": 0, "vmax": 1}
        dots = axes.scatter(lengths, ttft * scale, c=cached, s=22, alpha=0.8, linewidths=0, **colours)
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel(f"time to first token ({unit})")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.03)
        if cached.any():
            _add_scale(figure, axes, dots.cmap)
        return _to_svg(figure)


def _add_scale(figure: Figure, axes: Axes, colours: Colormap) -> None:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    dots = [Line2D([], [], marker="o", linestyle="", color=colours(share), label=f"{share:.0%}") for share in shares]
    axes.legend(handles=dots, title="from the cache", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_cdf(axes: Axes, values_s: np.ndarray, colour: str) -> None:
    unit, scale = _pick_unit(values_s)
    axes.set_xlabel(unit)
    axes.set_ylim(0, 1.02)
    if not len(values_s):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=FAINT)
        return
    if len(values_s) > 1000:
        values_s = np.quantile(values_s, np.linspace(0, 1, 1001))
    shares = np.arange(1, len(values_s) + 1) / len(values_s)
    values = values_s * scale
    axes.fill_between(values, shares, step="post", color=colour, alpha=0.12, linewidth=0)
    axes.step(values, shares, where="post", color=colour, linewidth=1.8)
    marks = [0.5, 0.9, 0.99]
    axes.plot(np.quantile(values, marks), marks, "o", color=colour, markersize=4)
    texts = [f"{name} {np.quantile(values, share):,.4g}" for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]
    axes.text(0.97, 0.06, "\n".join(texts), transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color=INK)


def _pick_unit(values_s: np.ndarray) -> tuple[str, float]:
    return ("seconds", 1.0) if len(values_s) and np.max(values_s) >= 10 else ("ms", 1e3)


@contextmanager
def _figure(width_in: float, height_in: float) -> Iterator[Figure]:
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


def _to_svg(figure: Figure) -> str:
    """Return the <svg> element alone, without namespaces (HTML needs none), and without a fixed size."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_IDS)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?)\s{size}="[^"]*"', r"\1", svg, count=1)
    return svg
