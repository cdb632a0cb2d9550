"""What predicted blocks recover, lose and are off by, as one document of several runs, and its tables in Markdown.

Invariant: a table's numbers are its rows', and what they were made of stands beside them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.score_rows import Row, column_of

Document = Mapping[str, Any]
RIVALS = (("predicted before", ", shared"), ("predicted apart", ""), ("predicted", ", shared"))
"""Who is compared in the cells of the paper's Table 1, and how those are marked that read as much: alone it is
`before`, the default."""

_KEYS = {"recovery": ("length", "task", "budget", "method"), "served": ("length", "task", "budget", "method"),
         "fidelity": ("length", "method"), "errors": ("length", "task", "excluded", "heads")}  # fmt: skip
"""What tells the rows of a part apart."""

_RECOVERY = ("length", "task", "budget", "method", "recovery", "kv_rows")
_ERRORS = ("length", "excluded", "heads", "answers", "log_mass_within", "output_within", "other_directions_within",
           "log_mass_error", "log_mass_estimate", "output_error", "output_estimate")  # fmt: skip


def gather(
    recovery: Sequence[Document], ablations: Mapping[str, Document], fidelity: Sequence[Document],
    errors: Sequence[Document], tasks: Sequence[Document], machine: str, date: str, served: Sequence[Document],
) -> dict[str, Any]:  # fmt: skip
    """Return the set `predicted` of `results.render_run`; ablations: by what is varied; served: recovery, with the
    settings that serve instead of the paper's.
    """

    def rows_of(document: Document, names: Sequence[str]) -> list[Row]:
        made = document["configuration"]
        beside = {"prompts": made["samples"], "steps": made["steps"]}
        if "draws" in made:
            beside["task"] = ", ".join(made["tasks"])
        return [{name: row[name] for name in names if name in row} | beside for row in document["rows"]]

    return {
        "set": "predicted", "command": "python -m lab recovery | fidelity | errors | tasks", "seed": 0, "seconds": 0.0,
        "machine": machine, "date": date,
        "rows": _latest([row for document in tasks for row in document["rows"]]),
        "recovery": [row for document in recovery for row in rows_of(document, _RECOVERY)],
        "ablations": {name: rows_of(document, _RECOVERY) for name, document in ablations.items()},
        "fidelity": [row for document in fidelity for row in _with_errors(document)],
        "errors": [row for document in errors for row in rows_of(document, _ERRORS)],
        "served": [row for document in served for row in rows_of(document, _RECOVERY)],
    }  # fmt: skip


def renew(earlier: Document, later: Document) -> dict[str, Any]:
    """Return what was put together before, with later rows in the place of those that they repeat, and behind them the
    new.
    """
    renewed = {**earlier, **later, "ablations": {**earlier["ablations"], **later["ablations"]}}
    for part, names in _KEYS.items():
        rows = [*earlier.get(part, []), *later[part]]
        renewed[part] = [*{tuple(row[name] for name in names): row for row in rows}.values()]
    renewed["rows"] = _latest([*earlier["rows"], *later["rows"]])
    return renewed


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Of a task's rows with the same length and method the last one, in the first one's place."""
    return [*{(row["length"], column_of(row), row["method"]): row for row in rows}.values()]


def _with_errors(document: Document) -> list[Row]:
    """Return rows of methods, with their layers' errors: the mean and the worst."""
    rows = []
    for row in document["rows"]:
        own = [
            one["error"]
            for one in document["layers"]
            if (one["length"], one["method"]) == (row["length"], row["method"])
        ]
        rows.append({**row, "error": sum(own) / len(own) if own else 0.0, "worst_error": max(own, default=0.0)})
    return rows


def render_predicted(document: Document) -> str:
    """Return all of its tables, each behind what it was made of."""
    lines = [f"On {document['machine']}, {document['date']}.", "", "### Attention recovered", ""]
    lines += render_recovery(document["recovery"])
    if document.get("served"):
        lines += ["", "### With the settings that serve", "", *render_recovery(document["served"])]
    lines += ["", "### What the predictor's settings do", "", *render_ablations(document["ablations"])]
    lines += ["", "### Beside sampling, at what is read", "", *render_fidelity(document["fidelity"])]
    lines += ["", "### Estimated errors", "", *render_errors(document["errors"])]
    if document["rows"]:
        from lab.quality.results import render_table

        lines += ["", "### Tasks", ""]
        for length in sorted({row["length"] for row in document["rows"]}):
            own = [row for row in document["rows"] if row["length"] == length]
            lines += [f"{length:,} tokens, {_prompts_of(own)}:", "", *render_table(own), ""]
    return "\n".join(lines).rstrip()


def summarise(document: Document) -> str:
    """For a terminal: the tables, but of tasks a line a method."""
    parts = (
        (document["recovery"], render_recovery), (document.get("served", []), render_recovery),
        (document["fidelity"], render_fidelity),
        (document["errors"], render_errors), (document["rows"], summarise_tasks),
    )  # fmt: skip
    return "\n\n".join("\n".join(render(rows)) for rows, render in parts if rows)


