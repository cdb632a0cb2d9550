"""Run `python -m lab kernel index-variants`: the ways of scoring and estimating by an index, timed beside each other.

Each way is some constants of `gpu.methods.indexed`. First its result is held against plain torch; then its calls over
all layers of a stand are captured in a graph and timed. Behind the parts stands a whole layer whose chosen rows are in
their slots, with the constants as they are, and with the fastest of each kind at that batch. The floor is that of the
bytes of index, logits and chosen rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from bench.benchmark_rows import Row, measure, require
from bench.op.frame import COLD_BYTES, Asked, capture, relative_error
from bench.op.indexed import Stand
from bench.rates import device_name, measure_device_rates
from gpu.methods.indexed import estimating, scoring
from gpu.methods.indexed.choosing import choose_tokens, choose_tokens_reference
from gpu.methods.indexed.estimating import estimate_rest_reference
from gpu.methods.indexed.ring import EMPTY, new_work
from gpu.methods.indexed.scoring import score_tokens_reference
from gpu.methods.indexed.settings import IndexedSettings

WARMUPS, REPEATS = 3, 20
MOST_OFF = 1e-2  # of logits in float16 and of an estimate by weights in bfloat16, relative
# Of sums of random values, near zero beside their terms: 98,304 of them magnify what their weights round alike
# by 300.
MOST_OFF_OF_SUMS = 5e-2
Part = Literal["score", "choose", "estimate", "layer"]
Constants = tuple[tuple[ModuleType, str, int], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of a part: `constants` are those that it changes. Of each `kind` a layer takes one."""

    part: Part
    kind: str
    name: str
    constants: Constants = ()


def variants() -> list[Variant]:
    """Return all ways of scores, rotation and histogram included, of choices, and of estimates."""
    quick, direct = (scoring, "QUICK_BINS", True), (scoring, "COUNTED_DIRECTLY", True)
    found = [
        Variant("score", "", "as it is"),
        Variant("score", "rotation", "32 columns a program", ((scoring, "ROTATED_COLUMNS", 32),)),
        Variant("score", "histogram", "quick", (quick,)),
        Variant("score", "histogram", "quick, direct", (quick, direct)),
    ]
    for tile, warps, stages in ((128, 2, 3), (128, 2, 1), (64, 2, 3), (128, 4, 3)):
        found.append(_by_words(scoring, "score", tile, warps, ("WORD_STAGES", stages)))
    found += [
        Variant("choose", "", "as it is"),
        Variant("choose", "", "quick", (quick,)),
        Variant("estimate", "", "as it is"),
    ]
    for tile, warps, is_prefetched in ((64, 2, False), (64, 2, True), (128, 2, True), (32, 1, True), (64, 1, True)):
        found.append(_by_words(estimating, "estimate", tile, warps, ("PREFETCHED", is_prefetched)))
    return found


def _by_words(module: ModuleType, part: Part, tile: int, warps: int, last: tuple[str, int]) -> Variant:
    constants = (("BY_WORDS", True), ("WORD_TILE", tile), ("WORD_WARPS", warps), last)
    name = f"{tile} tokens, {warps} warps, {last[0].removeprefix('WORD_').lower()} {int(last[1])}"
    return Variant(part, "by words", name, tuple((module, *one) for one in constants))


@contextmanager
def with_constants(constants: Constants) -> Iterator[None]:
    """Change constants for a while."""
    before = [(module, name, getattr(module, name)) for module, name, _ in constants]
    try:
        for module, name, value in constants:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def check_scores(stand: Stand) -> None:
    """Hold scores against plain torch. Raises GateError."""
    stand.score(stand.layers[0])
    wanted = new_work(stand.settings, stand.shape, stand.batch, stand.query.device)
    score_tokens_reference(stand.query, stand.resident_lse, stand.layers[0], wanted, stand.step, stand.layout)
    tokens = slice(stand.tokens)
    for name in ("logits", "total_lse", "shift"):
        got, own = getattr(stand.work, name), getattr(wanted, name)
        if name == "logits":
            got, own = got[:, tokens], own[:, tokens]
        error = relative_error(got, own) if name != "shift" else float((got - own).abs().max())
        require(error < MOST_OFF, f"{name} are off by {error:.1e}")
    moved = float((stand.work.histogram - wanted.histogram)[:, 1:].abs().sum() / (2 * wanted.histogram[:, 1:].sum()))
    require(moved < 20 * MOST_OFF, f"{moved:.1%} of the scores are in another bin")


def check_choice(stand: Stand) -> None:
    """Hold a choice against that of plain torch, of the same scores, but for a few at an edge. Raises GateError."""
    layer, chosen = stand.layers[0], []
    stand.score(layer)
    for choose in (choose_tokens, choose_tokens_reference):
        layer.ids.fill_(EMPTY)
        layer.held.zero_()
        choose(layer, stand.work, stand.step, stand.layout)
        ids = layer.ids.tolist()
        chosen.append({(place, token) for place, own in enumerate(ids) for token in own if token != EMPTY})
    other = len(chosen[0] ^ chosen[1]) / max(1, len(chosen[1]))
    require(other < 20 * MOST_OFF, f"{other:.1%} of the choice are others")


