"""Turn the result of a step into messages for its requests.

Invariant: an accepted request gets exactly one final delta unless it is cancelled.
"""

import logging
import time

import numpy as np
from msgspec import structs

from gpu.step import NOT_FINITE, NOTHING_LEFT, SampledToken, StepResult, TokenLogprob
from scheduler.admission.roster import Roster
from scheduler.constraints.constraints import Constraints
from scheduler.messages import Delta, Logprob, Progress
from scheduler.prefill.cost_model import CostModel
from scheduler.prefill.job_in_progress import JobInProgress
from scheduler.residence.residence import Residence
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.launched_plan import LaunchedPlan

log = logging.getLogger(__name__)

_WHY_NOTHING = {
    NOT_FINITE: "logits: not finite for this request; nothing could be drawn",
    NOTHING_LEFT: "logits: no token has a finite score under this request's bias, penalties, min_tokens and what it "
    "allows; relax them",
}


class Results:
    """Reads the results of launched plans. costs: learns the times of steps."""

    def __init__(self, roster: Roster, residence: Residence, constraints: Constraints, costs: CostModel) -> None:
        self._roster = roster
        self._residence = residence
        self._constraints = constraints
        self._costs = costs

    def tell(self, result: StepResult, launched: LaunchedPlan) -> list[Delta]:
        """Apply a result and return its messages. A lane's results must come in the order of its launches."""
        if launched.fetches and self._residence.evictor is not None:
            self._residence.evictor.finish_reload()
        self._costs.observe_units(launched.units, launched.unit_contexts, result.unit_seconds)
        self._costs.observe_decode(launched.rows, result.decode_seconds, launched.num_known)
        deltas = []
        for slot, why in result.failures.items():
            failed = launched.slots[slot]
            failed.has_failed = True
            self._residence.windows.retract(failed)  # windows kept since then may lack what this step should compute
            if failed.state is not State.FINISHED:
                log.warning("failed request=%s reason=%s", failed.request_id, why)
                deltas.append(make_failure(failed, why))
                self._roster.retire(failed)
        for token in result.tokens:
            sequence = launched.drawing.get(token.slot)
            if sequence is None:  # it failed before its first draw
                continue
            sequence.num_in_flight -= 1
            if sequence.state is not State.FINISHED:
                new_deltas = self._append(sequence, token, result)
                is_more = bool(deltas) and deltas[-1].request_id == sequence.request_id
                deltas += join_deltas(deltas.pop(), new_deltas) if is_more else new_deltas
        for run in launched.offloaded:
            self._residence.publish_run(run.sequence, run.context, run.num_blocks)
        return deltas

    def end_drafts(self, result: StepResult, launched: LaunchedPlan) -> list[tuple[Sequence, int, int]]:
        """Take rejected drafted tokens out of flight.

        Returns each draft's sequence, its length, and its accepted tokens up to a stop token.
        """
        told: dict[int, list[int]] = {slot: [] for slot in launched.drafts}
        for token in result.tokens if told else ():
            if token.slot in told:
                told[token.slot].append(token.token_id)
        drafted = []
        for slot, draft in launched.drafts.items():
            sequence, own, num_drafted = launched.drawing[slot], told[slot], len(draft)
            sequence.num_in_flight -= 1 + num_drafted - len(own)
            sequence.num_drafted = 0
            self._residence.end_draft(sequence)
            if own:  # else it had failed before the step, which computed nothing of it
                ends = (place for place, one in enumerate(own) if one in sequence.request.stop_token_ids)
                drafted.append((sequence, num_drafted, next(ends, len(own) - 1)))
        return drafted

    def _append(self, sequence: Sequence, token: SampledToken, result: StepResult) -> list[Delta]:
        """Append a drawn token to its sequence, which may end with it."""
        constraint = sequence.constraint
        if constraint is not None and token.token_id >= 0 and sequence.request.max_tokens:
            self._constraints.consume([(constraint, token.token_id)])
        if sequence.state is State.RUNNING and sequence.chunks:  # its prompt is done
            self._roster.release_chunks(sequence)
        if constraint is not None and constraint.error:
            self._roster.retire(sequence)
            return [make_failure(sequence, f"grammar: the answer cannot go on ({constraint.error})")]
        reason = finish_reason(sequence, token.token_id)
        logprobs, pooled = result.prompt_logprobs.get(token.slot), result.pooled.get(token.slot)
        if result.figures:
            sequence.figures |= result.figures.get(token.slot, {})
        delta = make_delta(sequence, token, logprobs, pooled, reason)
        sequence.output += delta.token_ids
        if reason is None and constraint is not None and constraint.is_over:
            self._roster.retire(sequence)
            return [delta, make_end(sequence)]
        if constraint is not None and not constraint.binds(len(sequence.output)):
            sequence.constraint = None
        if reason is None:
            if sequence.state is State.WAITING:  # it was preempted while this draw was in flight
                self._residence.await_room(sequence)
            else:
                self._residence.prefixes.publish(sequence, sequence.num_tokens - 1)
            return [delta]
        if token.token_id == NOT_FINITE:
            sequence.has_failed = True
            self._residence.retract(sequence)
            self._roster.retract(sequence)
        self._roster.retire(sequence)
        return [delta]


