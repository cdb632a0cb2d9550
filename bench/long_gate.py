"""Compare answers over host memory with full attention before anything is timed.

Requests of a few thousand tokens, enough to fill both half batches, are decoded greedily through each kind of step with
host reads. Then each prompt is computed with its answer in one prefill, which returns the log probability of every
token. So a choice between two tokens that are nearly equal does not end the comparison. The allowed difference of log
probabilities is measured: that of the device's own decode from its own prefill, and a rounding.

The prefill is that of `exact`. Where `gpu.kv` is int8 or fp8 it is that of `offloaded`, which attends to rows before
they are rounded. A prefill of `exact` would attend to rounded rows. Where a prompt repeats one token, these all have
the same error, which no average reduces (shape `tiny`, `kv: int8`: 0.014 nats, where `indexed` is off by 0.002).

Over random tokens an average of values is nearly zero, and a lost head would go unnoticed. So for `offloaded`, which
reads all tokens, prompts repeat one token in stretches: with a wrong layer or head, or without a stretch, an answer is
off by several times the rounding. For `sampled` a prompt is one token throughout, so all values are equal, and so is
every sample's average. That does not show which keys were sampled: `bench.sample_gate` compares the answers of a few
more steps, over random tokens, with the expected sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console

from bench.benchmark_rows import require
from bench.long_client import Client
from bench.sample_gate import SampleAgreement, measure_samples, require_samples
from gpu.page_layout import CODE_FORMATS, KvFormat
from gpu.profiles import Profile
from gpu.sampling_params import SamplingParams
from scheduler.messages import Logprob
from scheduler.sequences.capacity import HostCapacity
from transfer.host_memory import TAIL_TOKENS
from transfer.reading import Reading

ROWS = 3  # most rows of a batch: a half batch of two, and one of one
STRETCHES = 8
STEPS = 32  # of the whole batch; requests before the last one have drawn more
MORE_TOKENS = 64  # longer than the shortest prompt that is offloaded and sampled
MOST_TOKENS = 512  # of an answer
WATCHED_STEPS = 2
_GREEDY = SamplingParams(temperature=0.0, num_logprobs=5)
_FOLLOWED = SamplingParams(temperature=0.0, num_prompt_logprobs=5)

# Root mean squares of differences in log probability, in nats. In bf16 with 12 layers the device differs from itself by
# 0.03, and the host path from it by as much; with one query head's answer lost in one of ten layers it is 0.07. In
# float32, rows in bf16 give 0.0004, rows in int8 0.0015, and the lost answer 0.06. With the shape `tiny`,
# rows in int4 give 0.04, and the lost answer 0.21.
OWN = 0.2  # most difference of the device from itself: beyond that, nothing can be compared with it
TIMES_OWN = 2.0
ROUNDING = {"bfloat16": 0.003, "int8": 0.01, "int4": 0.1}
SAMPLED = 0.1  # allowed in addition: a sample's mass is an estimate, weighed against the answer's own tokens (0.02)
MOST_TIMES = 8.0  # limit for a single token, as a multiple of that for the root mean square


@dataclass(slots=True)
class Answer:
    """A request's tokens so far, and its profile's log-probabilities of them."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a profile's answers agree with full attention.

    same: the share of tokens that full attention chooses too. apart: the root mean square of the differences of
    log-probabilities, over tokens that both list. allowed: the bound of `apart`. most_apart: the largest difference.
    behind: the most by which a chosen token's log-probability is below that of full attention's choice.
    """

    requests: int
    prompt_tokens: int
    tokens: int
    same: float
    apart: float
    most_apart: float
    behind: float
    allowed: float
    samples: SampleAgreement | None = None


def check_host_path(
    client: Client,
    capacity: HostCapacity,
    kv: KvFormat,
    rows: str,
    profiles: Sequence[Profile],
    batch: int,
    console: Console,
) -> dict[str, Agreement]:
    """Compare steps over host memory with exact ones, for `offloaded` and each profile of `profiles` that estimates.

    kv: the format of rows on the device. rows: their format in host memory. batch: the largest that will be timed.
    Returns the agreement by profile. Raises GateError if a profile does not agree with full attention.
    """
    if not any(profile.offloads for profile in profiles):
        return {}
    agreements = {}
    full = "offloaded" if kv in CODE_FORMATS else "exact"
    readings = {"offloaded": Reading.WHOLE} | {
        profile.name: profile.reading for profile in profiles if profile.reading.is_estimate
    }
    for name, reading in readings.items():
        is_estimate = reading.is_estimate
        num_tokens = _prompt_tokens(client, capacity.of(name), name)
        stretches = 1 if is_estimate else STRETCHES
        prompts = [
            np.repeat(client.prompt(stretches), -(-num_tokens // stretches))[:num_tokens].tolist()
            for _ in range(min(batch, ROWS))
        ]
        own = _measure(
            client, [answer for prompt in prompts for answer in _decode(client, [prompt], "exact")], OWN, "exact"
        )
        _require("exact", own)
        before = client.host_stats()
        answers = _decode(client, prompts, name)
        after = client.host_stats()
        allowed = TIMES_OWN * own.apart + ROUNDING[rows] + (SAMPLED if is_estimate else 0.0)
        agreements[name] = agreement = _measure(client, answers, allowed, full)
        _print(console, name, agreement, own)
        _require(name, agreement)
        reads_on_cpu = reading.has_tables or not is_estimate
        require(
            not reads_on_cpu or after.rows_read > before.rows_read,
            f"{name}: the CPU read nothing of {num_tokens:,} tokens",
        )
        failed = after.method_counts.get("host_tables_failed", 0)
        require(failed == 0, f"{name}: tables of {failed} layers could not be built")
        if reading.has_tables:
            samples = check_samples(client, name, num_tokens, len(prompts), console)
            agreements[name] = replace(agreement, samples=samples)
    client.forget_contexts()
    return agreements


def check_samples(client: Client, name: str, num_tokens: int, rows: int, console: Console) -> SampleAgreement:
    """Compare each answer of sampled steps with the keys that collide, for `rows` requests with one offloaded prompt.

    num_tokens: of the prompt. Raises GateError if too few answers agree, or the CPU read another number of keys.
    """
    prompt, request_ids = client.prompt(num_tokens), []
    for _ in range(rows):
        most = min(MOST_TOKENS, client.longest_tokens[name] - num_tokens)
        request_ids.append(client.submit(prompt, most, name, _GREEDY))
        client.until_first_token(request_ids[-1])
    before = client.host_stats().rows_read
    with client.watch_samples() as watched:
        for _ in range(WATCHED_STEPS):
            client.advance()
    found = measure_samples(watched.tier, watched.asks, client.host_stats().rows_read - before)
    client.drain(request_ids)
    console.print(
        f"gate, {name}: {found.agree:.2%} of {found.answers:,} answers are of the keys that collide; "
        f"{found.counted_reads:,} keys read, {found.predicted_reads:,} predicted",
        highlight=False,
        soft_wrap=True,
    )
    require_samples(name, found)
    return found


def _prompt_tokens(client: Client, capacity: HostCapacity, name: str) -> int:
    """Return the length of a prompt that is offloaded and fits the device whole, and is long enough for a sample if
    possible.
    """
    sampled = capacity.sink_tokens + capacity.window_tokens + TAIL_TOKENS
    most = min(client.longest_tokens["exact"], client.longest_tokens[name]) - STEPS
    num_tokens = min(max(capacity.resident_tokens, sampled) + MORE_TOKENS, most)
    require(
        capacity.prompt_end(num_tokens) > 0,
        f"a prompt is offloaded from {capacity.resident_tokens + 1:,} tokens on, and exact and {name} have room for "
        f"{most:,} and an answer: nothing to compare; lower host.resident_tokens or raise gpu.kv_cache_gib",
    )
    return num_tokens


def _decode(client: Client, prompts: Sequence[list[int]], profile: str) -> list[Answer]:
    """Decode greedy answers of all prompts together. Each is submitted when the one before has its first token."""
    answers: dict[str, Answer] = {}
    for prompt in prompts:
        most = min(MOST_TOKENS, client.longest_tokens[profile] - len(prompt))
        request_id = client.submit(prompt, most, profile, _GREEDY)
        answers[request_id] = Answer(prompt)
        while not answers[request_id].token_ids:
            _collect(client, answers)
    for _ in range(STEPS):
        _collect(client, answers)
    client.drain(list(answers))
    return list(answers.values())


def _collect(client: Client, answers: dict[str, Answer]) -> None:
    for delta in client.advance():
        answers[delta.request_id].token_ids += delta.token_ids
        answers[delta.request_id].logprobs += delta.logprobs or []


def _measure(client: Client, answers: Sequence[Answer], allowed: float, full: str) -> Agreement:
    """Compute full attention's log probabilities of the answers, as far as they fit, and compare them.

    full: the profile whose prefill computes them.
    """
    differences: list[float] = []
    behind: list[float] = []
    for answer in answers:
        token_ids = answer.token_ids[: client.longest_tokens[full] - len(answer.prompt)]
        followed = client.prompt_logprobs(answer.prompt + token_ids, full, _FOLLOWED)[len(answer.prompt) - 1 :]
        for ours, exact in zip(answer.logprobs, followed, strict=False):
            by_token = dict(exact.top)
            differences += [logprob - by_token[token] for token, logprob in ours.top if token in by_token]
            behind.append(exact.top[0][1] - exact.logprob)
    apart, gaps = np.asarray(differences), np.asarray(behind)
    require(len(apart) > 0, "no token that full attention finds likely is likely in the answers")
    return Agreement(
        requests=len(answers),
        prompt_tokens=len(answers[0].prompt),
        tokens=len(gaps),
        same=float((gaps == 0).mean()),
        apart=float(np.sqrt(np.mean(apart**2))),
        most_apart=float(np.abs(apart).max()),
        behind=float(gaps.max()),
        allowed=allowed,
    )


def _print(console: Console, name: str, found: Agreement, own: Agreement) -> None:
    console.print(
        f"gate, {name}: {found.requests} x {found.prompt_tokens:,} tokens, {found.tokens} drawn, {found.same:.1%} of "
        f"them full attention's choice, others {found.behind:.4f} nats behind it at most; log-probabilities "
        f"{found.apart:.4f} apart (the device from itself {own.apart:.4f}, allowed {found.allowed:.4f}), at most "
        f"{found.most_apart:.4f}",
        highlight=False,
        soft_wrap=True,
    )


def _require(name: str, found: Agreement) -> None:
    require(
        found.apart <= found.allowed,  # False for NaN
        f"{name}: log-probabilities are {found.apart:.4f} nats from full attention's (root mean square); "
        f"wanted {found.allowed:.4f} or less",
    )
    single = MOST_TIMES * found.allowed
    worst = max(found.most_apart, found.behind)
    require(worst <= single, f"{name}: a token is {worst:.4f} nats from full attention; wanted {single:.4f} or less")
