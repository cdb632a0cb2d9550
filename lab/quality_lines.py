"""Print rows of `tandem eval tasks` and `tandem eval fidelity` as short lines, for a log with few columns."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

HEAD = ("task or text", "tokens", "method", "prompts", "failed", "score", "difference [95 %]", "KL", "KL own", "keys",
        "bytes", "read", "new", "beyond")  # fmt: skip


def quality_lines(
    files: Annotated[list[Path], typer.Argument(help="JSON that `tandem eval tasks` or `fidelity` wrote")],
) -> None:
    """Print one line for each row: scores in points, KL in nats, shares read in per cent.

    `KL`: along the tokens of a text, or of full attention's answer. `KL own`: along tokens that the method chose
    itself, if a profile's prompt is computed exactly. `read`: rows read that are not of sink, window or dense layers
    (docs/EVALS.md). `new`: per cent of an index's rows that came over the link in their step. `beyond`: per cent of
    audited heads whose error was above its bound.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    for file in files:
        if not file.is_file():
            print(f"{file}: is not there")
            continue
        for row in json.loads(file.read_text())["rows"]:
            line = line_of(row)
            if line not in rows:  # several files have full attention's rows
                rows.append(line)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(" ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip())


def line_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row's values in the order of HEAD; `-` if there is none."""
    gap, read = row.get("difference"), row.get("read_fraction")
    return (
        str(row.get("task") or row.get("text")),
        str(row["length"]),
        row["method"].removeprefix("profile:"),
        str(row.get("samples") or row.get("prompts")),
        str(row.get("failures", 0)),
        _told(row.get("score"), 1, 1),
        "-" if gap is None else f"{gap:+.1f} [{row['difference_low']:+.1f},{row['difference_high']:+.1f}]",
        _told(row.get("kl"), 1, 4),
        _told(row.get("kl_generated"), 1, 4),
        _told(row.get("head_fraction"), 100, 1),
        _told(row.get("bytes_fraction"), 100, 1),
        _told(row.get("index_read") if read is None else read, 100, 2),
        _told(row.get("index_fetched"), 100, 1),
        _told(row.get("index_beyond"), 100, 1),
    )


def _told(value: float | None, times: float, digits: int) -> str:
    return "-" if value is None else f"{round(times * value, digits) + 0.0:.{digits}f}"
