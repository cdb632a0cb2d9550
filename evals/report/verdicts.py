"""Write judged methods as Markdown: a table of verdicts, and a table of differences by task and length."""

from collections.abc import Sequence

from evals import aims
from evals.report.table import percent, with_range
from evals.score_rows import BASELINES, FED, Row, mean_known


def render_verdicts(rows: Sequence[Row], aim: aims.Aim, methods: Sequence[str]) -> list[str]:
    """Return the lines of a table with a row for each method.

    It has the verdict, the pooled difference in points, and the shares of full attention's keys and bytes that the
    method read, as means over the cells in which it applied.
    """
    lines = [
        "| method | verdict | prompts | difference, points [95 %] | KL of weak tasks, most | keys read | bytes read |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        found = aims.judge(rows, method, aim)
        own = [row for row in rows if row["method"] == method and row.get("applied") is not False]
        pooled = found.pooled
        gap = "-" if pooled is None else f"{pooled.mean:+.2f} [{pooled.low:+.2f}, {pooled.high:+.2f}]"
        pairs = "0" if pooled is None else f"{pooled.num_prompts:,}"
        kl = f"{max(found.weak.values()):.4f}" if found.weak else "-"
        reads = [percent(mean_known([row.get(key) for row in own])) for key in ("head_fraction", "bytes_fraction")]
        lines.append(f"| `{method}` | {found.verdict} | {pairs} | {gap} | {kl} | {reads[0]} | {reads[1]} |")
    return lines


def render_cells(rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """Return the lines of a table of free answers: a row for each task, length and seed, a column for each method."""
    free = [row for row in rows if row.get("metric") not in FED]
    exact = {_cell(row): row for row in free if row["method"] in BASELINES}
    own = {(row["method"], _cell(row)): row for row in free}
    columns = [method for method in methods if any((method, cell) in own for cell in exact)]
    lines = [
        "| task | tokens | seed | exact | " + " | ".join(f"`{method}`" for method in columns) + " |",
        "|" + "---|" * (4 + len(columns)),
    ]
    for cell in sorted(exact):
        told = [_difference(own.get((method, cell))) for method in columns]
        if any(one != "" for one in told):
            task, length, seed = cell
            lines.append(f"| {task} | {length:,} | {seed} | {exact[cell]['score']:.1f} | " + " | ".join(told) + " |")
    return lines


def _cell(row: Row) -> tuple[str, int, int]:
    return str(row["task"]), int(row["length"]), int(row["seed"])


def _difference(row: Row | None) -> str:
    if row is None or row.get("difference") is None:
        return ""
    if row.get("applied") is False:
        return "did not apply"
    gap = with_range(row["difference"], row["difference_low"], row["difference_high"], "+")
    return f"{gap} ({row['samples']})"
