"""Judge whether a default is accurate enough, by its paired loss to full attention over all tasks that this can do.

The rule:
- Tasks on which full attention scores STRONG_SCORE or more are pooled, prompt by prompt. The mean loss is at most
  MOST_LOST points, over FEWEST_PAIRS prompts or more, and the lower end of its 95 % interval is above LOWEST_END.
  Fewer prompts are enough to fail: where the whole interval is beyond MOST_LOST.
- On weaker tasks, and those that were not answered freely, scores say little. There answers are compared token by token
  (`--forced`), with a KL of MOST_KL nats at most.
- Rows of a seed on which the settings were chosen, and cells in which the method had no effect, do not count.
Invariant: an aim that was not measured, or on too few prompts, is undecided and never holds.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.paired import FEWEST_PROMPTS, Paired, pooled_interval
from evals.score_rows import BASELINES, FED, KL, PLACE, Row, mean_known

MOST_LOST, LOWEST_END = 1.0, -2.0  # points
FEWEST_PAIRS = 2_000
STRONG_SCORE = 20.0
MOST_KL = 0.01
ROUNDING = 1e-9
SAME_PROMPTS = tuple(name for name in PLACE if name != "metric")
Place = tuple[tuple[str, Any], ...]
"""Task, length, text and seed by name: what rows of the same prompts have in common."""

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"


@dataclass(frozen=True)
class Aim:
    """What is judged.

    methods: beginnings of the methods' names. tasks: those that must have been measured; empty: those of full
    attention's rows. length: of the rows that count; None: any. most_read: the largest share of keys that a head may
    score; None: any. chosen_on: seeds of prompts on which the settings were chosen.
    """

    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    length: int | None
    most_read: float | None
    chosen_on: tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """Whether an aim holds, and why.

    pooled: the paired difference over all prompts that count; None if there are none. tasks: the pooled tasks. weak: KL
    of each task that is too weak to pool. reasons: why the aim does not hold. left_out: cells that were not counted,
    and why.
    """

    verdict: str
    pooled: Paired | None
    tasks: tuple[str, ...]
    weak: dict[str, float]
    reasons: tuple[str, ...]
    left_out: dict[str, str]


def judge(rows: Sequence[Row], method: str, aim: Aim) -> Judgement:
    """Judge one method by its rows and full attention's, of any tasks, lengths, texts and seeds."""
    own, exact = _by_place(rows, (method,), aim), _by_place(rows, BASELINES, aim)
    pooled: Counter[float] = Counter()
    tasks: list[str] = []
    weak: dict[str, float] = {}
    fails: list[str] = []
    lacks: list[str] = []
    unmeasured: list[str] = []
    left_out: dict[str, str] = {}
    for place, (full, _) in exact.items():
        told = _told(place)
        is_strong = full is not None and full["score"] >= STRONG_SCORE
        free, fed = own.get(place, (None, None))
        row = free if is_strong else fed
        if dict(place)["seed"] in aim.chosen_on:
            left_out[told] = "settings were chosen on its seed"
        elif row is not None and row.get("applied") is False:
            left_out[told] = "did not apply"
        elif is_strong:
            if (differences := differences_of(row)) is None:
                unmeasured.append(told)
            else:
                pooled.update(differences)
                tasks.append(str(dict(place)["task"]))
        elif row is None or row.get(KL) is None:
            lacks.append(f"no KL of the answers to {told}")
        else:
            weak[told] = row[KL]
            if row[KL] > MOST_KL:
                fails.append(f"KL {row[KL]:.4f} on {told}, at most {MOST_KL:g} is wanted")
    unmeasured += sorted(set(aim.tasks) - {dict(place)["task"] for place in exact})
    if unmeasured:
        lacks.append(f"not measured: {', '.join(unmeasured)}")
    found = pooled_interval(pooled) if pooled.total() >= FEWEST_PROMPTS else None
    _judge_pooled(found, pooled.total(), fails, lacks)
    _judge_reads([row for both in own.values() for row in both if row is not None], aim, fails, lacks)
    verdict = FAILS if fails else UNDECIDED if lacks else HOLDS
    return Judgement(verdict, found, tuple(dict.fromkeys(tasks)), weak, (*fails, *lacks), left_out)


