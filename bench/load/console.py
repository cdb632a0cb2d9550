"""Show a load test on a terminal: a live line while it runs, and tables at its end."""

import asyncio

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.load.load_figures import Spread, Summary
from bench.load.send_load import LoadRun

_REFRESH_S = 0.25
MOST_REASONS = 8  # of failures, on the terminal: some reasons have a number that is different each time
LATENCIES = (
    ("ttft", "time to first token"),
    ("later_ttft", "... of later turns"),
    ("tpot", "time per output token"),
    ("itl", "inter-token latency"),
    ("e2el", "end to end"),
)


async def show_progress(run: LoadRun, console: Console) -> None:
    """Redraw a live line until cancelled. If the output is not a terminal, print a line every ten seconds."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(10)
            console.print(_draw_progress(run))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_draw_progress(run), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def _draw_progress(run: LoadRun) -> Text:
    now_s = run.client.now()
    finished = [record for record in list(run.records) if record.end_s]
    num_failed = sum(record.outcome == "failed" for record in finished)
    chunks = sum(len(record.chunk_times_s) for record in run.records)
    share = now_s / run.plan.duration_s if run.plan.duration_s else len(finished) / max(run.num_expected or 1, 1)
    width = 24
    filled = round(width * min(share, 1.0))
    text = Text.assemble(("━" * filled, "green"), ("━" * (width - filled), "bright_black"))
    text.append(f" {now_s:6.1f} s  {len(finished) - num_failed} done", "bold")
    text.append(f"  {num_failed} failed", "red" if num_failed else "bright_black")
    text.append(f"  {run.num_open} open  {chunks / max(now_s, 1e-9):,.0f} chunks/s")
    recent = sorted(record.ttft_s for record in finished[-100:] if record.outcome == "completed")
    if recent:
        text.append(f"  TTFT p50 {recent[len(recent) // 2] * 1e3:,.0f} ms")
    return text


def print_summary(summary: Summary, notes: list[str], console: Console) -> None:
    """Print the tables, and the notes that a reader needs."""
    table = Table(title=f"{summary.completed} of {summary.due} requests completed", title_justify="left")
    for heading in ("ms", "mean", "p50", "p90", "p99", "max", "of"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for label, spread in list_latencies(summary):
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(label, *("-" if value != value else f"{value:,.1f}" for value in values), f"{spread.num:,}")
    console.print(table)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in list_facts(summary):
        facts.add_row(label, value)
    console.print(facts)
    for reason, count in list(summary.reasons.items())[:MOST_REASONS]:
        console.print(f"[red]{count} ×[/red] ", Text(reason), sep="")
    others = list(summary.reasons.values())[MOST_REASONS:]
    if others:
        console.print(f"[red]{sum(others)} ×[/red] {len(others)} other reasons, in the JSON")
    for note in notes:
        console.print("note: ", Text(note), sep="", style="yellow")


def list_latencies(summary: Summary) -> list[tuple[str, Spread]]:
    """Return latencies as label and spread; later turns only if there were any."""
    found = [(label, getattr(summary, key)) for key, label in LATENCIES]
    return [(label, spread) for label, spread in found if spread.num or spread is not summary.later_ttft]


def list_facts(summary: Summary) -> list[tuple[str, str]]:
    """Return the counts and rates as label and text, for the terminal and the page."""
    asked = f" (asked {summary.asked_rate:.2f}, offered {summary.offered_rate:.2f})" if summary.asked_rate else ""
    cached = "not told" if summary.cached_share is None else f"{summary.cached_share:.1%}"
    facts = [
        ("requests per second", f"{summary.request_rate:.2f}{asked}"),
        ("output tokens per second", f"{summary.output_token_rate:,.1f}"),
        ("total tokens per second", f"{summary.total_token_rate:,.1f}"),
        ("tokens", f"{summary.prompt_tokens:,} in, {summary.output_tokens:,} out"),
        ("prompt tokens from the cache", cached),
        ("failed / unfinished / skipped", f"{summary.failed} / {summary.unfinished} / {summary.skipped}"),
        ("answers of 429 / sent again", f"{summary.http_429} / {summary.retries}"),
        ("peak concurrency", str(summary.peak_concurrency)),
        ("measured for", f"{summary.wall_s:.1f} s"),
        ("sent late by (p50, max)", f"{summary.send_lag.p50:.1f} ms, {summary.send_lag.max:.1f} ms"),
    ]
    if summary.reused_share is not None:
        reused = f"{summary.reused_share:.1%}, and {summary.recomputed_share or 0:.1%} computed again"
        facts.insert(5, ("prompt tokens from documents' store", reused))
    if summary.accepted_tokens or summary.rejected_tokens:
        proposed = summary.accepted_tokens + summary.rejected_tokens
        facts.insert(5, ("drafted tokens, and those drawn", f"{proposed:,}, {summary.accepted_tokens:,}"))
    if summary.goodput_rate is not None:
        limits = ", ".join(f"{key} {limit:g} ms" for key, limit in summary.slo.items())
        goodput = f"{summary.goodput_rate:.2f} per second, {summary.goodput_share or 0:.1%} of all ({limits})"
        facts.insert(0, ("goodput", goodput))
    return facts
