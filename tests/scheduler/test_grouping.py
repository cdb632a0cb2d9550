"""Who steps with whom: what gives more tokens a second, as long as nobody waits too long for the host.

Cells that were measured are held against what the rule expects of them (lab/LAB.md has the runs).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.batching.step_reads import StepReads
from gpu.model.named_shapes import named_shape
from gpu.step import HostRead
from scheduler.prefill.cost_model import CostModel
from scheduler.sequences.lane_fences import Rows
from scheduler.steps.grouping import (
    DWELL_STEPS,
    JOIN_WAIT,
    LEAST_GAIN,
    LONGEST_STEPS,
    LONGEST_WAIT,
    Apart,
    Costs,
    Grouping,
    Load,
    expect_apart,
    expect_joint,
    joins,
)
from tests.scheduler.engines import SHAPE

H100, H200 = 2860, 3950  # GB/s that a step of full attention reads at: 13B and 34B, 16,000 tokens
NUM_DENSE = 2


@dataclass(frozen=True)
class Cell:
    """`asking`: cells of each context, and how many of them are asked of the host; `others`: cells of each."""

    shape: str
    asking: list[tuple[int, int]]
    others: list[int]
    gb_s: float
    host_ms: float

    @property
    def reads(self) -> StepReads:
        shape = named_shape(self.shape)
        return StepReads(shape, 2, False, "bfloat16", shape.num_layers - NUM_DENSE)

    @property
    def load(self) -> Load:
        asking = [self.reads.context(cells, HostRead(0, 0, asked)) for cells, asked in self.asking]
        others = [self.reads.context(cells, None) for cells in self.others]
        return Load(len(asking), len(others), sum(asking), sum(others))

    @property
    def costs(self) -> Costs:
        return Costs(self.reads, 1e-9 / self.gb_s, 1e-3 * self.host_ms)


WHOLE = (16_000, 15_920)  # of a 16K context that is offloaded
BESIDE = Cell("llama-3.1-8b", [(98_304, 98_224)] * 4, [1024] * 8, 2270, 61.0)
THIRTEEN = Cell("codellama-13b", [(16_000, 7680), WHOLE, WHOLE], [16_000], H100, 30.0)


def rate(load: Load, apart: Apart) -> float:
    return load.num_host_rows / apart.host_rows_s + load.num_others / apart.others_s


@pytest.mark.parametrize(
    ("asking", "host_ms", "measured_ms", "tolerance"),
    [([(16_000, 3280)], 5.0, 24.75, 0.05), ([(16_000, 4160), WHOLE], 12.1, 30.75, 0.08),
     ([(16_000, 5920), WHOLE, WHOLE, WHOLE], 44.8, 47.4, 0.08)],
    ids=["5", "6", "8"],
)  # fmt: skip
def test_measured_joint_steps_of_34b_are_expected_and_joined(
    asking: list[tuple[int, int]], host_ms: float, measured_ms: float, tolerance: float
) -> None:
    cell = Cell("codellama-34b", asking, [16_000] * 4, H200, host_ms)
    joint_s = expect_joint(cell.load, cell.costs)
    assert 1e3 * joint_s == pytest.approx(measured_ms, rel=tolerance)
    assert joins(cell.load, expect_apart(cell.load, cell.costs), joint_s, is_joint=False)


def test_short_streams_beside_long_ones_are_expected_as_measured_and_stay_apart() -> None:
    apart, joint_s = expect_apart(BESIDE.load, BESIDE.costs), expect_joint(BESIDE.load, BESIDE.costs)
    assert 1e3 * apart.host_rows_s == pytest.approx(60.1, rel=0.05)
    assert 1e3 * apart.others_s == pytest.approx(8.49, rel=0.1)
    for is_joint in (False, True):
        assert not joins(BESIDE.load, apart, joint_s, is_joint)


def test_short_streams_stay_apart_although_they_would_draw_more_in_all_together() -> None:
    """One beside four: most tokens are of those with host reads, and it would wait three times as long."""
    load = Load(4, 1, 0, 0)
    apart = Apart(0.080, 0.010)
    assert rate(load, apart) < 5 / 0.030
    assert not joins(load, apart, 0.030, is_joint=True)


@pytest.mark.parametrize("host_ms", [10.0, 20.0, 30.0])
def test_rows_of_13b_join_and_draw_more_than_one_stream_does(host_ms: float) -> None:
    """Whose weights three passes read otherwise, of the time of one stream alone each more than half."""
    cell = Cell(THIRTEEN.shape, THIRTEEN.asking, THIRTEEN.others, H100, host_ms)
    apart, joint_s = expect_apart(cell.load, cell.costs), expect_joint(cell.load, cell.costs)
    assert joins(cell.load, apart, joint_s, is_joint=False)
    assert 4 / joint_s > 1.7 * 73.7


def test_rows_of_13b_stay_apart_of_a_host_that_takes_long() -> None:
    cell = Cell(THIRTEEN.shape, THIRTEEN.asking, THIRTEEN.others, H100, 60.0)
    apart, joint_s = expect_apart(cell.load, cell.costs), expect_joint(cell.load, cell.costs)
    assert rate(cell.load, apart) > 4 / joint_s
    assert not joins(cell.load, apart, joint_s, is_joint=False)


def test_each_lane_has_the_device_less_what_the_other_takes() -> None:
    """By hand: 1 ms of weights, 1 and 2 of contexts; apart each of both halves meets as much of the other lane's."""
    reads = THIRTEEN.reads
    weights = reads.weights(1)
    load, costs = Load(2, 1, weights, 2 * weights), Costs(reads, 1e-3 / weights, 3e-3)
    assert expect_joint(load, costs) == pytest.approx(5e-3)  # halves: 1 + 1 + 3; whole: 1 + 3 + 3
    apart = expect_apart(load, costs)
    assert apart.host_rows_s == pytest.approx(6e-3)  # halves: 2 * (1 + 1 + 1); whole: 2 * (1 + 1) + 3
    assert apart.others_s == pytest.approx(6e-3)  # half of the device for 3
    one = expect_apart(Load(1, 1, weights, 2 * weights), costs)
    assert one.host_rows_s == pytest.approx(7e-3)  # a row has no halves
    assert one.others_s == pytest.approx(3e-3 / (1 - 2 / 7))


