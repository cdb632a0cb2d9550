"""Run `python -m lab beside`: short streams, long streams and a long prefill through one engine, each alone and
together.

Each number's peer is the same thing alone, in the same run. Short streams are of the profile `exact`; prompts are of
random tokens, every request its own. Nothing is timed before `bench.long_gate` has held the host path against full
attention. Windows of long streams begin once the tables of all of them stand: before, some rows are left out of steps,
and the others are faster. A stream's time a token is of a window of seconds; a gap is the time between two of its
tokens. With `scheduler.prefill.block_us: 0` blocks of attention are as they come.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.as_served import interpreter_as_served
from bench.benchmark_rows import Row, announce, summarise
from bench.long_client import GREEDY, Client
from bench.long_floors import Floor, LongFloors, measure_floors
from bench.long_gate import check_host_path
from bench.rates import device_name
from gpu.profiles import Profile, get_profile, resolve_profiles
from lab.speed.lane_watch import LaneWatch, describe
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment

_SHORT_PROFILE = "exact"
_WARM_UP_SHARE = 0.25  # of a window, before it


@dataclass(frozen=True, slots=True)
class BesideBenchmark:
    """The settings of the benchmark: `short` streams over prompts of `short_tokens`, `long` ones over `long_tokens`; a
    window takes `seconds`.
    """

    short: int
    short_tokens: int
    long: int
    long_tokens: int
    long_profile: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Streams:
    """The milliseconds of one window: from token to token of all streams, and a token of one stream on average."""

    gaps_ms: list[float]
    token_ms: float


def run_beside_benchmark(benchmark: BesideBenchmark, deployment: Deployment, console: Console) -> list[Row]:
    """Time short streams, long ones, and the prefill of one more long prompt: first alone. Raises GateError."""
    profiles = resolve_profiles(deployment.profiles, deployment.host)
    profile = get_profile(benchmark.long_profile, profiles, "--profile")
    floors = measure_floors(deployment)
    engine, ready = load_engine(deployment, floors.plan, lambda *_: None)
    try:
        with interpreter_as_served():
            client = Client(engine, ready.vocab_size, ready.profiles)
            assert deployment.host is not None, "beside: a deployment with a host section"
            with client.fixed_residence():
                check_host_path(client, floors.capacity, deployment.host.rows, [profile], 1, console)
            return list(_measure(client, benchmark, floors, profiles[_SHORT_PROFILE], profile, deployment, console))
    finally:
        engine.shutdown()


def _measure(
    client: Client, benchmark: BesideBenchmark, floors: LongFloors, short: Profile, long: Profile,
    deployment: Deployment, console: Console,
) -> Iterator[Row]:  # fmt: skip
    short_floor = floors.decode(short, benchmark.short_tokens, benchmark.short, None)
    announce(console, f"a token of {benchmark.short} short streams", *short_floor)

    shorts = _start(client, benchmark.short, benchmark.short_tokens, short)
    (short_alone,), _ = _watch(client, [shorts], benchmark.seconds)
    client.drain(shorts)
    _first_token(client, benchmark.long_tokens, long)  # of the first, host memory is pinned
    client.drain([])
    client.forget_contexts()
    prefill_alone = _first_token(client, benchmark.long_tokens, long)
    longs = _start(client, benchmark.long, benchmark.long_tokens, long)
    ready_s = client.until_ready()
    console.print(f"tables of the long streams stand after {ready_s:.2f} s", highlight=False)
    (long_alone,), lanes_alone = _watch(client, [longs], benchmark.seconds)
    rows_read = lanes_alone["rows_read"] * long_alone.token_ms / (1e3 * lanes_alone["seconds"]["whole"])
    long_floor = floors.decode(long, benchmark.long_tokens, benchmark.long, rows_read, client.kept_tokens())
    console.print(f"alone: short {short_alone.token_ms:.2f} ms, long {long_alone.token_ms:.2f} ms a token, "
                  f"prefill {prefill_alone:.2f} s", highlight=False)  # fmt: skip
    shorts = _start(client, benchmark.short, benchmark.short_tokens, short)
    (short_beside, long_beside), lanes_together = _watch(client, [shorts, longs], benchmark.seconds)
    with client.all_cores():
        (short_crowded, long_crowded), lanes_crowded = _watch(client, [shorts, longs], benchmark.seconds)
    client.engine.cancel(shorts)
    console.print(f"together: short {short_beside.token_ms:.2f} ms, long {long_beside.token_ms:.2f} ms a token; with "
                  f"no core left to launches {short_crowded.token_ms:.2f} and {long_crowded.token_ms:.2f}",
                  highlight=False)  # fmt: skip
    gaps: list[list[float]] = [[]]
    with LaneWatch(client) as watch:
        prefill_beside = _first_token(client, benchmark.long_tokens, long, [longs], gaps)
    lanes_prefill = watch.told()
    watched = {"alone": lanes_alone, "together": lanes_together, "together, no core left": lanes_crowded,
               "a prompt beside": lanes_prefill}  # fmt: skip
    for name, lanes in watched.items():
        console.print(f"lanes, {name}: {describe(lanes)}", highlight=False, soft_wrap=True)
    client.drain(longs)

    common: dict[str, Any] = {
        "device": device_name(torch.device(floors.plan.device)),
        "rates": floors.rates,
        "config": {"benchmark": asdict(benchmark),
                   "engine": deployment.model_dump(mode="json", exclude={"server"})},
    }  # fmt: skip
    of_short = f"{benchmark.short} streams of {benchmark.short_tokens:,} tokens, {short.name}"
    of_long = f"{benchmark.long} streams of {benchmark.long_tokens:,} tokens, {long.name}"
    crowded = {"no_core_left_ms": short_crowded.token_ms}
    yield _row("a token beside long streams", of_short, short_beside, short_floor, short_alone, crowded, common)
    lanes = {"lanes": lanes_together, "alone_lanes": lanes_alone, "no_core_left_lanes": lanes_crowded,
             "no_core_left_ms": long_crowded.token_ms, "ready_s": ready_s}  # fmt: skip
    yield _row("a token beside short streams", of_long, long_beside, long_floor, long_alone, lanes, common)
    prefill_floor = floors.prefill(long, benchmark.long_tokens)
    ms, alone_ms = 1e3 * prefill_beside, 1e3 * prefill_alone
    median, p99, longest = np.quantile(gaps[0] or [0.0], (0.5, 0.99, 1.0)).tolist()
    extras = {"median_gap_ms": median, "p99_gap_ms": p99, "longest_gap_ms": longest,
              "gap_target_ms": deployment.scheduler.token_gap_target_ms, "beside_alone": ms / alone_ms,
              "alone_median_gap_ms": float(np.median(long_alone.gaps_ms or [0.0])),
              "hop_wait_us": lanes_prefill["hop_wait_us"], "alone_hop_wait_us": lanes_alone["hop_wait_us"],
              "longest_piece_tokens": client.engine._runner.dense.longest_piece, "lanes": lanes_prefill}  # fmt: skip
    console.print(f"a prompt beside the long streams: {prefill_beside:.2f} s; their gaps {median:.0f} ms, 99 of 100 "
                  f"within {p99:.0f}, at most {longest:.0f}", highlight=False)  # fmt: skip
    yield Row(
        name="prefill beside streams", shape=f"{benchmark.long_tokens:,} tokens beside {of_long}",
        ms=ms, p10=ms, p90=ms,
        floor=prefill_floor.text, floor_ms=prefill_floor.ms, peer="alone", peer_ms=alone_ms, extras=extras, **common,
    )  # fmt: skip


def _row(
    name: str, shape: str, beside: Streams, floor: Floor, alone: Streams, more: dict[str, Any], common: dict[str, Any]
) -> Row:
    timing = summarise(beside.gaps_ms)
    extras = {
        "tokens_per_s_of_alone": alone.token_ms / beside.token_ms,
        "longest_gap_ms": max(beside.gaps_ms),
        "alone_longest_gap_ms": max(alone.gaps_ms),
        **more,
    }
    return Row(
        name=name, shape=shape, ms=beside.token_ms, p10=timing.p10, p90=timing.p90, floor=floor.text,
        floor_ms=floor.ms, peer="alone", peer_ms=alone.token_ms, extras=extras, **common,
    )  # fmt: skip


def _start(client: Client, num_streams: int, num_tokens: int, profile: Profile) -> list[str]:
    """So many requests, each with its first token."""
    request_ids = []
    for _ in range(num_streams):
        most = min(100_000, client.longest_tokens[profile.name] - num_tokens)
        request_ids.append(client.submit(client.prompt(num_tokens), most, profile.name, GREEDY))
        client.until_first_token(request_ids[-1])
    return request_ids


def _first_token(
    client: Client, num_tokens: int, profile: Profile, groups: Sequence[Sequence[str]] = (),
    gaps_ms: Sequence[list[float]] = (),
) -> float:  # fmt: skip
    """Return seconds until one more prompt's first token; then it is let go. gaps_ms: of groups that go on
    meanwhile.
    """
    request_id = client.submit(client.prompt(num_tokens), 2, profile.name, GREEDY)
    began = time.perf_counter()
    clock = _Clock(groups)
    while not clock.advance(client, request_id):
        pass
    seconds = time.perf_counter() - began
    for own, all_gaps in zip(gaps_ms, clock.gaps_ms(), strict=True):
        own += all_gaps
    client.engine.cancel([request_id])
    return seconds


def _watch(
    client: Client, groups: Sequence[Sequence[str]], seconds: float
) -> tuple[list[Streams], dict[str, Any]]:  # fmt: skip
    """Return each group's tokens in a window, and what the lanes did, behind a share of it that warms up."""
    _stream(client, groups, _WARM_UP_SHARE * seconds)
    with LaneWatch(client) as watch:
        streams = _stream(client, groups, seconds)
    return streams, watch.told()


