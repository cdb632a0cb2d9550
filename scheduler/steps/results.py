"""Turn the result of a step into messages for its requests.

Invariant: an accepted request gets exactly one final delta unless it is cancelled.
"""

import logging

import numpy as np

from gpu.step import NOT_FINITE, SampledToken, StepResult, TokenLogprob
from scheduler.admission.roster import Roster
from scheduler.constraints.constraints import Constraints
from scheduler.messages import Delta
from scheduler.prefill.cost_model import CostModel
from scheduler.residence.residence import Residence
from scheduler.sequences.sequence import Sequence, State
from scheduler.steps.launched_plan import LaunchedPlan
from scheduler.steps.reports import finish_reason, join_deltas, make_delta, make_end, make_failure

log = logging.getLogger(__name__)


class Results:
    """`costs`: learns what steps took."""

    def __init__(self, roster: Roster, residence: Residence, constraints: Constraints, costs: CostModel) -> None:
        self._roster = roster
        self._residence = residence
        self._constraints = constraints
        self._costs = costs

    def tell(self, result: StepResult, launched: LaunchedPlan) -> list[Delta]:
        """In no particular order, but a request's own. Results of a lane are told in the order of its launches."""
        if launched.fetches:
            self._residence.end_fetches()
        self._costs.observe_units(launched.units, launched.unit_contexts, result.unit_seconds)
        self._costs.observe_decode(launched.rows, result.decode_seconds, launched.num_known)
        deltas = []
        for slot, why in result.failures.items():
            failed = launched.slots[slot]
            failed.has_failed = True
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
                slot = token.slot
                self._consume(sequence, token)
                told = self._append(sequence, token, result.prompt_logprobs.get(slot), result.pooled.get(slot))
                is_more = bool(deltas) and deltas[-1].request_id == sequence.request_id
                deltas += join_deltas(deltas.pop(), told) if is_more else told
        for run in launched.runs:
            self._residence.publish_run(run.sequence, run.context, run.num_blocks)
        return deltas

    def _consume(self, sequence: Sequence, token: SampledToken) -> None:
        """Tell its constraint what it has next."""
        if sequence.constraint is not None and token.token_id >= 0 and sequence.request.max_tokens:
            self._constraints.consume([(sequence.constraint, token.token_id)])

    def _append(
        self,
        sequence: Sequence,
        token: SampledToken,
        prompt_logprobs: list[TokenLogprob] | None,
        pooled: np.ndarray | None,
    ) -> list[Delta]:
        if sequence.state is State.RUNNING:  # its prompt is done
            self._roster.let_go(sequence)
            self._residence.give_back_evicted(sequence)
        constraint = sequence.constraint
        if constraint is not None and constraint.error:
            self._roster.retire(sequence)
            return [make_failure(sequence, f"grammar: the answer cannot go on ({constraint.error})")]
        reason = finish_reason(sequence, token.token_id)
        delta = make_delta(sequence, token, prompt_logprobs, pooled, reason)
        sequence.output += delta.token_ids
        if reason is None and constraint is not None and constraint.is_over:
            self._roster.retire(sequence)
            return [delta, make_end(sequence)]
        if reason is None:
            if sequence.state is State.WAITING:  # it gave way while this draw was in flight
                self._residence.await_room(sequence)
            else:
                self._residence.publish(sequence, sequence.num_tokens - 1)
            return [delta]
        if token.token_id == NOT_FINITE:
            sequence.has_failed = True
            self._residence.retract(sequence)
            self._roster.retract(sequence)
        self._roster.retire(sequence)
        return [delta]
