"""Tokens that must follow a row's input token, computed in the same step.

Invariant: a run of such tokens has its pages, and no row of it stands behind the last token that may be drawn.
"""

from gpu.step import Lane, PageWrite
from scheduler.constraints.constraints import Constraints
from scheduler.engine_config import SchedulerConfig
from scheduler.prefill.cost_model import CostModel
from scheduler.residence.residence import Residence
from scheduler.sequences.lane_fences import rows_of
from scheduler.steps.late_rows import Row


class Jumps:
    """`is_on`: whether there are steps in which tokens come that need no draw; from one to the next it may change.
    `most_rows`: of such a step.
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
        """Tokens that are known to follow the input tokens of these rows, as far as the step has room for them, and
        their pages; None: there are none. Who holds a ring looks at it with each token.
        """
        if not self.is_on or all(sequence.constraint is None for sequence, _ in rows):
            return None, []
        cells = sum(sequence.next_cell + 1 for sequence, _ in rows)
        kind = rows_of(lane, [ask for _, ask in rows])
        left_rows, left_cells = self._costs.room_for_runs(kind, len(rows), cells, self._target_seconds)
        left_rows = min(left_rows, self.most_rows - len(rows))
        runs: list[list[int]] = []
        writes: list[PageWrite] = []
        for sequence, _ in rows:
            run: list[int] = []
            constraint, context = sequence.constraint, sequence.next_cell + 1
            if constraint is not None and constraint.matcher is not None and sequence.ring is None:
                most = min(left_rows, left_cells // context, sequence.request.max_tokens - sequence.num_drawn - 1)
                most = self._residence.most_ahead(sequence, most, num_running)
                run = self._constraints.take_run(constraint, sequence.num_drawn, sequence.output, most)
                writes += self._residence.grow_ahead(sequence, len(run)) if run else []
                left_rows -= len(run)
                left_cells -= len(run) * context
            runs.append(run)
        return runs if any(runs) else None, writes
