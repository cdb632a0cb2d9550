"""Choose the rows that draw in a step, and the forced tokens that are computed with them.

Rows wait for prefill within the token gap, and are left out while the host cannot answer for them. Invariants: units
that delay a decode step take no more than its time budget, as estimated. No row is left out of more than `MOST_STEPS`
consecutive steps; a step with nothing else to do waits for the host. A run of forced tokens has its pages, and does not
go beyond the last token that may be drawn.
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

MOST_STEPS = 2048  # high, as waiting stalls all rows, and tables of a 96K context take one core 7 s beside streams
_LEAST_PREFILL_SHARE = 0.1  # prefill's least share of the token gap target, however long decode takes

IsReady = Callable[[HostRead], bool]
Row = tuple[Sequence, HostRead | None]


class TokenGap:
    """The gap between two tokens of a stream, and prefill's share of it.

    seconds_since_decode: the estimated time of prefill units since the last decode step.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel) -> None:
        self.seconds_since_decode = 0.0
        self._config = config
        self._costs = costs

    def seconds_left(self, num_prompts: int, prompt_s: float | None, num_running: int) -> float:
        """Return the seconds that prefill has until the next decode step is due.

        num_prompts: prompts that wait or prefill. prompt_s: seconds of work left for the next of them; None: unknown.
        num_running: streams, which wait meanwhile.
        """
        target = self._config.token_gap_target_ms / 1e3
        share = self._config.prefill_share(num_prompts, prompt_s, num_running)
        decode = self._costs.decode_seconds[Rows.DEVICE]
        most = decode * share / (1.0 - share) if share < 1.0 else target if decode else 0.0
        seconds = max(min(target - decode, most), _LEAST_PREFILL_SHARE * target)
        return seconds - self.seconds_since_decode

    def decode_can_wait(self, units: Many[Unit], contexts: Many[int], budget: float, must_wait: bool) -> bool:
        """Return whether decode can wait: one more step with such units fits before the next decode step.

        contexts[i]: prompt tokens up to the end of unit i. budget: what `seconds_left` returned before the units were
        chosen. A step has at most one whole unit, so an arriving request never waits for more than two. must_wait: no
        row can draw in this step in any case.
        """
        seconds = sum(self._costs.seconds_of(unit, context) for unit, context in zip(units, contexts, strict=True))
        waits = must_wait or (bool(units) and self._costs.knows(units[0]) and 2 * seconds <= budget)
        self.seconds_since_decode = self.seconds_since_decode + seconds if waits else 0.0
        return waits


class LateRows:
    """Leaves out rows for which the host cannot answer yet. num_left_out: counts them since the start."""

    def __init__(self) -> None:
        self.num_left_out = 0

    def take_out(self, rows: list[Row], is_ready: IsReady, is_busy: bool) -> list[Row]:
        """Return the rows that are not late, in order.

        If all are late and there is nothing else to do (not `is_busy`), the row that was left out longest stays.
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
        """Note a launched step that may draw `rows`, and does draw `taken`."""
        if len(taken) == len(rows):
            for sequence, _ in rows:
                sequence.num_left_out = 0
            return
        taking = {sequence for sequence, _ in taken}
        for sequence, _ in rows:
            sequence.num_left_out = 0 if sequence in taking else sequence.num_left_out + 1
        self.num_left_out += len(rows) - len(taken)


class KnownTokens:
    """Chooses forced tokens to compute in further rows of the same step.

    is_on: whether this is enabled; it may change between two steps. most_rows: the most rows of such a step.
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
        """Return, by row, the forced tokens that the step has room for, and their page writes; None: there are none.

        A sequence whose steps use a ring takes none, since each of its tokens would have to use it.
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
