"""Print rows as a table, grouped by task and length.

The invariant: failures are always shown, and a score is never shown without its interval.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from evals.score_rows import BASELINES, column_of

METHOD_COLUMNS = 14
PIPED_COLUMNS = 150
SHARES = {"read": "read_fraction", "fetched": "index_fetched"}
"""Columns that a table has if one of its rows does, with their fields."""
NOT_APPLIED = "did not apply"
"""Shown in place of a difference if the method did nothing in the whole cell."""


def row_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a row: task, length, then full attention first and others by the share they read."""
    return column_of(row), row["length"], row["method"] not in BASELINES, row.get("head_fraction") or 0.0, row["method"]


def percent(fraction: float | None) -> str:
    """Return a fraction as per cent, `-` where it is not known."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def with_range(value: float | None, low: float | None, high: float | None, sign: str) -> str:
    """Return `97.5 [95.1, 99.0]`; sign is a format's sign option, empty or `+`."""
    if value is None:
        return "-"
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]" if low is not None else f"{value:{sign}.1f}"


def most_lost(row: Mapping[str, Any]) -> float | None:
    """Return how many points the row loses at most: its interval's lower end; 0 if that is above full attention."""
    low = row.get("difference_low")
    return None if low is None else max(0.0, -low)


def open_console() -> Console:
    """Return the console. If stdout is not a terminal, its lines are long enough for a whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_COLUMNS)


def print_table(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print rows (`evals.score_rows.summarize`) to the console."""
    shares = {name: field for name, field in SHARES.items() if any(row.get(field) is not None for row in rows)}
    table = Table(title="score in points [95 % interval]; difference to full attention, paired", title_style="dim")
    for name, justify in (
        ("task", "left"), ("length", "right"), ("method", "left"), ("samples", "right"), ("failed", "right"),
        ("score", "right"), ("difference", "right"), ("heads read", "right"), ("bytes read", "right"),
        *((name, "right") for name in shares),
    ):  # fmt: skip
        fewest = METHOD_COLUMNS if name == "method" else None
        table.add_column(name, justify=justify, no_wrap=name != "method", min_width=fewest, overflow="fold")  # type: ignore[arg-type]
    for (task, length), group in groupby(sorted(rows, key=row_order), key=lambda row: (column_of(row), row["length"])):
        for number, row in enumerate(group):
            failures = row["failures"]
            table.add_row(
                task if number == 0 else "",
                f"{length:,}" if number == 0 else "",
                row["method"],
                str(row["samples"]),
                f"[bold red]{failures}[/]" if failures else "0",
                with_range(row["score"], row.get("low"), row.get("high"), ""),
                NOT_APPLIED
                if row.get("applied") is False
                else with_range(row.get("difference"), row.get("difference_low"), row.get("difference_high"), "+"),
                percent(row.get("head_fraction")),
                percent(row.get("bytes_fraction")),
                *(percent(row.get(field)) for field in shares.values()),
            )
        table.add_section()
    console.print(table)
    print_failures(rows, console)


def print_failures(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print why samples failed: one line for each row and reason."""
    for row in rows:
        place = " ".join(str(row[name]) for name in ("task", "length", "method") if name in row)
        for reason, count in row.get("reasons", {}).items():
            console.print(f"failed: {place}: {count} of {row.get('samples', row.get('prompts'))}: {reason}",
                          style="bold red", highlight=False, markup=False)  # fmt: skip