def finish_reason(sequence: Sequence, token_id: int) -> str | None:
    """Return why this draw, not yet appended, ends the sequence, or None. The sampler never draws a stop token before
    `min_tokens`.
    """
    request = sequence.request
    if token_id < 0:
        return "error"
    if request.max_tokens and token_id in request.stop_token_ids:
        return "stop"
    return "length" if len(sequence.output) + 1 >= request.max_tokens else None


def make_delta(
    sequence: Sequence,
    token: SampledToken,
    prompt_logprobs: tuple[TokenLogprob, ...] | None,
    pooled: np.ndarray | None,
    reason: str | None,
) -> Delta:
    """Make the message for one draw. Prompt logprobs and times come with the first message only."""
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
        figures=sequence.figures.copy(),
        queue_seconds=None if started_s is None else started_s - request.arrival_s,
        prefill_seconds=None if started_s is None else time.monotonic() - started_s,
    )


def join_deltas(last: Delta, new_deltas: list[Delta]) -> list[Delta]:
    """Join `last` with the later deltas of the same request, if both have tokens."""
    more = new_deltas[0]
    if not (more.token_ids and last.token_ids):
        return [last, *new_deltas]
    joined = structs.replace(
        last,
        token_ids=last.token_ids + more.token_ids,
        logprobs=None if last.logprobs is None or more.logprobs is None else last.logprobs + more.logprobs,
        finish_reason=more.finish_reason,
        figures=more.figures,
    )
    return [joined, *new_deltas[1:]]


def make_failure(sequence: Sequence, why: str, may_retry: bool = False) -> Delta:
    """Make the message for a sequence that cannot go on. may_retry: the same request may succeed later."""
    return Delta(
        request_id=sequence.request_id,
        token_ids=[],
        finish_reason="error",
        error=why,
        may_retry=may_retry,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def make_end(sequence: Sequence) -> Delta:
    """Make the final message for a sequence whose grammar allows nothing more."""
    return Delta(
        request_id=sequence.request_id,
        token_ids=[],
        finish_reason="stop",
        num_cached_tokens=sequence.num_cached_tokens,
        figures=dict(sequence.figures),
    )


def make_progress(entry: JobInProgress) -> list[Progress]:
    """Report the progress of each sequence in a prefill job; they advance together."""
    if not entry.sequences:  # chunks
        return []
    return [
        Progress(
            request_id=sequence.request_id,
            done_tokens=entry.num_done_tokens(sequence),
            total_tokens=len(prompt.token_ids),
            cached_tokens=prompt.begin,
        )
        for sequence, prompt in zip(entry.sequences, entry.job.prompts, strict=True)
    ]


def _message(entry: TokenLogprob) -> Logprob:
    return Logprob(entry.logprob, list(entry.top))
