"""Decide whether rows without host reads share steps with rows that have host reads, or step in a lane of their own.

Rows of both kinds step together if that is expected to draw more tokens a second:

    joint   (n + m) / J,      J = step(W + K + R, H)
    apart   n / A + m / B,    A = step(S (W + K), H)    B = (W + R) / (1 - (W + K) / A)

for n rows with host reads and m without. W is the device's time to read the weights once. K and R are its times to read
the resident keys and values of the rows with and without host reads. H is the host's time to attend. `step(D, H)` is
the shorter of two ways: D + H for one batch, and max(D + W, H) for two half batches in turns. The second reads the
weights twice, and then so does W + K in B (`halving`). Both lanes share one device. The kernels of the rows with host
reads each find a kernel of the other lane running, so their device time is S times as long. The other lane has the time
that they leave.

Rows join if that draws more, and if no row's token takes more than LONGEST_WAIT times what it takes apart, contention
included, so that short streams do not wait long for the host. All inputs are measured: rows and bytes of steps, the
host's seconds, and the device's seconds for each byte. The last come from steps apart, during which the device is never
idle. The rate of the current way is measured and not taken from the formula. For the other way, the formula is
corrected by the error that it had there last. Times are smoothed, so no decision is made before SETTLED_STEPS of about
the same load.

Invariant: the current way is not expected to draw fewer tokens a second than the other way by more than LEAST_GAIN,
unless rows would wait too long in the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpu.batching.halving import FEWEST_ROWS, step_seconds
from gpu.batching.step_reads import StepReads
from scheduler.sequences.lane_fences import Rows

LONGEST_WAIT = 2.0  # a token in a joint step takes at most so many times what it takes apart
JOIN_WAIT = 1.8  # the same bound before rows join; lower, so that noise does not make them join and part in turns
LEAST_GAIN = 0.05  # share of tokens a second to be gained before rows join or part, for the same reason
DWELL_STEPS = 8  # steps with host reads before rows may join or part again
LONGEST_STEPS = 512  # after so many steps the formula's errors are forgotten, so the other way may be tried again
SETTLED_STEPS = 8  # steps of about the same load until smoothed times describe it
_ALIKE = 0.1  # two loads are about the same if their bytes differ by no more than this share
_SHARED = 2.0  # S above
_SMOOTHING = 0.3
_PACE_SMOOTHING = 0.1  # of the device, which does not change


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a step, with host reads and without, and the bytes that each kind reads on the device, besides
    weights.
    """

    num_host_rows: int
    num_others: int
    host_row_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Apart:
    """The seconds of a step in each lane while the other lane steps as well."""

    host_rows_s: float
    others_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What reads cost. device_s: seconds for each byte that a step reads on the device. host_s: the host's seconds to
    attend for the rows with host reads.
    """

    reads: StepReads
    device_s: float
    host_s: float


def expect_joint(load: Load, costs: Costs) -> float:
    """Return the expected seconds of a step of all rows (J in the module's docstring)."""
    rows, contexts = load.num_host_rows + load.num_others, load.host_row_bytes + load.other_bytes
    return min(seconds for seconds, _ in _ways(rows, contexts, costs, 1.0))


def expect_apart(load: Load, costs: Costs) -> Apart:
    """Return the expected seconds of steps in separate lanes (A and B in the module's docstring)."""
    host_rows_s, busy_s = min(_ways(load.num_host_rows, load.host_row_bytes, costs, _SHARED))
    others_s = costs.device_s * (costs.reads.weights(load.num_others) + load.other_bytes)
    return Apart(host_rows_s, others_s / (1.0 - busy_s / host_rows_s))


def joins(load: Load, apart: Apart, joint_s: float, is_joint: bool) -> bool:
    """Return whether all rows should step together. is_joint: whether they do now. Times are expected or measured."""
    if joint_s > (LONGEST_WAIT if is_joint else JOIN_WAIT) * min(apart.host_rows_s, apart.others_s):
        return False
    together = (load.num_host_rows + load.num_others) / joint_s
    by_themselves = load.num_host_rows / apart.host_rows_s + load.num_others / apart.others_s
    gain = 1.0 + LEAST_GAIN
    return gain * together >= by_themselves if is_joint else together > gain * by_themselves


class _Steady:
    """Counts steps under a steady load. num_steps: consecutive steps of about the same load. The very first load counts
    as settled, since smoothed times contain no other.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._load: Load | None = None

    def see(self, load: Load) -> bool:
        """Count a step with this load, and return whether smoothed times describe the load."""
        if self._load is None or not _are_alike(self._load, load):
            self.num_steps = SETTLED_STEPS if self._load is None else 0
            self._load = load
        self.num_steps += 1
        return self.num_steps > SETTLED_STEPS


class Grouping:
    """Chooses whether rows with and without host reads share steps.

    is_joint: all rows step together if some have host reads. decode_seconds: smoothed times of steps by kind, which the
    cost model updates; 0: none has run.
    """

    def __init__(self, reads: StepReads, decode_seconds: Mapping[Rows, float]) -> None:
        self.is_joint = False
        self._reads = reads
        self._decode_seconds = decode_seconds
        self._device_s = self._host_s = 0.0  # as in `Costs`; 0: not seen
        self._alone: Load | None = None  # of the last step of rows without host reads
        self._steady_alone, self._steady = _Steady(), _Steady()
        self._num_parts = 1
        self._num_steps = 0  # steps with host reads since rows last joined or parted
        self._off = {True: (1.0,), False: (1.0, 1.0)}  # measured over expected times, joint and apart, as of last use

    def observe_alone(self, load: Load, host_rows: Load | None) -> None:
        """Learn from a step of rows without host reads. host_rows: the load of the other lane's steps; None:
        none ran.
        """
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
        """Learn from a step of rows with host reads, in `num_parts` batches. host_s: 0.0 if it was not measured."""
        if not host_s:
            return
        self._num_parts = num_parts
        self._host_s = _smooth(self._host_s, host_s, _SMOOTHING)

    def weigh(self, load: Load, has_others: bool) -> None:
        """Decide, after a step with host reads and this load, whether the other rows step with it from now on.

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
        """Return the bytes that the device reads in a step of rows with host reads."""
        weights = self._reads.weights if self._num_parts == 1 else self._reads.weights_of_halves
        return weights(host_rows.num_host_rows) + host_rows.host_row_bytes


def _ways(rows: int, contexts: int, costs: Costs, shared: float) -> list[tuple[float, float]]:
    """Return, for one batch and for two half batches, a step's seconds and its device seconds without contention.

    contexts: bytes read on the device besides weights. shared: the factor by which contention slows the device down.
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