def check_estimate(stand: Stand) -> None:
    """Hold an estimate against plain torch, of the same scores and choice. Raises GateError."""
    stand.score(stand.layers[0])
    choose_tokens(stand.layers[0], stand.work, stand.step, stand.layout)
    names = ("rest_out", "rest_mass", "rest_square")
    for name in names:
        getattr(stand.work, name).fill_(torch.nan)
    stand.estimate(stand.layers[0])
    got = {name: getattr(stand.work, name).sum(1) for name in names}
    estimate_rest_reference(stand.layers[0], stand.work, stand.step, stand.layout)
    for name in names:
        error = relative_error(got[name], getattr(stand.work, name).sum(1))
        most = MOST_OFF_OF_SUMS if name == "rest_out" else MOST_OFF
        require(error < most, f"{name} is off by {error:.1e}")


CHECKS = {"score": check_scores, "choose": check_choice, "estimate": check_estimate}


def time_us(stand: Stand, part: Part) -> float:
    """Return microseconds of a part of one layer, of which no cache holds anything from the last time. Of a layer,
    chosen rows are in their slots since the first warm-up.
    """
    device = stand.query.device
    is_cuda = device.type == "cuda"
    calls = {"score": stand.score, "choose": stand.choose, "estimate": stand.estimate, "layer": stand.again}

    def call() -> None:
        for layer in stand.layers:
            calls[part](layer)

    times = (WARMUPS, REPEATS) if is_cuda else (0, 1)
    return 1e3 * measure(capture(call) if is_cuda else call, device, *times).ms / len(stand.layers)


def floor_us(stand: Stand, part: Part, gb_s: float) -> float:
    """Return microseconds of a part's bytes: keys in few bits, logits written; logits read; values in few bits, logits
    and scales of keys read; and all with chosen rows.
    """
    shape, settings = stand.shape, stand.settings
    places = stand.batch * shape.num_kv_heads
    keys = places * stand.tokens * (shape.dim * settings.key_bits // 8 + 2)
    values = places * stand.tokens * (shape.dim * settings.value_bits // 8 + 4)
    logits = 2 * stand.batch * shape.num_heads * stand.tokens
    rows = 2 * places * int(stand.step.budgets[0]) * shape.dim * stand.query.element_size()
    moved = {
        "score": keys + logits,
        "choose": logits,
        "estimate": values + logits,
        "layer": keys + values + 2 * logits + rows,
    }
    return moved[part] / gb_s / 1e3


def variant_rows(asked: Asked, console: Console) -> list[Row]:
    """Return a row for each way and batch. Raises GateError where a result is wrong."""
    rates = measure_device_rates(asked.device)
    rows: list[Row] = []
    for batch in asked.batches:
        settings = IndexedSettings()
        index_bytes = batch * asked.shape.num_kv_heads * asked.tokens * settings.token_bytes(asked.shape.dim)
        stand = Stand(asked, batch, settings, 1 + COLD_BYTES // index_bytes if asked.device.type == "cuda" else 1)
        fastest: dict[tuple[str, str], tuple[float, Constants]] = {}
        for each in variants():
            with with_constants(each.constants):
                CHECKS[each.part](stand)
                stand.again(stand.layers[0])
                time = time_us(stand, each.part)
            before = fastest.get((each.part, each.kind), fastest.get((each.part, ""), (time, ())))
            fastest[each.part, each.kind] = (time, each.constants) if time < before[0] else before
            rows.append(_row(stand, each.part, f"{each.kind}, {each.name}".removeprefix(", "), time, rates, asked))
        best = tuple(constant for _, constants in fastest.values() for constant in constants)
        for name, constants in (("as it is", ()), ("the fastest of each kind", best)):
            with with_constants(constants):
                for layer in stand.layers:
                    stand.again(layer)
                rows.append(_row(stand, "layer", name, time_us(stand, "layer"), rates, asked))
    return rows


def _row(stand: Stand, part: Part, name: str, time: float, rates: dict[str, float], asked: Asked) -> Row:
    gb_s = rates.get("device_stream_gb_s")
    ms = time / 1e3
    return Row(
        name=f"{part}, {name}", shape=f"{stand.batch} x {stand.tokens:,}", device=device_name(asked.device), ms=ms,
        p10=ms, p90=ms, floor="bytes of index, logits and chosen rows",
        floor_ms=None if gb_s is None else floor_us(stand, part, gb_s) / 1e3, peer=None, peer_ms=None, rates=rates,
        config={"part": part, "variant": name, "batch": stand.batch, "tokens": stand.tokens},
    )  # fmt: skip


def tabulate(rows: list[Row]) -> Table:
    """Return a table of microseconds, a line for each way, and of each batch its time and floor."""
    batches = sorted({row.config["batch"] for row in rows})
    table = Table(title="microseconds of a layer [floor]", title_justify="left", box=None, pad_edge=False)
    table.add_column("what", overflow="fold")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for name in dict.fromkeys(row.name for row in rows):
        own = {row.config["batch"]: row for row in rows if row.name == name}
        cells = []
        for batch in batches:
            floor = own[batch].floor_ms
            cells.append(f"{1e3 * own[batch].ms:.1f}" + ("" if floor is None else f" [{1e3 * floor:.1f}]"))
        table.add_row(name, *cells)
    return table
