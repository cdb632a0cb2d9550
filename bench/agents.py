"""Run `tandem bench agents`: conversations that take turns on one device, and how long each waits for a first token.

All begin with the same system prompt, and each continues with tokens of its own. In every turn, one agent after another
sends its whole history and some new tokens, and adds the answer to its history. So what a turn computes again is what
the server has evicted meanwhile. The peer of a turn is the prefill of a whole first prompt, timed once before the
agents begin. The floor is the bytes that are reloaded from host memory or disk, over the rate of the link.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count

from rich.console import Console

from bench.benchmark_rows import Row, announce, require, summarise
from bench.long_client import GREEDY, Client
from bench.rates import device_name, measure_device_rates
from scheduler.engine.load_engine import load_engine
from scheduler.messages import CACHED_FROM, EngineRequest, cached_figure, pack_tokens
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from transfer.machine import probe_machine


@dataclass(frozen=True, slots=True)
class AgentsBenchmark:
    """The settings of `tandem bench agents`, in tokens except `agents` and `turns`.

    context: length of each agent's first prompt; shared: its first tokens, which are the same for all. question: new
    tokens of each later turn. answer: tokens drawn in each turn. profile: None for the deployment's default.
    """

    agents: int
    context: int
    shared: int
    question: int
    answer: int
    turns: int
    profile: str | None


@dataclass(slots=True)
class _Turn:
    """A turn of all agents: milliseconds to each first token, tokens of each prompt, and where cached ones were."""

    first_ms: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached: Counter[str] = field(default_factory=Counter)


def run_agents_benchmark(benchmark: AgentsBenchmark, deployment: Deployment, console: Console) -> Iterator[list[Row]]:
    """Yield the rows so far, after each turn of all agents. Raises GateError where a request fails."""
    plan = resolve_plan(deployment, probe_machine())
    engine, ready = load_engine(plan.deployment, plan.memory, lambda *_: None)
    try:
        profile = benchmark.profile or plan.deployment.scheduler.default_profile or "exact"
        longest = benchmark.context + benchmark.turns * (benchmark.question + benchmark.answer)
        require(longest <= ready.profiles[profile], f"{longest:,} tokens of a {profile} request fit the deployment")
        bench = _Bench(benchmark, Client(engine, ready.vocab_size, ready.profiles), profile)
        device = engine._runner.device
        rates = measure_device_rates(device) if device.type == "cuda" else {}
        rows: list[Row] = []
        for turn in range(benchmark.turns):
            console.print(f"turn {turn + 1} of {benchmark.agents} agents, {profile}", highlight=False)
            rows.append(bench.row(turn, rates, plan.deployment, console))
            yield rows
    finally:
        engine.shutdown()


class _Bench:
    def __init__(self, benchmark: AgentsBenchmark, client: Client, profile: str) -> None:
        self._benchmark, self._client, self._profile = benchmark, client, profile
        shared = client.prompt(benchmark.shared)
        own = benchmark.context - benchmark.shared
        self._histories = [[*shared, *client.prompt(own)] for _ in range(benchmark.agents)]
        self._numbers = count()
        for tokens in (benchmark.question, benchmark.context):  # compile what prompts of these lengths run
            self._ask(client.prompt(tokens), "nobody", 2)
        self._computed_s = self._ask(client.prompt(benchmark.context), "nobody", 1)[0]

    def row(self, turn: int, rates: dict[str, float], deployment: Deployment, console: Console) -> Row:
        """Run one turn of all agents."""
        benchmark, seen = self._benchmark, _Turn()
        for agent, history in enumerate(self._histories):
            if turn:
                history += self._client.prompt(benchmark.question)
            seconds, answer, figures = self._ask(history, f"agent-{agent}", benchmark.answer)
            seen.first_ms.append(1e3 * seconds)
            seen.prompt_tokens.append(len(history))
            seen.cached.update({place: figures.get(cached_figure(place), 0) for place in CACHED_FROM})
            history += answer
        length = seen.prompt_tokens[0]
        moved = seen.cached["host"] + seen.cached["disk"]
        floor, floor_ms = self._floor(moved / benchmark.agents, rates)
        if floor_ms is not None:
            announce(console, f"turn {turn + 1}", floor, floor_ms)
        timing, total = summarise(seen.first_ms), sum(seen.prompt_tokens)
        places = ", ".join(f"{place} {100 * tokens / total:.0f} %" for place, tokens in seen.cached.items() if tokens)
        console.print(
            f"turn {turn + 1}: first tokens at the median {timing.ms:.0f} ms, at most {max(seen.first_ms):.0f}; "
            f"cached: {places or 'nothing'} of {total:,} tokens; "
            f"{benchmark.context:,} computed {1e3 * self._computed_s:.0f} ms",
            highlight=False,
        )  # fmt: skip
        return Row(
            name=f"first token, turn {turn + 1}",
            shape=f"{benchmark.agents} agents of {length:,} tokens, {self._profile}",
            device=device_name(self._client.engine._runner.device),
            floor=floor,
            floor_ms=floor_ms,
            peer="computing the first prompt, in the same engine",
            peer_ms=1e3 * self._computed_s,
            rates=rates,
            extras={"first_ms": seen.first_ms, "prompt_tokens": seen.prompt_tokens, "cached": dict(seen.cached)},
            config=deployment.model_dump(mode="json") | {"benchmark": asdict(benchmark)},
            **asdict(timing),
        )

    def _floor(self, moved_tokens: float, rates: dict[str, float]) -> tuple[str, float | None]:
        """Return the floor of an agent's turn in words, and in milliseconds; None if nothing crossed the link."""
        rate = rates.get("host_to_device_gb_s")
        if not moved_tokens or rate is None:
            return "none: nothing came over the link" if rate else "none: no link was measured", None
        pool = self._client.engine._runner.pool
        token_bytes = sum(arena.nbytes for arena in pool.arenas) / (pool.num_pages * pool.page_tokens)
        num_bytes = moved_tokens * token_bytes
        return f"{num_bytes / 1e9:.2f} GB over {rate:.0f} GB/s", num_bytes / rate / 1e6

    def _ask(self, prompt: list[int], session: str, max_tokens: int) -> tuple[float, list[int], dict[str, int]]:
        """Return the seconds to the first token, the answer, and the request's figures."""
        request = EngineRequest(
            request_id=f"{session}-{next(self._numbers)}", prompt=pack_tokens(prompt), sampling=GREEDY,
            max_tokens=max_tokens, stop_token_ids=(), attention_profile=self._profile, arrival_s=time.monotonic(),
            session=session,
        )  # fmt: skip
        began, first_s, answer = time.perf_counter(), 0.0, list[int]()
        self._client.engine.submit([request])
        while True:
            for delta in self._client.advance():
                if delta.request_id != request.request_id:
                    continue
                if not answer and delta.token_ids:
                    first_s = time.perf_counter() - began
                answer += delta.token_ids
                if delta.finish_reason is not None:
                    return first_s, answer, delta.figures
