"""Whether a method meets an aim: on every task that the aim names, at no more reads than it allows.

It knows rows as `evals.rows` makes them, no method. The invariant: what was not measured is never met. An interval
that is not exact and not of the bootstrap (a row of before these were made) shows nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evals.paired import SLACK_POINTS
from evals.rows import BASELINES, Row, mean_known
from evals.tasks.reference import REFERENCE_TASKS

MET, NOT_SHOWN, MISSED, NOT_MEASURED, NO_AIM = "met", "not shown", "missed", "not measured", "no aim"
VERDICTS = (MET, NOT_SHOWN, MISSED, NOT_MEASURED, NO_AIM)


@dataclass(frozen=True)
class Aim:
    """Within `points` of full attention on `tasks` of `length` tokens, wherever full attention scores `floor` points or
    more, at a `most_read` share of the keys a head or fewer. methods: how the names begin that it is for."""

    points: float
    tasks: tuple[str, ...]
    length: int
    most_read: float
    floor: float
    methods: tuple[str, ...]


KNOWN_TASKS = tuple(task for task in REFERENCE_TASKS if task not in ("continue", "common_words", "long_list"))
SAMPLED_AIM = Aim(2.0, KNOWN_TASKS, 16_384, 0.05, 50.0, ("sampled", "profile:sampled"))
"""LSH sampling's, on every task of which the reference model knows half or more."""


def judge(row: Row | None, exact: Row | None, aim: Aim) -> str:
    """One task. row, exact: of the method and of full attention, None where it did not run.

    MET: the interval's lower end is above -(points + 1). MISSED: all of the interval is at or below it. NOT_SHOWN: the
    prompts are too few to say. NO_AIM: full attention scores under the floor.
    """
    if exact is None:
        return NOT_MEASURED
    if exact["score"] < aim.floor:
        return NO_AIM
    if row is None or row["difference_low"] is None:
        return NOT_MEASURED
    bound = -(aim.points + SLACK_POINTS)
    if row.get("interval") is None:
        return NOT_SHOWN
    if row["difference_low"] > bound:
        return MET
    return MISSED if row["difference_high"] <= bound else NOT_SHOWN


def judge_method(rows: Sequence[Row], method: str, aim: Aim) -> dict[str, str]:
    """The verdict on each task that the aim names."""
    here = [row for row in rows if row["length"] == aim.length]
    own = {row["task"]: row for row in here if row["method"] == method}
    exact: dict[str, Row] = {}
    for baseline in BASELINES:
        for row in here:
            if row["method"] == baseline:
                exact.setdefault(row["task"], row)
    return {task: judge(own.get(task), exact.get(task), aim) for task in aim.tasks}


def is_met(verdicts: Mapping[str, str], read: float | None, aim: Aim) -> bool:
    """Whether all is shown: every task with an aim is met, one at least, at no more reads. read: None: not known."""
    judged = [verdict for verdict in verdicts.values() if verdict != NO_AIM]
    return bool(judged) and set(judged) == {MET} and read is not None and read <= aim.most_read


def render_aim(rows: Sequence[Row], aim: Aim) -> list[str]:
    """Markdown: a line for each method that the aim is for, with the tasks by verdict; empty where there is none."""
    here = [row for row in rows if row["length"] == aim.length]
    methods = [method for method in dict.fromkeys(row["method"] for row in here) if method.startswith(aim.methods)]
    if not methods:
        return []
    lines = [
        f"Within {aim.points:g} points of full attention at {100 * aim.most_read:g} % of the keys or fewer, on every "
        f"task that full attention scores {aim.floor:g} on:",
        "",
        "| method | keys scored | aim | " + " | ".join(VERDICTS) + " |",
        "|---|---|---|" + "---|" * len(VERDICTS),
    ]
    for method in methods:
        verdicts = judge_method(rows, method, aim)
        read = mean_known([row.get("head_fraction") for row in here if row["method"] == method])
        told = [", ".join(task for task, found in verdicts.items() if found == verdict) for verdict in VERDICTS]
        shown = "-" if read is None else f"{100 * read:.1f} %"
        said = MET if is_met(verdicts, read, aim) else "not met"
        lines.append(f"| `{method}` | {shown} | {said} | " + " | ".join(told) + " |")
    return lines