seconds = st.floats(1e-3, 1.0)


@given(st.integers(1, 8), st.integers(1, 8), seconds, seconds, seconds, st.booleans())
def test_no_way_is_kept_that_is_expected_to_draw_fewer_tokens_than_the_other_that_is_allowed(
    num_host_rows: int, num_others: int, host_rows_s: float, others_s: float, joint_s: float, is_joint: bool
) -> None:
    load, apart = Load(num_host_rows, num_others, 0, 0), Apart(host_rows_s, others_s)
    together, by_themselves = (num_host_rows + num_others) / joint_s, rate(load, apart)
    wait = joint_s / min(host_rows_s, others_s)
    chosen = joins(load, apart, joint_s, is_joint)
    if chosen:
        assert wait <= LONGEST_WAIT
        assert together * (1 + LEAST_GAIN) >= by_themselves
    else:
        assert wait > JOIN_WAIT or by_themselves * (1 + LEAST_GAIN) >= together
    assert joins(load, apart, joint_s, is_joint=chosen) is chosen, "it is taken back at once"


@given(st.integers(1, 8), st.integers(1, 8), seconds, seconds, st.floats(0.0, LEAST_GAIN / 2))
def test_a_gain_within_noise_moves_nobody(
    num_host_rows: int, num_others: int, host_rows_s: float, others_s: float, gain: float
) -> None:
    load, apart = Load(num_host_rows, num_others, 0, 0), Apart(host_rows_s, others_s)
    for times in (1 + gain, 1 / (1 + gain)):
        joint_s = (num_host_rows + num_others) / (times * rate(load, apart))
        wait = joint_s / min(host_rows_s, others_s)
        assert not joins(load, apart, joint_s, is_joint=False)
        assert joins(load, apart, joint_s, is_joint=True) is (wait <= LONGEST_WAIT)


@dataclass
class Machine:
    """Takes what the formula says, joint steps so many times, and noise; and learns as a scheduler does."""

    cell: Cell
    joint_factor: float = 1.0
    noise: float = 0.02
    random: Random = field(default_factory=lambda: Random(5))

    def run(self, num_steps: int, change: Callable[[int], None] = lambda step: None) -> list[bool]:
        """Which steps of rows with host reads others shared."""
        costs = CostModel(SHAPE)
        grouping = Grouping(self.cell.reads, costs.decode_seconds)
        joint = []
        for step in range(num_steps):
            change(step)
            load = self.cell.load
            asking, others = (
                Load(load.num_host_rows, 0, load.host_row_bytes, 0),
                Load(0, load.num_others, 0, load.other_bytes),
            )
            joint.append(grouping.is_joint)
            if grouping.is_joint:
                seconds = expect_joint(load, self.cell.costs) * self.joint_factor
                costs.observe_decode(Rows.JOINT, seconds * self.draw(), 0)
                grouping.observe_host_rows(self.cell.costs.host_s * self.draw(), 2)
                grouping.weigh(load, has_others=False)
                continue
            apart = expect_apart(load, self.cell.costs)
            costs.observe_decode(Rows.DEVICE, apart.others_s * self.draw(), 0)
            grouping.observe_alone(others, asking)
            costs.observe_decode(Rows.HOST, apart.host_rows_s * self.draw(), 0)
            grouping.observe_host_rows(self.cell.costs.host_s * self.draw(), 2)
            grouping.weigh(asking, has_others=True)
        self.grouping = grouping
        return joint

    def draw(self) -> float:
        return self.random.gauss(1, self.noise)


