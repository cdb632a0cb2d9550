"""Run `tandem bench prefill`: time the first tokens of long prompts and of a conversation's next turn, in the engine.

For each profile and length, two prompts with different tokens run one after the other. The first pins the host memory
that it needs, so that the second finds it. The floor is the prompt's arithmetic, or the offload of its rows, at this
machine's measured rates. The peer is such a second prompt with FlashAttention alone. The gate is that of `tandem bench
long`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console

from bench.as_served import layers_as_served
from bench.benchmark_rows import Row, announce
from bench.long_client import GREEDY, Client
from bench.long_floors import Floor, LongFloors, measure_floors
from bench.long_gate import check_host_path
from bench.rates import device_name
from gpu.profiles import Profile, get_profile, resolve_profiles
from scheduler.engine.load_engine import load_engine
from server.deployment import Deployment

GIB = 2**30

_ANSWER_TOKENS = 16  # of a first turn
_LAUNCHED_TOKENS = 64  # of a prompt so short that its time is that of its launches
_PEER = "FlashAttention alone, in the same engine"


@dataclass(frozen=True, slots=True)
class PrefillBenchmark:
    """The settings of `tandem bench prefill`.

    lengths: of prompts in tokens, ascending. turn: tokens of a conversation's first prompt, or 0. question: tokens that
    its next prompt adds. peers: also time FlashAttention alone.
    """

    lengths: tuple[int, ...]
    profiles: tuple[str, ...]
    turn: int
    question: int
    peers: bool


def run_prefill_benchmark(benchmark: PrefillBenchmark, deployment: Deployment, console: Console) -> Iterator[list[Row]]:
    """Yield the rows so far, after each profile.

    Raises GateError, before anything is timed, if the host path computes wrong results.
    """
    deployment = layers_as_served(deployment)
    served = resolve_profiles(deployment.all_profiles, deployment.host)
    profiles = [get_profile(name, served, "--profiles") for name in benchmark.profiles]
    assert deployment.host is not None, "prefill: a deployment with a host section"
    floors = measure_floors(deployment)
    for profile in profiles:
        for length in benchmark.lengths:
            announce(console, f"prefill, {profile.name}, {length:,} tokens", *floors.prefill(profile, length))
    engine, ready = load_engine(deployment, floors.plan, lambda *_: None)
    try:
        client = Client(engine, ready.vocab_size, ready.profiles)
        offloading = [profile for profile in profiles if profile.offloads]
        if offloading:
            with client.fixed_residence():
                check_host_path(client, floors.capacity, floors.plan.kv, deployment.host.rows, offloading, 1, console)
        rows: list[Row] = []
        for profile in profiles:
            rows += _Bench(benchmark, deployment, client, profile, floors, console).rows()
            yield rows
    finally:
        engine.shutdown()


@dataclass(frozen=True, slots=True)
class _Bench:
    """Measures prefill under one profile."""

    benchmark: PrefillBenchmark
    deployment: Deployment
    client: Client
    profile: Profile
    floors: LongFloors
    console: Console

    def rows(self) -> list[Row]:
        rows = []
        if self.benchmark.lengths[0] > _LAUNCHED_TOKENS:
            rows.append(self._short_row())
        for length in self.benchmark.lengths:
            if not self._has_room(length):
                continue
            rows.append(self._row_of(length))
        turn = self.benchmark.turn
        if turn and self._has_room(turn + _ANSWER_TOKENS + self.benchmark.question):
            rows.append(self._turn_row())
        return rows

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether a prompt and its answer fit, and print it if they do not."""
        has_room = num_tokens + _ANSWER_TOKENS <= self.client.longest_tokens[self.profile.name]
        if not has_room:
            self.console.print(f"{self.profile.name}: {num_tokens:,} tokens do not fit", highlight=False)
        return has_room

    def _short_row(self) -> Row:
        seconds = [self._first_token(self.client.prompt(_LAUNCHED_TOKENS)) for _ in range(5)]
        floor = self.floors.prefill(self.profile, _LAUNCHED_TOKENS)
        return self._row("prefill, launches", f"{_LAUNCHED_TOKENS} tokens", floor, sorted(seconds)[2], None, {})

    def _row_of(self, length: int) -> Row:
        first, second = (self._first_token(self.client.prompt(length)) for _ in range(2))
        peer = self._peer_seconds(length) if self.benchmark.peers else None
        floor = self.floors.prefill(self.profile, length)
        text = "" if peer is None else f", FlashAttention alone {peer:.3f} s"
        extras = {"first_prompt_ms": 1e3 * first}
        if self.floors.plan.device == "cuda":
            extras["device_gib"] = torch.cuda.max_memory_reserved() / GIB
            text += f", {extras['device_gib']:.1f} GiB reserved at the most so far"
        self.console.print(
            f"{self.profile.name}, {length:,} tokens: first {first:.3f} s, second {second:.3f} s "
            f"({1e3 * second / floor.ms:.2f} of the floor){text}",
            highlight=False,
        )
        return self._row("prefill", f"{length:,} tokens", floor, second, peer, extras)

    def _turn_row(self) -> Row:
        """Return the row of a conversation's next turn, the second of two conversations."""
        benchmark, seconds = self.benchmark, 0.0
        for _ in range(2):
            prompt = self.client.prompt(benchmark.turn)
            answer = self.client.finish(
                self.client.submit(prompt, _ANSWER_TOKENS, self.profile.name, GREEDY)
            )  # fmt: skip
            seconds = self._first_token([*prompt, *answer, *self.client.prompt(benchmark.question)], forgets=False)
            self._forget()
        begin = benchmark.turn + _ANSWER_TOKENS
        floor = self.floors.next_turn(self.profile, benchmark.turn, begin, begin + benchmark.question)
        shape = f"{benchmark.question} tokens over {benchmark.turn:,}"
        self.console.print(f"{self.profile.name}, next turn of {shape}: {seconds:.3f} s", highlight=False)
        return self._row("next turn", shape, floor, seconds, None, {})

    def _peer_seconds(self, length: int) -> float | None:
        """Return the seconds with FlashAttention alone; None if no other kernel was chosen."""
        dense = self.client.engine._runner.dense
        choice = dense.choice
        if choice is None or not choice.least_past:
            return None
        dense.choice = replace(choice, least_past={}, most_square=0)
        try:
            return self._first_token(self.client.prompt(length))
        finally:
            dense.choice = choice

    def _first_token(self, prompt: list[int], forgets: bool = True) -> float:
        request_id = self.client.submit(prompt, 2, self.profile.name, GREEDY)
        seconds = self.client.until_first_token(request_id)
        self.client.drain([request_id])
        if forgets:
            self._forget()
        return seconds

    def _forget(self) -> None:
        """Free what the prompt offloaded, so that the next one finds the same room."""
        self.client.forget_contexts()

    def _row(
        self, name: str, shape: str, floor: Floor, seconds: float, peer: float | None, extras: dict[str, float]
    ) -> Row:
        choice = self.client.engine._runner.dense.choice
        return Row(
            name=f"{name}, {self.profile.name}",
            shape=shape,
            device=device_name(torch.device(self.floors.plan.device)),
            ms=1e3 * seconds,
            p10=1e3 * seconds,
            p90=1e3 * seconds,
            floor=floor.text,
            floor_ms=floor.ms,
            peer=None if peer is None else _PEER,
            peer_ms=None if peer is None else 1e3 * peer,
            rates=self.floors.rates,
            extras={**extras, "attention": None if choice is None else choice.as_row()},
            config=self.deployment.model_dump(mode="json") | {"benchmark": asdict(self.benchmark)},
        )
