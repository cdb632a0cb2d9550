"""Submit requests to an engine in this process, step it by hand, and count what its steps do.

Invariant: decode times are of steps that drew a token for each request of the batch, after others that warmed up.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np

from bench.benchmark_rows import require
from bench.engine_patches import set_adaptive
from bench.sample_gate import WatchedTier
from cpu.cpu_tier import CpuTier
from gpu.methods.counters import subtract_counts
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest, HostStats, Logprob, pack_tokens
from transfer.host_tier import HostTier

GREEDY = SamplingParams(temperature=0.0)
MIN_STEPS = 4  # measured at least, however long they take
READY_S = 120.0  # timeout until the tables of all contexts are built
_WARMUP_STEPS = 4
_NO_HOST = HostStats(**dict.fromkeys(HostStats.__struct_fields__, 0) | {"method_counts": {}})
_WARM_UP_STEPS = 16  # if they are short: by then each row has found the rows that it steps with


@dataclass(frozen=True, slots=True)
class Batch:
    """Decode at one batch: milliseconds a step, and counters of a step: where the time went, and what the CPU read."""

    step_ms: list[float]
    rows_read: float
    rows_down: float  # offloaded rows of all heads and layers
    wait_ms: float  # the host's wait for queries
    attend_ms: float
    kept_tokens: int  # tokens of all rows that are offloaded and still resident, at the end
    ready_ms: float  # until copies had landed and the tables of all rows were built, from the call on
    hits: float | None  # share of query heads that reused attention, of those that looked for a match; None: none did
    counts: Mapping[str, float]  # counters of methods over all layers, except those that are 0

    @property
    def mean_ms(self) -> float:
        """Return the mean milliseconds of a step. If rows step in both lanes, the median may be of steps with fewer
        rows.
        """
        return sum(self.step_ms) / len(self.step_ms)

    @property
    def fraction_read(self) -> float:
        """Return the share of the query heads' rows in host memory that was read; rows read for a whole group count
        once.
        """
        return self.rows_read / max(self.rows_down, 1.0)


class Client:
    """Requests to one engine, stepped by hand."""

    def __init__(self, engine: Engine, vocab_size: int, longest_tokens: dict[str, int]) -> None:
        """Take an engine without requests. longest_tokens: by profile, the most tokens of a request with its output."""
        self.engine = engine
        self.vocab_size = vocab_size
        self.longest_tokens = longest_tokens
        self._number = 0
        self._num_drawn = 0  # tokens that belong to the next step

    def prompt(self, num_tokens: int) -> list[int]:
        """Return random tokens, different ones at each call."""
        self._number += 1
        tokens: list[int] = np.random.default_rng(self._number).integers(0, self.vocab_size, num_tokens).tolist()
        return tokens

    def submit(self, prompt: list[int], max_tokens: int, profile: str, sampling: SamplingParams) -> str:
        request_id = f"long-{time.monotonic_ns()}"
        request = EngineRequest(
            request_id=request_id,
            prompt=pack_tokens(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=(),
            attention_profile=profile,
            arrival_s=time.monotonic(),
        )
        self.engine.submit([request])
        return request_id

    def advance(self) -> list[Delta]:
        """Run one step of the engine. Raises GateError if a request fails in it."""
        deltas = self.engine.step()
        for delta in deltas:
            require(delta.error is None, f"request failed: {delta.error}")
        return deltas

    def until_first_token(self, request_id: str) -> float:
        """Return the seconds until a request's first token. Other requests continue."""
        began = time.perf_counter()
        while True:
            for delta in self.advance():
                if delta.request_id == request_id and delta.token_ids:
                    return time.perf_counter() - began
                over = delta.request_id == request_id and delta.finish_reason
                require(not over, f"a request ended ({delta.finish_reason}) without a token")

    def until_ready(self) -> float:
        """Step until the tables of all rows are built, and return the seconds.

        Until then a row is left out of steps: for a prompt of 96K that lasts seconds after its first token. Raises
        GateError if it takes longer than READY_S.
        """
        began = time.perf_counter()
        while not self._is_ready():
            require(time.perf_counter() - began < READY_S, f"tables stand within {READY_S:.0f} s")
            self.advance()
        return time.perf_counter() - began

    def _is_ready(self) -> bool:
        scheduler, runner = self.engine.scheduler, self.engine._runner
        host_reads = [scheduler.residence.host_read(sequence) for sequence in scheduler.roster.running]
        return all(one is None or runner.is_ready(one) for one in host_reads)

    def finish(self, request_id: str) -> list[int]:
        """Return all tokens of a request that has not drawn any yet."""
        tokens: list[int] = []
        while True:
            for delta in self.advance():
                if delta.request_id == request_id:
                    tokens += delta.token_ids
                    if delta.finish_reason is not None:
                        return tokens

    def prompt_logprobs(self, prompt: list[int], profile: str, sampling: SamplingParams) -> list[Logprob]:
        """Return the log probabilities of each token of `prompt` but the first, computed by a prefill. sampling: says
        how many alternatives are listed.
        """
        request_id = self.submit(prompt, 0, profile, sampling)
        while True:
            for delta in self.advance():
                if delta.request_id == request_id:
                    assert delta.prompt_logprobs is not None, "asked for them, and no output"
                    return delta.prompt_logprobs

    def steps(self, batch: int, count: int, limit_s: float) -> Batch:
        """Time steps of `batch` requests: `count`, or those that begin within `limit_s` seconds, at least MIN_STEPS.

        First it waits until the tables of all rows are built, and runs steps that warm up, for at most half of limit_s
        or _WARMUP_STEPS. Raises GateError if fewer than `batch` requests are left: early requests may end while later
        prompts are computed.
        """
        ready_ms, self._num_drawn = 1e3 * self.until_ready(), 0
        left = len(self.engine.scheduler.roster.running)
        require(
            left >= batch, f"{left} of {batch} requests are left; a greater scheduler.max_context_tokens lets them draw"
        )
        warm_up = time.perf_counter()
        for number in range(_WARM_UP_STEPS):
            if number < _WARMUP_STEPS or time.perf_counter() - warm_up < limit_s / 2:
                self.step(batch)
        before, reused, counted = self.host_stats(), self.reuse_counts(), self.engine.stats().methods
        times: list[float] = []
        first = began = time.perf_counter()
        while len(times) < MIN_STEPS or (len(times) < count and began - first < limit_s):
            self.step(batch)
            now = time.perf_counter()
            times.append(1e3 * (now - began))
            began = now
        after = self.host_stats()
        tries, hits = (late - early for early, late in zip(reused, self.reuse_counts(), strict=True))
        grown = subtract_counts(self.engine.stats().methods, counted)
        counts = {name: sum(numbers) / len(times) for name, numbers in grown.items() if any(numbers)}
        return _difference(before, after, times, self.kept_tokens(), ready_ms, hits / tries if tries else None, counts)

    def reuse_counts(self) -> tuple[int, int]:
        """Return the numbers of query heads that looked for a match, and that found one, so far."""
        counts = self.engine.stats().methods
        return sum(counts.get("reuse_tries", ())), sum(counts.get("reuse_hits", ()))

    def kept_tokens(self) -> int:
        """Return the number of tokens in host memory that are also resident."""
        scheduler = self.engine.scheduler
        contexts = [sequence.open_context for sequence in scheduler.roster.running]
        blocks = sum(context.num_resident for context in contexts if context is not None)
        return blocks * scheduler.residence.page_tokens

    @contextmanager
    def fixed_residence(self) -> Iterator[None]:
        """Evict offloaded tokens at once while the context lasts, so that the host is asked for all of them."""
        evictor = self.engine.scheduler.residence.evictor
        assert evictor is not None, "fixed residence: of an engine with a host tier"
        was = evictor.is_adaptive
        set_adaptive(evictor, False)
        try:
            yield
        finally:
            set_adaptive(evictor, was)

    def step(self, batch: int) -> None:
        """Step until as many tokens are drawn as one step of `batch` requests draws. Raises GateError if a request
        ends.
        """
        while self._num_drawn < batch:
            for delta in self.advance():
                require(delta.finish_reason is None, f"a request ended ({delta.finish_reason}) before its steps")
                self._num_drawn += len(delta.token_ids)
        self._num_drawn -= batch

    def host_stats(self) -> HostStats:
        """Return the host tier's counters, after all launched steps; zeros without a tier."""
        self.engine._runner.decode_steps.drain()
        return self.engine.stats().host or _NO_HOST

    def seconds(self) -> dict[str, float]:
        """Return the host's seconds so far: those of the tier's threads, and of each part of steps on the host."""
        stats = self.host_stats()
        hops = asdict(self.engine._runner.host_read_times)
        return {"host_wait": stats.wait_seconds, "host_attend": stats.attend_seconds} | {
            f"hop_{name.removesuffix('_s')}": value for name, value in hops.items() if name.endswith("_s")
        }

    @contextmanager
    def watch_samples(self) -> Iterator[WatchedTier]:
        """Remember the requests of sampled steps and the tier's answers while the context lasts."""
        steps = self.engine._runner.decode_steps
        host_reader = steps.host_reader
        assert host_reader is not None, "the deployment has a host section"
        assert isinstance(host_reader.tier, CpuTier), "the engine's tier is the CPU's"
        watched = WatchedTier(host_reader.tier)
        steps.host_reader = replace(host_reader, tier=cast(HostTier, watched))
        try:
            yield watched
        finally:
            steps.host_reader = host_reader

    def drain(self, request_ids: Sequence[str]) -> None:
        self.engine.cancel(list(request_ids))
        while self.engine.has_work:
            self.engine.step()
        self.engine.step()

    def forget_contexts(self) -> None:
        """Free the host memory of finished requests, so that no later request begins with their prefixes."""
        contexts = self.engine.scheduler.residence.contexts
        assert contexts is not None, "the deployment has a host section"
        while contexts.evict_idle([]):
            pass
        self.drain([])


def _difference(
    before: HostStats, after: HostStats, times: list[float], kept_tokens: int, ready_ms: float, hits: float | None,
    counts: Mapping[str, float],
) -> Batch:  # fmt: skip
    count = len(times)
    return Batch(
        times,
        (after.rows_read - before.rows_read) / count,
        (after.tokens_covered - before.tokens_covered) / count,
        1e3 * (after.wait_seconds - before.wait_seconds) / count,
        1e3 * (after.attend_seconds - before.attend_seconds) / count,
        kept_tokens,
        ready_ms,
        hits,
        counts,
    )
