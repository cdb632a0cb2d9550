"""Compute the figures of a run from its records: counts, rates, percentiles, goodput.

Invariant: due = completed + failed + unfinished + skipped, and each latency has its number of requests. Latencies are
of completed requests. Rates divide by the whole run, including the wait for the last answer.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.load.records import RequestRecord


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and maximum of `num` values in ms (linear interpolation between ranks); NaN without values."""

    num: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Latencies in ms, rates per second, shares 0 to 1; None if not known.

    ttft, e2el: from when the request was due. later_ttft: of a conversation's turns after its first. tpot: mean per
    token after the first. itl: gaps between chunks of output. send_lag: how late the client sent. cached, reused,
    recomputed: shares of prompt tokens that were in the prefix cache; of documents with stored keys and values that
    were used; and of those that were computed again. accepted_tokens, rejected_tokens: of drafts. goodput_*: completed
    requests within every limit, over the run and over all due.
    """

    wall_s: float
    due: int
    completed: int
    failed: int
    unfinished: int
    skipped: int
    reasons: dict[str, int]
    http_429: int
    retries: int
    asked_rate: float | None
    offered_rate: float
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    prompt_tokens: int
    output_tokens: int
    lost_output_tokens: int
    cached_share: float | None
    reused_share: float | None
    recomputed_share: float | None
    accepted_tokens: int
    rejected_tokens: int
    output_sources: dict[str, int]
    tokens_per_chunk: float
    num_chunk_mismatches: int
    mean_length_error_tokens: float | None
    peak_concurrency: int
    ttft: Spread
    later_ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    send_lag: Spread
    slo: dict[str, float]
    goodput_rate: float | None
    goodput_share: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a tree for JSON, in which NaN is replaced by None."""
        tree: dict[str, Any] = _replace_nan(asdict(self))
        return tree


def spread_ms(values_s: Iterable[float]) -> Spread:
    """Return the mean and percentiles, in ms, of values in seconds."""
    values = np.asarray(list(values_s)) * 1e3
    if not values.size:
        return Spread(0, *[float("nan")] * 6)
    p10, p50, p90, p99 = (float(value) for value in np.percentile(values, [10, 50, 90, 99]))
    return Spread(values.size, float(values.mean()), p10, p50, p90, p99, float(values.max()))


def summarise(
    records: Sequence[RequestRecord], wall_s: float, asked_rate: float | None, slo: dict[str, float]
) -> Summary:
    """Summarise a run of `wall_s` seconds. slo: limits in ms by key, as parse_slo returns them."""
    done = [record for record in records if record.outcome == "completed"]
    outcomes = Counter(record.outcome for record in records)
    output_tokens = sum(record.output_tokens for record in done)
    prompt_tokens = sum(_count_prompt(record) for record in done)
    good = [record for record in done if meets(record, slo)]
    last_due_s = max((record.due_s for record in records if record.turn == 0), default=0.0)
    num_chunks = sum(len(record.chunk_times_s) for record in done)
    errors = [
        record.prompt_tokens - record.asked_tokens
        for record in done
        if record.prompt_tokens is not None and record.asked_tokens is not None
    ]
    wall_s = max(wall_s, 1e-9)
    return Summary(
        wall_s=wall_s,
        due=len(records),
        completed=len(done),
        failed=outcomes["failed"],
        unfinished=outcomes["unfinished"],
        skipped=outcomes["skipped"],
        reasons=dict(Counter(record.reason for record in records if record.outcome != "completed").most_common()),
        http_429=sum(record.num_429 for record in records),
        retries=sum(record.retries for record in records),
        asked_rate=asked_rate,
        offered_rate=sum(record.turn == 0 for record in records) / max(last_due_s, 1e-9) if last_due_s else 0.0,
        request_rate=len(done) / wall_s,
        output_token_rate=output_tokens / wall_s,
        total_token_rate=(output_tokens + prompt_tokens) / wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        lost_output_tokens=sum(record.output_tokens for record in records if record.outcome != "completed"),
        cached_share=_share_of_prompts(done, "cached_tokens"),
        reused_share=_share_of_prompts(done, "reused_tokens"),
        recomputed_share=_share_of_prompts(done, "recomputed_tokens"),
        accepted_tokens=sum(record.accepted_tokens or 0 for record in done),
        rejected_tokens=sum(record.rejected_tokens or 0 for record in done),
        output_sources=dict(Counter(record.output_source for record in done)),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else float("nan"),
        num_chunk_mismatches=sum(record.output_tokens != len(record.chunk_times_s) for record in done),
        mean_length_error_tokens=float(np.mean(errors)) if errors else None,
        peak_concurrency=count_peak(records),
        ttft=spread_ms(record.ttft_s for record in done),
        later_ttft=spread_ms(record.ttft_s for record in done if record.turn > 0),
        tpot=spread_ms(record.tpot_s for record in done if record.tpot_s is not None),
        itl=spread_ms(gap for record in done for gap in record.gaps_s),
        e2el=spread_ms(record.e2el_s for record in done),
        send_lag=spread_ms(record.sent_s - record.due_s for record in records if record.outcome != "skipped"),
        slo=slo,
        goodput_rate=len(good) / wall_s if slo else None,
        goodput_share=len(good) / len(records) if slo and records else None,
    )


def meets(record: RequestRecord, slo: dict[str, float]) -> bool:
    """Return whether a request completed within every limit (ms). A single token has neither tpot nor gap."""
    if record.outcome != "completed":
        return False
    got_s = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s or 0.0,
        "gap": max(record.gaps_s, default=0.0),
        "e2el": record.e2el_s,
    }
    return all(got_s[key] * 1e3 <= limit for key, limit in slo.items())


def count_peak(records: Iterable[RequestRecord]) -> int:
    """Return the most requests open at once. A request that ends as another is sent does not overlap it."""
    sent = [record for record in records if record.end_s > record.sent_s]
    events = sorted([(record.sent_s, 1) for record in sent] + [(record.end_s, -1) for record in sent])
    return max(np.cumsum([step for _, step in events]).tolist(), default=0)


def _count_prompt(record: RequestRecord) -> int:
    return record.prompt_tokens if record.prompt_tokens is not None else record.asked_tokens or 0


def _share_of_prompts(done: Sequence[RequestRecord], kind: str) -> float | None:
    """Return the share of prompt tokens that the server reported as `kind`; None if it did not report any."""
    told = [record for record in done if getattr(record, kind) is not None and record.prompt_tokens]
    total = sum(record.prompt_tokens or 0 for record in told)
    return sum(getattr(record, kind) for record in told) / total if total else None


def _replace_nan(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _replace_nan(value) for key, value in tree.items()}
    if isinstance(tree, float) and not np.isfinite(tree):
        return None
    return tree