def _stream(client: Client, groups: Sequence[Sequence[str]], seconds: float) -> list[Streams]:
    clock, began = _Clock(groups), time.perf_counter()
    while time.perf_counter() - began < seconds:
        clock.advance(client, None)
    taken = time.perf_counter() - began
    return [
        Streams(gaps_ms, 1e3 * taken * len(group) / max(count, 1))
        for gaps_ms, group, count in zip(clock.gaps_ms(), groups, clock.num_tokens(), strict=True)
    ]


class _Clock:
    """The times at which tokens of requests, in groups, were told of."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self._groups = groups
        self._times: dict[str, list[float]] = {one: [] for group in groups for one in group}

    def advance(self, client: Client, awaited: str | None) -> bool:
        """Return whether a request that is awaited has a token."""
        has_come = False
        for delta in client.advance():
            now = time.perf_counter()
            has_come |= delta.request_id == awaited and bool(delta.token_ids)
            if delta.request_id in self._times:
                self._times[delta.request_id] += [now] * len(delta.token_ids)
        return has_come

    def num_tokens(self) -> list[int]:
        """Of each group."""
        return [sum(len(self._times[one]) for one in group) for group in self._groups]

    def gaps_ms(self) -> list[list[float]]:
        """Of each group."""
        return [
            [1e3 * (after - before) for one in group for before, after in pairwise(self._times[one])]
            for group in self._groups
        ]
