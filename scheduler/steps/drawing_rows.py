"""Choose the rows that draw in a step, and the tokens that come with them.

Rows wait for prefill within the token gap, are left out while the host cannot answer for them, and take tokens along
that must follow theirs. Invariants: units that put off a decode step take no more than its budget, as far as is known.
No row is left out of more than `MOST_STEPS` steps in a row; a step with nothing else to do waits. A run of known tokens
has its pages, and no row of it stands behind the last token that may be drawn.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many

from gpu.step import HostRead, Lane, PageWrite, Unit
from scheduler.constraints.constraints import Constraints
from scheduler.engine_config import SchedulerConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.residence.residence import Residence
from scheduler.sequences.lane_fences import Rows, rows_of
from scheduler.sequences.sequence import Sequence

MOST_STEPS = 2048  # of decode: tables of a 96K context take 7 s of one core beside streams, and who waits stalls all
_LEAST_PREFILL_SHARE = 0.1  # of the token gap target, however long decode takes

IsReady = Callable[[HostRead], bool]
Row = tuple[Sequence, HostRead | None]


class TokenGap:
    """The gap between two tokens of a stream, of which prefill has a share.

    seconds_since_decode: of prefill units since the last decode step, as estimated.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel) -> None:
        self.seconds_since_decode = 0.0
        self._config = config
        self._costs = costs

    def seconds_left(self, num_prompts: int, prompt_s: float | None, num_running: int) -> float:
        """Return the seconds that prefill has until the next decode step must come.

        num_prompts: that wait or are under way. prompt_s: of work that are left for the next of them; None: it is not
        known. num_running: streams that wait for it.
        """
        target = self._config.token_gap_target_ms / 1e3
        share = self._config.prefill_share(num_prompts, prompt_s, num_running)
        decode = self._costs.decode_seconds[Rows.DEVICE]
        most = decode * share / (1.0 - share) if share < 1.0 else target if decode else 0.0
        seconds = max(min(target - decode, most), _LEAST_PREFILL_SHARE * target)
        return seconds - self.seconds_since_decode

    def decode_can_wait(self, units: Many[Unit], contexts: Many[int], budget: float, must_wait: bool) -> bool:
        """Return whether one more step of such units fits before the next decode step, as far as is known.

        contexts[i]: where unit i ends in its prompt. budget: what `seconds_left` said before they were chosen. A step
        has no more than one whole unit, so a request that arrives never waits for more than two. must_wait: no row can
        draw in this step, whatever its units take.
        """
        seconds = sum(self._costs.seconds_of(unit, context) for unit, context in zip(units, contexts, strict=True))
        waits = must_wait or (bool(units) and self._costs.knows(units[0]) and 2 * seconds <= budget)
        self.seconds_since_decode = self.seconds_since_decode + seconds if waits else 0.0
        return waits


class LateRows:
    """Rows that are left out while the host cannot answer for them; `num_left_out` counts them since the start."""

    def __init__(self) -> None:
        self.num_left_out = 0

    def take_out(self, rows: list[Row], is_ready: IsReady, is_busy: bool) -> list[Row]:
        """Return the rows that are not late, in order.

        If all are late and the step has nothing else to do (`is_busy`), the one stays that has waited longest.
        """
        late = [
            (sequence, host_read)
            for sequence, host_read in rows
            if host_read is not None and sequence.num_left_out < MOST_STEPS and not is_ready(host_read)
        ]
        if late and not is_busy and len(late) == len(rows):
            late.remove(max(late, key=lambda row: row[0].num_left_out))
        return [row for row in rows if row not in late] if late else rows

    def count(self, rows: list[Row], taken: list[Row]) -> None:
        """Count a launched step that took some of these rows."""
        if len(taken) == len(rows):
            for sequence, _ in rows:
                sequence.num_left_out = 0
            return
        taking = {sequence for sequence, _ in taken}
        for sequence, _ in rows:
            sequence.num_left_out = 0 if sequence in taking else sequence.num_left_out + 1
        self.num_left_out += len(rows) - len(taken)


class KnownTokens:
    """Tokens that must follow, computed in rows of the same step.

    is_on: whether there are any; it may change between two steps. most_rows: of such a step.
    """

    def __init__(
        self, config: SchedulerConfig, most_rows: int, costs: CostModel, residence: Residence, constraints: Constraints
    ) -> None:
        self.is_on = config.jump_forward
        self.most_rows = most_rows
        self._target_seconds = config.token_gap_target_ms / 1e3
        self._costs = costs
        self._residence = residence
        self._constraints = constraints

    def take(self, rows: list[Row], lane: Lane, num_running: int) -> tuple[list[list[int]] | None, list[PageWrite]]:
        """Return, by row, the tokens that must follow and that the step has room for, and their page writes.

        None: there are none. A sequence whose steps look at a ring takes none, since each of its tokens would.
        """
        if not self.is_on or all(sequence.constraint is None for sequence, _ in rows):
            return None, []
        cells = sum(sequence.next_position + 1 for sequence, _ in rows)
        kind = rows_of(lane, [host_read for _, host_read in rows])
        left_rows, left_cells = self._costs.room_for_runs(kind, len(rows), cells, self._target_seconds)
        left_rows = min(left_rows, self.most_rows - len(rows))
        runs: list[list[int]] = []
        writes: list[PageWrite] = []
        for sequence, _ in rows:
            run: list[int] = []
            constraint, context = sequence.constraint, sequence.next_position + 1
            if constraint is not None and constraint.matcher is not None and not sequence.steps_by_ring:
                most = min(left_rows, left_cells // context, sequence.request.max_tokens - sequence.num_drawn - 1)
                most = self._residence.most_known(sequence, most, num_running)
                run = self._constraints.take_run(constraint, sequence.num_drawn, sequence.output, most)
                writes += self._residence.grow_known(sequence, len(run)) if run else []
                left_rows -= len(run)
                left_cells -= len(run) * context
            runs.append(run)
        return runs if any(runs) else None, writes
