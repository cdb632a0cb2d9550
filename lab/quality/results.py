"""The tables of lab/RESULTS.md: which runs they are made of, and their rendering between markers.

Running and rendering are apart: a run writes JSON (configuration, machine, rows), on any machine, and tables are made
from one or several such files. Invariant: what stands outside the markers is never changed.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from evals.aims import SAMPLED_AIM, render_aim
from evals.cells import CHRONICLE, Cell
from evals.report.table import NOT_APPLIED
from evals.score_rows import BASELINES, Row, column_of, mean_known

DECODE = (
    "topk",
    "oracle",
    "quest",
    "snapkv",
    "h2o:observe=64",
    "streaming",
)
SAMPLED = (
    "sampled:bits_per_table=10,num_tables=150",
    "sampled:bits_per_table=9,num_tables=120",
    "sampled:bits_per_table=8,num_tables=75",
    "sampled:bits_per_table=10,num_tables=200",
)
"""LSH sampling as its paper sets it (tables 1 to 4), sink, window and two dense layers included; and one that was tuned
on the reference model (`tandem tune lsh`, 16K) to read 5 % of the keys or fewer."""

BESIDE_SAMPLED = (
    "topk:budget=0.05,sink=4,window=64,dense_layers=0+half",
    "quest:budget=0.05,sink=4,window=64,dense_layers=0+half",
)
"""A bound and a baseline on the same terms: the same dense layers, sink and window, about the same keys."""

BUDGETS = (0.02, 0.05, 0.1)
FREE_TASKS = ("needle", "many_needles", "word_needle", "facts_one_hop", "facts_two_hops", "variables", "several_values")
HARD_TASKS = ("only_needles", "crossed_needles", "four_values", "four_keys")
"""RULER's hard needles: where published comparisons see LSH sampling fall furthest."""

SHORT_TASKS = ("common_word",)
"""Run at the shortest length only: full attention has it right nine times in ten there and half of the time at 16K."""

LIST_TASK = "list"
"""Scored by agreement: a whole list is some 180 steps, more than all other tasks together."""

FORCED_TOKENS = 16
LENGTHS = (4096, 8192, 16384)
SETS = ("quick", "full")
TRAINING_PROSE = "the generated prose that the reference model was trained with"
"""The text of rows that name none: they were made before the chronicle was."""

MARKERS = ("<!-- {name}: begin -->", "<!-- {name}: end -->")

SAME_READS = 5e-4
"""Fractions that a table with one digit after the point shows alike."""

FIDELITY = {"quick": (4, 16, 2), "full": (16, 64, 16)}
"""Texts a length, tokens compared and texts that go together, of each set's comparison with full attention."""

QUICK_SECONDS_A_TOKEN = 1.1e-3
FULL_SECONDS_A_TOKEN = 5.5e-6
"""For the estimate: seconds a prompt token of the quick set on two cores and of the full set on an H200, all baselines
together."""


SAMPLED_SHARE = 0.3
"""The same for one setting of LSH sampling, over all baselines together: it hashes the prompt."""


def decode_methods(budgets: Sequence[float], sampled: Sequence[str]) -> tuple[str, ...]:
    """Return full attention, every decode baseline at each budget, and `sampled`, as texts of `parse_method`."""
    labels = ["full"]
    for method in DECODE:
        joint = "," if ":" in method else ":"
        labels += [f"{method}{joint}budget={budget}" for budget in budgets]
    return (*labels, *sampled)