def _judge_pooled(found: Paired | None, num_pairs: int, fails: list[str], lacks: list[str]) -> None:
    if found is None:
        lacks.append(f"{num_pairs:,} pairs, {FEWEST_PAIRS:,} are wanted")
    elif found.high < -MOST_LOST:
        fails.append(f"loses {-found.high:.2f} points or more, at most {MOST_LOST:g} is wanted")
    elif num_pairs < FEWEST_PAIRS:
        lacks.append(f"{num_pairs:,} pairs, {FEWEST_PAIRS:,} are wanted")
    elif found.mean < -MOST_LOST - ROUNDING:
        fails.append(f"loses {-found.mean:.2f} points, at most {MOST_LOST:g} is wanted")
    elif found.low <= LOWEST_END:
        lacks.append(f"the interval ends at {found.low:+.2f}, above {LOWEST_END:g} is wanted")


def _judge_reads(own: Sequence[Row], aim: Aim, fails: list[str], lacks: list[str]) -> None:
    if aim.most_read is None:
        return
    read = mean_known([row.get("head_fraction") for row in own])
    if read is None:
        lacks.append("what it reads is not known")
    elif read > aim.most_read:
        fails.append(f"reads {100 * read:.2f} % of the keys, at most {100 * aim.most_read:g} % are wanted")


def _by_place(rows: Iterable[Row], methods: Sequence[str], aim: Aim) -> dict[Place, tuple[Row | None, Row | None]]:
    """Return, for each task, length, text and seed, the row of free answers and that of forced answers.

    Of several methods, the first that has one counts.
    """
    found: dict[Place, list[Row | None]] = {}
    for method in methods:
        for row in rows:
            is_meant = not aim.tasks or row["task"] in aim.tasks
            if row["method"] != method or not is_meant or aim.length not in (None, row["length"]):
                continue
            both = found.setdefault(tuple((name, row.get(name)) for name in SAME_PROMPTS), [None, None])
            is_fed = row.get("metric") in FED
            if both[is_fed] is None or (is_fed and both[is_fed].get(KL) is None):
                both[is_fed] = row
    return {place: (free, fed) for place, (free, fed) in found.items()}


def _told(place: Place) -> str:
    of = dict(place)
    return f"{of['task']} at {of['length']:,}" + (f", seed {of['seed']}" if of["seed"] is not None else "")


def differences_of(row: Row | None) -> dict[float, int] | None:
    """Return the paired differences in points, each with its number of prompts; None if the row has none.

    For old rows, which do not store them, they are derived if all scores are 0 or 1.
    """
    if row is None:
        return None
    if row.get("differences"):
        return {float(value): int(count) for value, count in row["differences"]}
    losses, gains = row.get("losses"), row.get("gains")
    if losses is None or gains is None:
        return None
    return {-100.0: losses, 0.0: row["samples"] - losses - gains, 100.0: gains}


def meant(rows: Iterable[Row], aim: Aim) -> list[str]:
    """Return the methods of the rows that the aim applies to, in the order of the rows."""
    names = dict.fromkeys(row["method"] for row in rows if aim.length in (None, row["length"]))
    return [name for name in names if name.startswith(aim.methods) and name not in BASELINES]


def told_of(found: Judgement) -> tuple[str, ...]:
    """Return a judgement's verdict, pairs, difference, number of tasks and reasons as texts."""
    pairs = "0" if found.pooled is None else f"{found.pooled.num_prompts:,}"
    gap = (
        "" if found.pooled is None else f"{found.pooled.mean:+.2f} ({found.pooled.low:+.2f} … {found.pooled.high:+.2f})"
    )
    left_out = [f"{why}: {', '.join(sorted(p for p, w in found.left_out.items() if w == why))}"
                for why in dict.fromkeys(found.left_out.values())]  # fmt: skip
    return found.verdict, pairs, gap, str(len(found.tasks)), "; ".join([*found.reasons, *left_out])


def to_json(found: Judgement) -> dict[str, Any]:
    """Return a judgement as JSON."""
    pooled = found.pooled
    told = None if pooled is None else [pooled.mean, pooled.low, pooled.high]
    return {
        "verdict": found.verdict, "pairs": 0 if pooled is None else pooled.num_prompts, "difference": told,
        "tasks": list(found.tasks), "kl": found.weak, "reasons": list(found.reasons), "left_out": found.left_out,
    }  # fmt: skip