def summarise_tasks(rows: Sequence[Row]) -> list[str]:
    """Return a line a length and method: tasks, mean score, the task that loses most, and what was read."""
    lines = ["| length | method | tasks | prompts | mean | loses most | keys scored | bytes read |", "|" + "---|" * 8]
    for length, method in dict.fromkeys((row["length"], row["method"]) for row in rows):
        own = [row for row in rows if (row["length"], row["method"]) == (length, method)]
        known = [row for row in own if row["difference"] is not None]
        worst = min(known, key=lambda row: row["difference"]) if known else None
        loss = "" if worst is None else f"{worst['difference']:+.1f} {worst['task']}"
        read = [_mean([row[name] or 0.0 for row in own]) for name in ("head_fraction", "bytes_fraction")]
        lines.append(
            f"| {length:,} | `{method}` | {len(own)} | {sum(row['samples'] for row in own)} | "
            f"{_mean([row['score'] for row in own]):.1f} | "
            f"{loss} | {100 * read[0]:.1f} % | {100 * read[1]:.1f} % |"
        )
    return lines


def render_recovery(rows: Sequence[Row]) -> list[str]:
    """Return a line a method, a column a cell of (length, task, budget); then means, and who is best of those that
    share.
    """
    cells = list(dict.fromkeys((row["length"], row["task"], row["budget"]) for row in rows))
    shares = {(row["method"], row["length"], row["task"], row["budget"]): row for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    budgets = sorted({budget for _, _, budget in cells})
    groups = list(dict.fromkeys((length, task) for length, task, _ in cells))
    lines = ["| method | KV rows | " + " | ".join(f"{budget:,}" for budget in budgets) + " | mean |",
             "|---|---|" + "---|" * (len(budgets) + 1)]  # fmt: skip
    for method in methods:
        own = {cell: shares[method, *cell] for cell in cells if (method, *cell) in shares}
        reads = _mean([row["kv_rows"] / row["budget"] for row in own.values()])
        means = [_mean([row["recovery"] for cell, row in own.items() if cell[2] == budget]) for budget in budgets]
        whole = _mean([row["recovery"] for row in own.values()])
        numbers = " | ".join(f"{100 * mean:.2f}" for mean in [*means, whole])
        lines.append(f"| {method} | {reads:.2f} | {numbers} |")
    made = sorted({(row["length"], row["task"], row["prompts"], row["steps"]) for row in rows})
    told = ", ".join(f"{task} at {length:,} ({prompts} of {steps} steps)" for length, task, prompts, steps in made)
    lines += ["", f"Per cent, means over {len(groups)} tasks and lengths: {told}. KV rows: that a group of heads reads "
              "over the budget."]  # fmt: skip
    for own, mark in RIVALS:
        rivals = [f"{name}{mark}" for name in ("H2O, last 64", "Quest", "SnapKV")] + ["StreamingLLM"]
        at = [cell for cell in cells if all((name, *cell) in shares for name in [own, *rivals])]
        won = sum(
            all(shares[own, *cell]["recovery"] > shares[name, *cell]["recovery"] for name in rivals) for cell in at
        )
        if at:
            means = {name: _mean([shares[name, *cell]["recovery"] for cell in at]) for name in [own, *rivals]}
            told = "; ".join(f"{name} {100 * means[name]:.2f}" for name in rivals)
            lines.append(f"`{own}` is best in {won} of {len(at)} cells; on average {100 * means[own]:.2f} ({told}).")
    return lines


def render_ablations(ablations: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a line for each setting that is varied: its values, and what is recovered."""
    lines = ["| varied | recovered, per cent |", "|---|---|"]
    for name, rows in ablations.items():
        own = [row for row in rows if row["method"].startswith("predicted")]
        told = ", ".join(f"{row['method'].removeprefix('predicted ')}: {100 * row['recovery']:.2f}" for row in own)
        lines.append(f"| {name} | {told} |")
    return lines


def render_fidelity(rows: Sequence[Row]) -> list[str]:
    """As the page has others: what methods say and what their layers lose, by what they read."""
    lines = ["| method | prompts | keys scored | bytes read | agreement | KL | error a layer: mean / worst |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        lines.append(
            f"| `{row['method']}` | {row['prompts']} | {100 * row['head_fraction']:.1f} % | "
            f"{100 * row['bytes_fraction']:.1f} % | {100 * row['agreement']:.1f} % | {row['kl']:.4f} | "
            f"{row['error']:.3f} / {row['worst_error']:.3f} |"
        )
    return lines


def render_errors(rows: Sequence[Row]) -> list[str]:
    """Return a line for each length and task, what was left out of the sample, and kind of heads."""
    columns = ("length", "task", "left out", "heads", "answers", "log mass within two", "output within two",
               "other directions", "log mass: error / estimate", "output: error / estimate")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        if not row["answers"]:
            continue
        names = ("log_mass_within", "output_within", "other_directions_within")
        told = [f"{row['length']:,}", row["task"], f"{row['excluded']:,} tokens", row["heads"], f"{row['answers']:,}"]
        told += [f"{100 * row[name]:.1f} %" for name in names]
        told += [f"{row[f'{name}_error']:.3f} / {row[f'{name}_estimate']:.3f}" for name in ("log_mass", "output")]
        lines.append(f"| {' | '.join(told)} |")
    return lines


def _prompts_of(rows: Sequence[Row]) -> str:
    """Return how many prompts a task, and which rows have others."""
    counts = [row["samples"] for row in rows]
    most = max(set(counts), key=counts.count)
    others = [f"{row['samples']} of `{row['method']}` on {row['task']}" for row in rows if row["samples"] != most]
    return f"{most} prompts a task" + (f" ({', '.join(others)})" if others else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