def cells_of(
    name: str, lengths: Sequence[int], samples: int | None, only: Sequence[str], tasks: Sequence[str]
) -> list[Cell]:
    """Return the runs of a set. quick: three tasks at 4K, 64 prompts each. full: thirteen tasks, 400 prompts each.

    only: patterns (`sampled*`) of the methods that are run, beside full attention; none: all. tasks: those of the set
    that are run; none: all. Raises ValueError where no method or no task of the set is meant.
    """
    known = {cell.task for cell in _all_cells(name, lengths, samples)}
    if unknown := set(tasks) - known:
        raise ValueError(
            f"--tasks: {', '.join(sorted(unknown))} not in the set {name}; have {', '.join(sorted(known))}"
        )
    cells = []
    for cell in _all_cells(name, lengths, samples):
        if tasks and cell.task not in tasks:
            continue
        methods = [label for label in cell.methods if label != "full" and _is_meant(label, only)]
        if methods:
            cells.append(replace(cell, methods=(*(label for label in cell.methods if label == "full"), *methods)))
    if not cells:
        raise ValueError(
            f"--methods: {', '.join(only)} names none of the set {name}; give a pattern such as 'sampled*'"
        )
    return cells


def _is_meant(label: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(label, pattern) for pattern in only)


def tasks_at(length: int) -> tuple[str, ...]:
    """Return tasks with answers of the method's own choice that full attention can do at a length."""
    return (*FREE_TASKS, *HARD_TASKS, *(SHORT_TASKS if length <= LENGTHS[0] else ()))


def _all_cells(name: str, lengths: Sequence[int], samples: int | None) -> list[Cell]:
    if name == "quick":
        methods = decode_methods(BUDGETS, SAMPLED[:1])
        tasks = ("many_needles", "word_needle", "facts_one_hop")
        return [Cell(task, length, samples or 64, methods, 0) for length in lengths[:1] for task in tasks]
    cells, count = [], samples or 400
    for length in lengths:
        free = tasks_at(length)
        methods = decode_methods(BUDGETS, (*SAMPLED, *BESIDE_SAMPLED))
        cells += [Cell(task, length, count, methods, 0) for task in free]
        cells.append(Cell(LIST_TASK, length, count, methods, FORCED_TOKENS))
    return cells


def estimate_seconds(name: str, cells: Sequence[Cell]) -> float:
    """Return how long a set takes where it is meant to run: two cores (quick) or one H200 (full)."""
    seconds = 0.0
    for cell in cells:
        tokens = cell.num_samples * cell.length_tokens
        sampled = sum(label.startswith("sampled") for label in cell.methods)
        baselines = (len(cell.methods) - sampled) / (1 + len(DECODE) * len(BUDGETS))
        each = QUICK_SECONDS_A_TOKEN if name == "quick" else FULL_SECONDS_A_TOKEN
        seconds += tokens * each * (baselines + SAMPLED_SHARE * sampled)
    return seconds


def read_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """One run, or several of the same set put together. Raises ValueError for files that do not belong together."""
    runs = [json.loads(path.read_text()) for path in paths]
    names = {run["set"] for run in runs}
    if len(names) != 1:
        raise ValueError(f"result files: hold the sets {', '.join(sorted(names))}; give files of one set")
    merged = dict(runs[0], rows=[row for run in runs for row in run["rows"]])
    merged["seconds"] = sum(run["seconds"] for run in runs)
    merged["command"] = " ; ".join(dict.fromkeys(run["command"] for run in runs))
    return merged


def render_run(run: dict[str, Any]) -> str:
    """Return Markdown of a run: a table for each length, methods down, tasks across."""
    if run["set"] == "predicted":
        from lab.quality.predicted_report import render_predicted

        return render_predicted(run)
    if run["set"] == "fusion":
        from lab.quality.fusion_tables import render_fusion

        return render_fusion(run)
    samples = " or ".join(str(count) for count in sorted({row["samples"] for row in run["rows"]}))
    failures = sum(row["failures"] for row in run["rows"])
    ends = [(row["low"], row["score"], row["high"]) for row in run["rows"] if row["low"] is not None]
    noise = max((max(score - low, high - score) for low, score, high in ends), default=0.0)
    minutes = f"{run['seconds'] / 60:.0f} minutes"
    lines = [
        f"`{run['command']}` on {run['machine']}, {run['date']}, {minutes}, seed {run['seed']}. {samples} prompts a "
        f"task and length; failures: {failures}; the 95 % interval of a score ends {noise:.1f} points from it at most.",
    ]
    lines[0] += f" Text around the needles: {text_of(run)}."
    lengths = sorted({row["length"] for row in run["rows"]})
    for length in lengths:
        lines += ["", f"### {length:,} tokens", "", *render_table([r for r in run["rows"] if r["length"] == length])]
    if run["set"] == "mac":
        from lab.mac.report import render_reused

        return "\n".join([*lines, *render_reused(run)])
    if aimed := render_aim(run["rows"], SAMPLED_AIM):
        lines += ["", f"### The aim at {SAMPLED_AIM.length:,} tokens", "", *aimed]
    return "\n".join(lines)


