"""Write the report as one HTML file that loads nothing from elsewhere."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.load.console import list_facts, list_latencies
from bench.load.load_figures import Summary
from bench.load.plots import draw_cdfs, draw_requests, draw_timeline, draw_ttft_against_prompt
from bench.load.records import RequestRecord

_TEMPLATES = Path(__file__).parent.parent / "report"


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    summary: Summary,
    records: Sequence[RequestRecord],
    settings: dict[str, str],
    notes: list[str],
) -> None:
    """Write the page to `path`. settings: label to value, shown unchanged."""
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    timeline = draw_timeline(records, summary.wall_s)
    pictures = [
        ("Latencies of completed requests", "Share of requests (or gaps) at or below a value.", draw_cdfs(records)),
        ("Over time", "Chunks of output as they arrived, and requests open at once.", timeline),
        ("Requests", "One row a request in the order they were due; the first 250.", draw_requests(records)),
        ("First token against prompt length", "One dot a completed request.", draw_ttft_against_prompt(records)),
    ]
    html = environment.get_template("load.html.j2").render(
        title=title,
        subtitle=subtitle,
        when=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        headlines=_pick_headlines(summary),
        latencies=list_latencies(summary),
        facts=list_facts(summary),
        summary=summary,
        pictures=pictures,
        settings=settings,
        notes=notes,
    )
    path.write_text(html, encoding="utf-8")


def _pick_headlines(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the headline figures, each as label, value and a line beneath."""
    headlines = [
        ("completed", f"{summary.completed:,}", f"of {summary.due:,} requests; {summary.failed:,} failed"),
        ("output tokens / s", f"{summary.output_token_rate:,.1f}", f"{summary.request_rate:.2f} requests / s"),
        ("first token, p50", _say_ms(summary.ttft.p50), f"p99 {_say_ms(summary.ttft.p99)}"),
        ("per output token, p50", _say_ms(summary.tpot.p50), f"p99 {_say_ms(summary.tpot.p99)}"),
        ("end to end, p50", _say_ms(summary.e2el.p50), f"p99 {_say_ms(summary.e2el.p99)}"),
    ]
    if summary.goodput_share is not None:
        limits = ", ".join(f"{key} ≤ {_say_ms(limit)}" for key, limit in summary.slo.items())
        headlines.append(("within the limits", f"{summary.goodput_share:.1%}", limits))
    return headlines


def _say_ms(value: float) -> str:
    if value != value:
        return "-"
    return f"{value / 1e3:,.2f} s" if value >= 1000 else f"{value:,.1f} ms"
