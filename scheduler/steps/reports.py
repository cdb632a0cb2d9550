"""Messages to requests: deltas as tokens are drawn, progress while their prompt is prefilled."""

import time

import numpy as np
from msgspec import structs

from gpu.step import NOT_FINITE, NOTHING_LEFT, SampledToken, TokenLogprob
from scheduler.messages import Delta, Logprob, Progress
from scheduler.prefill.prefill_queue import JobInProgress
from scheduler.sequences.sequence import Sequence

_WHY_NOTHING = {
    NOT_FINITE: "logits: not finite for this request; nothing could be drawn",
    NOTHING_LEFT: "logits: no token has a finite score under this request's bias, penalties, min_tokens and what it "
    "allows; relax them",
}


def finish_reason(sequence: Sequence, token_id: int) -> str | None:
    """Why this draw, not yet appended, ends the sequence, or None. The sampler draws no stop token before its time."""
    request = sequence.request
    num_output = sequence.num_output_tokens + 1
    if token_id < 0:
        return "error"
    if request.max_tokens and token_id in request.stop_token_ids:
        return "stop"
    return "length" if num_output >= request.max_tokens else None


def make_delta(
    sequence: Sequence,
    token: SampledToken,
    prompt_logprobs: list[TokenLogprob] | None,
    pooled: np.ndarray | None,
    reason: str | None,
) -> Delta:
    """The message for one draw. Cached tokens come with all; prompt logprobs and times with the first."""
    request = sequence.request
    token_ids = [token.token_id] if token.token_id >= 0 and request.max_tokens else []
    first, sequence.has_reported = not sequence.has_reported, True
    started_s = sequence.started_s if first else None
    return Delta(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=[_message(token.logprob)] if token_ids and token.logprob is not None else None,
        prompt_logprobs=[_message(entry) for entry in prompt_logprobs] if prompt_logprobs and first else None,
        pooled=None if pooled is None else pooled.tobytes(),
        finish_reason=reason,
        error=_WHY_NOTHING[token.token_id] if reason == "error" else None,
        num_cached_tokens=sequence.num_cached_tokens,
        reused_tokens=sequence.num_reused_tokens,
        recomputed_tokens=sequence.num_recomputed_tokens,
        queue_seconds=None if started_s is None else started_s - request.arrival_s,
        prefill_seconds=None if started_s is None else time.monotonic() - started_s,
    )


def join_deltas(last: Delta, told: list[Delta]) -> list[Delta]:
    """`last` and what is told of the same request behind it: one message, where that goes on with tokens."""
    more = told[0]
    if not (more.token_ids and last.token_ids):
        return [last, *told]
    joined = structs.replace(
        last,
        token_ids=last.token_ids + more.token_ids,
        logprobs=None if last.logprobs is None or more.logprobs is None else last.logprobs + more.logprobs,
        finish_reason=more.finish_reason,
    )
    return [joined, *told[1:]]


def make_failure(sequence: Sequence, why: str, may_retry: bool = False) -> Delta:
    """Return the message for a sequence that cannot go on; `may_retry`: another try may succeed."""
    return Delta(
        request_id=sequence.request_id,
        token_ids=[],
        finish_reason="error",
        error=why,
        may_retry=may_retry,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def make_end(sequence: Sequence) -> Delta:
    """The message for a sequence whose grammar allows nothing behind what was told of it."""
    return Delta(
        request_id=sequence.request_id,
        token_ids=[],
        finish_reason="stop",
        num_cached_tokens=sequence.num_cached_tokens,
        reused_tokens=sequence.num_reused_tokens,
        recomputed_tokens=sequence.num_recomputed_tokens,
    )


def make_progress(entry: JobInProgress, num_layers: int) -> list[Progress]:
    """How far a prefill job is, for each of its members: they advance together."""
    if not entry.sequences:  # chunks
        return []
    share = 1.0 - entry.remaining(num_layers) / entry.total(num_layers)
    return [
        Progress(
            request_id=sequence.request_id,
            done_tokens=prompt.begin + int(share * prompt.num_computed_tokens),
            total_tokens=len(prompt.token_ids),
            cached_tokens=prompt.begin,
        )
        for sequence, prompt in zip(entry.sequences, entry.job.prompts, strict=True)
    ]


def _message(entry: TokenLogprob) -> Logprob:
    return Logprob(entry.logprob, entry.top)