def render_table(rows: Sequence[Row]) -> list[str]:
    """One length. A cell is the score and, in brackets, its paired difference to full attention with its interval."""
    columns = list(dict.fromkeys(column_of(row) for row in rows))
    fields = {"keys scored": "head_fraction", "bytes read": "bytes_fraction"}
    if any(row.get("acceptance") is not None for row in rows):
        fields |= {"accepted": "acceptance", "skipped": "skipped_fraction"}
    lines = [
        "| method | " + " | ".join((*fields, *columns)) + " |",
        "|---|" + "---|" * (len(fields) + len(columns)),
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {column_of(row): row for row in rows if row["method"] == method}
        reads = [_percent(own.values(), field) for field in fields.values()]
        cells = [_cell(own[column]) if column in own else "" for column in columns]
        lines.append(f"| `{method}` | {' | '.join(reads)} | {' | '.join(cells)} |")
    return lines


def _percent(rows: Any, field: str) -> str:
    """Return the mean of a fraction over the layers that the method handles and, where others are read in full, over
    all.
    """
    rows = list(rows)
    handled, every = (mean_known([row.get(name) for row in rows]) for name in (field, f"{field}_all_layers"))
    if handled is None:
        return ""
    text = f"{100 * handled:.1f} %"
    return text if every is None or abs(every - handled) < SAME_READS else f"{text} (all layers {100 * every:.1f} %)"


def _cell(row: Row) -> str:
    """Return `99.5, -0.5 (-1.8 … +0.3)`; `99.5 (-0.5 ± 0.9)` where the interval is an older, normal one."""
    text = f"{row['score']:.1f}"
    if row.get("applied") is False:
        return f"{text}, {NOT_APPLIED}"
    if row["method"] not in BASELINES and row["difference"] is not None:
        low, high = row["difference_low"], row["difference_high"]
        if row.get("interval") is None:
            text += f" ({row['difference']:+.1f} ± {(high - low) / 2:.1f})"
        else:
            text += f", {row['difference']:+.1f} ({low:+.1f} … {high:+.1f})"
    return text


def replace_between_markers(text: str, name: str, content: str) -> str:
    """Return `text` with what stands between the markers of `name` exchanged. Raises ValueError where they are
    missing.
    """
    begin, end = (marker.format(name=name) for marker in MARKERS)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"results page: wanted the markers {begin} and {end} once each, in this order")
    return text[: text.index(begin) + len(begin)] + "\n" + content + "\n" + text[text.index(end) :]


def section_of(run: dict[str, Any]) -> str:
    """Where a run's tables stand in the page: its set's, or `SET-text` for one on text files of the user's."""
    return run["set"] + ("" if text_of(run) in (CHRONICLE, TRAINING_PROSE) else "-text")


def text_of(run: dict[str, Any]) -> str:
    """Return what a run's documents were made of. Raises ValueError for a run that put several texts together."""
    texts = sorted({row.get("text", TRAINING_PROSE) for row in run["rows"]})
    if len(texts) > 1:
        raise ValueError(f"result files: are of the texts {', '.join(texts)}; give files of one text")
    return texts[0] if texts else CHRONICLE


def write_tables(page: Path, run: dict[str, Any]) -> None:
    """Exchange the tables of the run's set in a Markdown page."""
    page.write_text(replace_between_markers(page.read_text(), section_of(run), render_run(run)))
