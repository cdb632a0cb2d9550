"""Define the rows at which our server and another program are both timed, their JSON lines, and the table of both.

A row is written as soon as it is done, and rows in the file are not run again, so a run that was cut can be resumed.
Prompts differ between rows and repeats, so prefix caches may be on: only chats find a prefix.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from lab.speed.token_turns import TokenLoad, Turn, steady_step_s, summarise_turns

RATE_OF, RATE_SHARE = "load-128", 0.7
"""Arrivals come at this share of that row's best rate, of the side whose rate is lower."""
_SMALL = 16  # divisor of all lengths for a trial run
_SPARE_TOKENS = 256

Kind = Literal["step", "first", "load", "arrivals", "chats"]
METRICS: dict[Kind, tuple[tuple[str, str, float], ...]] = {
    "step": (("step_s", "ms", 1e3),),
    "first": (("first_s_p50", "ms", 1e3),),
    "load": (("seconds", "s", 1.0),),
    "arrivals": tuple((f"{name}_s_p{share}", "ms", 1e3) for name in ("token", "first") for share in (50, 99)),
    "chats": (("seconds", "s", 1.0), ("first_s_p50", "ms", 1e3), ("first_s_p99", "ms", 1e3)),
}
"""Metrics of a row's summary that are compared, with unit and factor from seconds. Less is better."""


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A load by name, and what is timed of it. repeats: number of runs; the best by the first metric counts. A rate of
    arrivals is added later.
    """

    name: str
    kind: Kind
    load: TokenLoad
    repeats: int = 2

    @property
    def needs_rate(self) -> bool:
        return self.kind == "arrivals" and self.load.rate is None

    @property
    def max_context_tokens(self) -> int:
        return self.load.turns * (self.load.tokens_in + self.load.tokens_out) + _SPARE_TOKENS

    def small(self) -> "PeerRow":
        load = self.load
        tokens_in, tokens_out = max(16, load.tokens_in // _SMALL), max(4, load.tokens_out // _SMALL)
        turns, requests = min(load.turns, 3), max(1, load.requests // 8)
        small = replace(load, requests=requests, tokens_in=tokens_in, tokens_out=tokens_out, turns=turns)
        return replace(self, load=small, repeats=1)

    def with_repeat(self, number: int, rate: float | None = None) -> TokenLoad:
        """Return the load of a repeat, with prompts that no other repeat has."""
        return replace(self.load, seed=crc32(self.name.encode()) + number, rate=rate or self.load.rate)


def _rows() -> Iterable[PeerRow]:
    for batch in (1, 16, 64):
        yield PeerRow(f"step-{batch}", "step", TokenLoad(batch, 64, 136))
    yield PeerRow("step-1-16384", "step", TokenLoad(1, 16_384, 72))
    yield PeerRow("step-1-98304", "step", TokenLoad(1, 98_304, 72))
    for tokens in (512, 16_384, 98_304):
        yield PeerRow(f"prompt-{tokens}", "first", TokenLoad(1, tokens, 1), 3)
    for streams in (1, 8, 16, 64):
        yield PeerRow(f"load-{streams}", "load", TokenLoad(streams, 1000, 256))
    yield PeerRow("load-128", "load", TokenLoad(128, 1000, 256), 1)
    yield PeerRow("load-8-of-8000", "load", TokenLoad(8, 8000, 128))
    yield PeerRow("load-32-of-8000", "load", TokenLoad(32, 8000, 128), 1)
    yield PeerRow("chats", "chats", TokenLoad(16, 500, 100, turns=10), 1)
    yield PeerRow("arrivals", "arrivals", TokenLoad(160, 1000, 256), 1)


ROWS = {row.name: row for row in _rows()}
OF_LLAMA_CPP = ("step-1", "step-1-16384", "step-1-98304", "prompt-512", "prompt-16384")
SHORT = tuple(name for name, row in ROWS.items() if row.max_context_tokens <= 20_000)


def choose_rows(names: str, small: bool, rate: float | None) -> list[PeerRow]:
    """Return rows by names separated by commas. `short`: all but those of 98,304 tokens.

    rate: of arrivals; None: it follows from other rows. Raises ValueError for an unknown name.
    """
    wanted = list(SHORT) if names == "short" else list(ROWS) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in ROWS]
    if unknown:
        raise ValueError(f"rows: {unknown[0]} is none; wanted some of short, all, {', '.join(ROWS)}")
    rows = [ROWS[name].small() if small else ROWS[name] for name in wanted]
    return [replace(row, load=replace(row.load, rate=rate)) if row.kind == "arrivals" else row for row in rows]


def summarise_row(row: PeerRow, turns: Sequence[Turn]) -> dict[str, float]:
    summary = summarise_turns(list(turns))
    return summary | ({"step_s": steady_step_s(turns)} if row.kind == "step" else {})


def best_of(row: PeerRow, summaries: Sequence[dict[str, float]]) -> dict[str, float]:
    metric = METRICS[row.kind][0][0]
    return min(summaries, key=lambda summary: summary[metric])


def write_row(file: Path, side: str, kind: str, row: PeerRow, summaries: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Append a row's line. kind: names the weights. The line's `all` has the first metric of each repeat."""
    best, metric = best_of(row, summaries), METRICS[row.kind][0][0]
    line = {"side": side, "weights": kind, "row": row.name, "kind": row.kind, "summary": best,
            "requests": row.load.requests, "all": [summary[metric] for summary in summaries]}  # fmt: skip
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
    return line


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """Return a file's rows by name, without a last line that was cut short."""
    rows: dict[str, dict[str, Any]] = {}
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        rows[line["row"]] = line
    return rows


def rate_of(files: Sequence[Path]) -> float | None:
    """Return the rate of arrivals in requests a second; None if a file does not have the row that it follows from."""
    rows = [read_rows(file).get(RATE_OF) for file in files]
    if not rows or any(row is None for row in rows):
        return None
    rates: list[float] = [row["requests"] / row["summary"]["seconds"] for row in rows if row is not None]
    return RATE_SHARE * min(rates)


def describe_row(line: dict[str, Any]) -> str:
    told = ", ".join(
        f"{name.removesuffix('_s')} {line['summary'][name] * scale:.3f} {unit}"
        for name, unit, scale in METRICS[line["kind"]]
    )
    return f"{line['side']} {line['weights']} {line['row']}: {told}, {line['summary']['tokens_per_s']:,.0f} tokens/s"


def join_rows(ours: Path, theirs: Path) -> list[dict[str, Any]]:
    """Return a line for each metric of each row that a file has: both sides (or None), and the ratio."""
    own, other = read_rows(ours), read_rows(theirs)
    joined = []
    for name, row in ROWS.items():
        for metric, unit, scale in METRICS[row.kind] if name in own or name in other else ():
            mine, peer = (
                None if name not in rows else rows[name]["summary"][metric] * scale for rows in (own, other)
            )  # fmt: skip
            ratio = mine / peer if mine is not None and peer else None
            told = {"row": name, "metric": metric.removesuffix("_s"), "unit": unit}
            joined.append(told | {"theirs": peer, "ours": mine, "ratio": ratio})
    return joined
