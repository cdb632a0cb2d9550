"""Decide whether rows that read nothing in host memory step with those that do, or in a lane of their own.

Rows of both kinds step together if that is expected to draw more tokens a second:

    joint   (n + m) / J,      J = step(W + K + R, H)
    apart   n / A + m / B,    A = step(S (W + K), H)    B = (W + R) / (1 - (W + K) / A)

for n rows with host reads and m without; W seconds of the device to read the weights once, K and R those to read what
the rows of either kind have on it, H of the host to attend. `step(D, H)` is the shorter of D + H, one batch, and max(D
+ W, H), two half batches in turns, which read the weights twice, as W + K in B does then (`halving`). The device is
one: beside the other lane what the rows with host reads take of it lasts S times as long, since their kernels come one
by one and each finds one of the other lane's there; and the other lane has what they leave.

Rows join where that gives more, and no row's token takes more than LONGEST_WAIT times what it takes apart, contention
included: short streams are not to wait for the host. All that goes in is seen: rows and bytes of steps, the host's
seconds, and the device's seconds a byte, which follow from steps apart, beside which it is never idle. What is done now
is told by its own steps and not by the formula; of the other way it is remembered by how much the formula was off.
Times are smoothed, so nothing is concluded from them before SETTLED_STEPS of about the same load.

Invariant: of the two ways none is kept that is expected to give fewer
tokens a second than the other one by more than LEAST_GAIN, unless rows would wait too long there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu.batching.halving import FEWEST_ROWS, step_seconds
from gpu.batching.step_reads import StepReads
from scheduler.sequences.lane_fences import Rows

LONGEST_WAIT = 2.0  # of a token in a joint step: at most so many times what it takes apart
JOIN_WAIT = 1.8  # they join where it is expected to be no more, so that noise about the bound moves nobody
LEAST_GAIN = 0.05  # of tokens a second, for which rows join or part: likewise
DWELL_STEPS = 8  # of those with host reads, at the least, until rows join or part again
LONGEST_STEPS = 512  # what the formula was off by is forgotten behind so many: then the other way may be tried anew
SETTLED_STEPS = 8  # of about the same load, until smoothed times are of it and not of the one before
_ALIKE = 0.1  # of the bytes of a load, in which another is about the same
_SHARED = 2.0  # S above
_SMOOTHING = 0.3
_PACE_SMOOTHING = 0.1  # of the device, which does not change


@dataclass(frozen=True, slots=True)
class Load:
    """Rows of steps, those with host reads and others, and what they read on the device beside the weights."""

    num_host_rows: int
    num_others: int
    host_row_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Seconds of a step in each lane, beside the other one."""

    host_rows_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds that reads take. device_s: of a byte that a step reads there; host_s: of attending for the rows with
    host reads.
    """

    reads: StepReads
    device_s: float
    host_s: float


def expect_joint(load: Load, costs: Costs) -> float:
    """Return the seconds of a step of all rows, J of this module."""
    rows, contexts = load.num_host_rows + load.num_others, load.host_row_bytes + load.other_bytes
    return min(seconds for seconds, _ in _ways(rows, contexts, costs, 1.0))


def expect_apart(load: Load, costs: Costs) -> Apart:
    """Return the seconds of steps in lanes of their own, A and B of this module."""
    host_rows_s, busy_s = min(_ways(load.num_host_rows, load.host_row_bytes, costs, _SHARED))
    others_s = costs.device_s * (costs.reads.weights(load.num_others) + load.other_bytes)
    return Apart(host_rows_s, others_s / (1.0 - busy_s / host_rows_s))


def joins(load: Load, apart: Apart, joint_s: float, is_joint: bool) -> bool:
    """Return whether all rows step together from now on; `is_joint`: whether they do. Seconds are as expected,
    or seen.
    """
    if joint_s > (LONGEST_WAIT if is_joint else JOIN_WAIT) * min(apart.host_rows_s, apart.others_s):
        return False
    together = (load.num_host_rows + load.num_others) / joint_s
    by_themselves = load.num_host_rows / apart.host_rows_s + load.num_others / apart.others_s
    gain = 1.0 + LEAST_GAIN
    return gain * together >= by_themselves if is_joint else together > gain * by_themselves


class _Steady:
    """A count of steps under a steady load. `num_steps`: of about the same load, up to now; of the first load ever,
    nothing else is in smoothed times.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._load: Load | None = None

    def see(self, load: Load) -> bool:
        """Return whether smoothed times are of this load."""
        if self._load is None or not _are_alike(self._load, load):
            self.num_steps = SETTLED_STEPS if self._load is None else 0
            self._load = load
        self.num_steps += 1
        return self.num_steps > SETTLED_STEPS


