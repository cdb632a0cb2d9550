"""Write Markdown tables of policies that reuse documents: a line for each policy and ratio, and a column for each task.

Invariant: a table is made of rows alone, so the rows of any run give its page's lines.
"""

from collections.abc import Sequence

from evals.score_rows import Row


def render_policies(rows: Sequence[Row]) -> list[str]:
    """Return the lines of one length."""
    tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if task != "all"]
    columns = [
        "policy", "r", "KL of the next token", "less than `random`", "KL along the answer", "distance of maps", "score",
        *tasks,
    ]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        if row["task"] != "all":
            continue
        same = {one["task"]: one for one in rows if (one["policy"], one["ratio"]) == (row["policy"], row["ratio"])}
        spared = row.get("kl_spared")
        cells = [
            f"`{row['policy']}`",
            "" if row["ratio"] is None else f"{row['ratio']:g}",
            _with_error(row["kl"], row["kl_error"]),
            "" if spared is None else _with_error(spared, row["spared_error"]),
            _with_error(row["kl_along"], row["along_error"]),
            "" if mean_distance(row) is None else f"{mean_distance(row):.3f}",
            _score(row),
            *(_score(same[task]) if task in same else "" for task in tasks),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean_distance(row: Row) -> float | None:
    """Return the mean distance of attention maps over all layers but the first, which no policy changes."""
    far = row.get("distances")
    return sum(far[1:]) / len(far[1:]) if far else None


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _score(row: Row) -> str:
    """Return the score and its difference from vanilla's on the same prompts, as `97.5, -2.0 (-4.5 … +0.4)`."""
    if row["score"] is None:
        return ""
    gap = row.get("difference")
    apart = "" if gap is None else f", {gap:+.1f} ({row['difference_low']:+.1f} … {row['difference_high']:+.1f})"
    return f"{row['score']:.1f}{apart}"