def num_changes(joint: list[bool]) -> int:
    return sum(before is not after for before, after in pairwise(joint))


@pytest.mark.parametrize(("cell", "is_joint"), [(THIRTEEN, True), (BESIDE, False)])
def test_what_is_seen_says_so_after_few_steps_and_for_good(cell: Cell, is_joint: bool) -> None:
    joint = Machine(cell).run(3 * LONGEST_STEPS)
    assert joint[DWELL_STEPS - 1 : DWELL_STEPS + 1] == [False, is_joint]
    assert num_changes(joint) == is_joint


def test_where_joint_steps_take_longer_than_expected_rows_part_and_try_again_once_in_a_while() -> None:
    joint = Machine(THIRTEEN, joint_factor=1.8).run(4 * LONGEST_STEPS)
    assert 3 <= num_changes(joint) <= 2 * 4
    assert sum(joint) == pytest.approx(DWELL_STEPS * num_changes(joint) / 2, abs=DWELL_STEPS)


@pytest.mark.parametrize(("times", "is_joint"), [(1.0, False), (2.0, True)])
def test_where_steps_apart_take_longer_than_expected_rows_join_though_the_formula_says_no(
    times: float, is_joint: bool
) -> None:
    """Kernels of the other lane may hold those with host reads up for longer than S says."""
    cell = Cell(THIRTEEN.shape, THIRTEEN.asking, THIRTEEN.others, H100, 42.0)
    load, costs, seconds = cell.load, cell.costs, dict.fromkeys(Rows, 0.0)
    apart, grouping = expect_apart(load, costs), Grouping(cell.reads, seconds)
    seconds[Rows.DEVICE] = costs.device_s * (cell.reads.weights(1) + load.other_bytes)
    grouping.observe_alone(Load(0, load.num_others, 0, load.other_bytes), None)
    seconds |= {Rows.DEVICE: apart.others_s, Rows.HOST: times * apart.host_rows_s}
    for _ in range(DWELL_STEPS):
        grouping.observe_host_rows(costs.host_s, 2)
        grouping.weigh(Load(load.num_host_rows, 0, load.host_row_bytes, 0), has_others=True)
    assert grouping.is_joint is is_joint


def test_rows_part_once_the_host_takes_longer() -> None:
    machine = Machine(THIRTEEN)

    def slow(step: int) -> None:
        if step == 100:
            machine.cell = Cell(THIRTEEN.shape, THIRTEEN.asking, THIRTEEN.others, H100, 80.0)

    joint = machine.run(200, slow)
    assert joint[99]
    assert not any(joint[120:])


@pytest.mark.parametrize("host_ms", [15.0, 20.0, 25.0])
def test_rows_that_go_leave_no_times_of_theirs_to_those_that_stay(host_ms: float) -> None:
    """Else the step of the one that stays would seem to take as long as theirs, and it joined and waited."""
    before, after = (
        Cell("llama-3.1-8b", [(98_304, 98_224)], others, 2270, host_ms) for others in ([60_000] * 4, [1024])
    )
    machine = Machine(before, noise=0.0)

    def go(step: int) -> None:
        if step == 100:
            machine.cell = after

    apart, joint_s = expect_apart(after.load, after.costs), expect_joint(after.load, after.costs)
    assert not joins(after.load, apart, joint_s, is_joint=False)
    joint = machine.run(3 * LONGEST_STEPS, go)
    assert not any(joint[100:])
    assert machine.grouping._device_s / after.costs.device_s == pytest.approx(1.0, rel=0.02)


def test_what_the_device_takes_for_a_byte_follows_from_both_lanes() -> None:
    machine = Machine(THIRTEEN, noise=0.0)
    machine.run(DWELL_STEPS)
    assert machine.grouping._device_s / THIRTEEN.costs.device_s == pytest.approx(1.0, rel=0.02)


def test_a_step_of_which_the_host_was_not_heard_says_nothing_of_it() -> None:
    grouping = Grouping(THIRTEEN.reads, dict.fromkeys(Rows, 0.0))
    grouping.observe_host_rows(0.030, 2)
    grouping.observe_host_rows(0.0, 0)
    assert (grouping._host_s, grouping._num_parts) == (0.030, 2)


def test_nobody_joins_before_anything_is_known_or_where_there_is_nobody() -> None:
    grouping = Grouping(THIRTEEN.reads, dict.fromkeys(Rows, 0.0))
    for _ in range(2 * DWELL_STEPS):
        grouping.observe_host_rows(0.0, 1)
        grouping.weigh(Load(2, 0, 0, 0), has_others=True)
        grouping.weigh(Load(2, 0, 0, 0), has_others=False)
    assert not grouping.is_joint