class Grouping:
    """The choice whether rows with and without host reads share steps. `is_joint`: all rows step together, where some
    have host reads. `decode_seconds`: of steps of each kind, which somebody else learns; 0: none has run.
    """

    def __init__(self, reads: StepReads, decode_seconds: Mapping[Rows, float]) -> None:
        self.is_joint = False
        self._reads = reads
        self._decode_seconds = decode_seconds
        self._device_s = self._host_s = 0.0  # as in `Costs`; 0: not seen
        self._alone: Load | None = None  # of the last step of rows without host reads
        self._steady_alone, self._steady = _Steady(), _Steady()
        self._num_parts = 1
        self._num_steps = 0  # of rows with host reads, since others joined them or parted
        self._off = {True: (1.0,), False: (1.0, 1.0)}  # seen over expected, joint and apart, when it was so last

    def observe_alone(self, load: Load, host_rows: Load | None) -> None:
        """Learn from a step of rows that read nothing on the host, beside which steps of `host_rows` ran, or none."""
        self._alone = load
        if not self._steady_alone.see(load):
            return
        seconds, host_rows_s = self._decode_seconds[Rows.DEVICE], self._decode_seconds[Rows.HOST]
        if not seconds or (host_rows is not None and not host_rows_s):
            return
        per_s = (self._reads.weights(load.num_others) + load.other_bytes) / seconds
        if host_rows is not None:
            per_s += self._host_row_bytes(host_rows) / host_rows_s
        self._device_s = _smooth(self._device_s, 1.0 / per_s, _PACE_SMOOTHING)

    def observe_host_rows(self, host_s: float, num_parts: int) -> None:
        """Learn from a step of rows that read host memory, in so many parts; 0.0: the host was not heard."""
        if not host_s:
            return
        self._num_parts = num_parts
        self._host_s = _smooth(self._host_s, host_s, _SMOOTHING)

    def weigh(self, load: Load, has_others: bool) -> None:
        """Decide, behind a step of this load, whether other rows step with it from now on.

        has_others: some rows step in the other lane.
        """
        self._num_steps += 1
        if not self.is_joint and has_others and self._alone is not None:
            load = Load(load.num_host_rows, self._alone.num_others, load.host_row_bytes, self._alone.other_bytes)
        is_steady = self._steady.see(load)
        if not (
            is_steady and self._num_steps >= DWELL_STEPS and load.num_host_rows and load.num_others and self._device_s
        ):
            return
        if self._num_steps >= LONGEST_STEPS:
            self._off |= {False: (1.0, 1.0)} if self.is_joint else {True: (1.0,)}
        costs = Costs(self._reads, self._device_s, self._host_s)
        apart, joint_s = expect_apart(load, costs), expect_joint(load, costs)
        kinds = (Rows.JOINT,) if self.is_joint else (Rows.HOST, Rows.DEVICE)
        seen = [self._decode_seconds[kind] for kind in kinds]
        expected = (joint_s,) if self.is_joint else (apart.host_rows_s, apart.others_s)
        off = {self.is_joint: tuple(one / other for one, other in zip(seen, expected, strict=True))}
        both = self._off | off
        apart = Apart(apart.host_rows_s * both[False][0], apart.others_s * both[False][1])
        if joins(load, apart, joint_s * both[True][0], self.is_joint) is not self.is_joint:
            self._off, self._num_steps = both, 0
            self.is_joint = not self.is_joint

    def _host_row_bytes(self, host_rows: Load) -> int:
        """Return the bytes that the device reads in a step of rows that read host memory."""
        weights = self._reads.weights if self._num_parts == 1 else self._reads.weights_of_halves
        return weights(host_rows.num_host_rows) + host_rows.host_row_bytes


def _ways(rows: int, contexts: int, costs: Costs, shared: float) -> list[tuple[float, float]]:
    """Return seconds of a step of so many rows that read so many bytes beside the weights, and of these the device's,
    were it alone: in one part, and in two. shared: so many times as long the device takes, since it is not.
    """
    reads = costs.reads
    device_s = costs.device_s * (reads.weights(rows) + contexts)
    reread_s = costs.device_s * (reads.weights_of_halves(rows) - reads.weights(rows))
    ways = [(step_seconds(1, shared * device_s, shared * reread_s, costs.host_s), device_s)]
    if rows >= FEWEST_ROWS:
        ways.append((step_seconds(2, shared * device_s, shared * reread_s, costs.host_s), device_s + reread_s))
    return ways


def _are_alike(load: Load, other: Load) -> bool:
    if (load.num_host_rows, load.num_others) != (other.num_host_rows, other.num_others):
        return False
    pairs = (load.host_row_bytes, other.host_row_bytes), (load.other_bytes, other.other_bytes)
    return all(abs(one - another) <= _ALIKE * max(one, another) for one, another in pairs)


def _smooth(known: float, seen: float, smoothing: float) -> float:
    return known + smoothing * (seen - known) if known else seen
