"""Audit what steps estimate: for one layer and KV head at a time, read everything in a thread and compare.

The host picks layer, KV head and ring before a step is launched. After the launch, in stream order, it copies what the
step recorded of them (`reporting.Report`) to pinned memory. So nothing is decided inside a captured step. A thread
waits for that copy and attends to all offloaded rows of the KV head itself (`exact`). It does not use the CPU's
attention for decode steps, which answers a waiting device, a whole layer at once, with all threads. A loan keeps the
rows where they are. One audit runs at a time, and a step whose turn comes meanwhile is not audited.

The true error is |out - exact| / |exact|, of the whole output of a query head, resident tokens included.
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread

import numpy as np
import torch

from gpu.methods.device_side import Lent
from gpu.methods.indexed.exact import attend_exactly
from gpu.methods.indexed.reporting import UNREPORTED, Report
from gpu.upload import upload
from transfer.copies import PASSED, Event
from transfer.host_tier import Loan
from transfer.tier_shape import Rows

COVERED = 0.95  # share of true errors below the bound
MOST_RATIOS = 2_048  # audited heads, the latest, from which the factor of bounds is taken
FIRST_FACTOR = 6.0  # used before there are enough of them; SmolLM2-135M-Instruct comes to 4 to 8
FEWEST_RATIOS = 64
PRIOR_RATIOS = 4.0  # number of ratios of 1 that each layer starts with


@dataclass(slots=True)
class AuditSums:
    """Sums over audited query heads: their number, their relative errors, and how many were above their
    step's bound.
    """

    heads: int = 0
    error: float = 0.0
    beyond: int = 0

    def add(self, errors: np.ndarray, bounds: np.ndarray) -> None:
        self.heads += len(errors)
        self.error += float(errors.sum())
        self.beyond += int((errors > bounds).sum())


@dataclass(frozen=True, slots=True)
class Reading:
    """A row of a step that reads by index. sums: of its request. table: int64 `[layers, COLUMNS, pieces]`."""

    ring: int
    num_tokens: int
    table: np.ndarray
    sums: AuditSums


@dataclass(slots=True)
class _Audit:
    """One audit. It also serves as the event after which its loan ends."""

    reading: Reading
    layer: int
    kv_head: int
    loan: Loan
    factor: float
    copied: Event = PASSED
    is_over: Flag = field(default_factory=Flag)

    def synchronize(self) -> None:
        self.is_over.wait()

    def query(self) -> bool:
        return self.is_over.is_set()


class Calibration:
    """The factors that turn expected errors into bounds, by layer, from audited ratios of true to expected errors.

    Layers differ in how much their values' errors have in common. So a layer's factor is its typical ratio times one
    quantile over all layers: that of ratios divided by their layer's typical ratio at the time. Of n ratios the
    quantile is the one of rank ceil(0.95 (n + 1)). If ratios are exchangeable, the next one lies below it with a
    probability of at least 95 % (split conformal prediction). A bound is never below the expected error.
    """

    def __init__(self, layers: int) -> None:
        self._logs, self._counts = np.zeros(layers), np.full(layers, PRIOR_RATIOS)
        self._ratios: deque[float] = deque(maxlen=MOST_RATIOS)

    def add(self, layer: int, ratios: np.ndarray) -> None:
        self._ratios.extend((ratios / self._typical[layer]).tolist())
        self._logs[layer] += np.log(ratios.clip(1e-3)).sum()
        self._counts[layer] += len(ratios)

    @property
    def factors(self) -> np.ndarray:
        """Return the factors, float32 `[layers]`."""
        count, known = len(self._ratios), sorted(self._ratios)
        rank = min(math.ceil(COVERED * (count + 1)), count)
        widest = known[rank - 1] if count >= FEWEST_RATIOS else max(FIRST_FACTOR, *known, FIRST_FACTOR)
        return (self._typical * widest).clip(1.0).astype(np.float32)

    @property
    def _typical(self) -> np.ndarray:
        return np.exp(self._logs / self._counts)


class Audits:
    """The audits of one device side. audit_steps: audit one in so many steps that read by index; 0: never."""

    def __init__(self, report: Report, audit_steps: int, kv_heads: int, rows: Rows) -> None:
        self._report, self._audit_steps, self._kv_heads, self._rows = report, audit_steps, kv_heads, rows
        layers, _, group, dim = report.queries.shape
        self.of_layers = [AuditSums() for _ in range(layers)]
        self.worst = 0.0
        self.calibration = Calibration(layers)
        self.factors, self._is_new = self.calibration.factors, False
        # Steps that read no host memory are never audited, but need bounds as well.
        report.factor.copy_(torch.from_numpy(self.factors))
        self._steps = self._turn = 0
        self._picked: _Audit | None = None
        self._last: _Audit | None = None
        self.failure: BaseException | None = None
        is_cuda = report.queries.is_cuda
        self._pinned = {
            name: torch.empty(group, *([dim] if name in ("queries", "near_out", "out") else []), pin_memory=is_cuda)
            for name in ("queries", "near_out", "near_lse", "out", "error")
        }
        self._audits: SimpleQueue[tuple[Audits, _Audit] | None] = SimpleQueue()
        self._thread: Thread | None = None
        weakref.finalize(self, self._audits.put, None)

    def pick(self, readings: Sequence[Reading], lent: Lent) -> None:
        """Choose what is audited of a step that is about to be launched, and upload new factors of bounds."""
        if self.failure is not None:
            raise self.failure
        is_free = self._last is None or self._last.query()
        if is_free and self._is_new:
            self._is_new, self.factors = False, self.calibration.factors
            self._report.factor.copy_(upload(self.factors, self._report.factor.device))
        self._steps += 1
        is_turn = self._audit_steps and self._steps % self._audit_steps == 0
        if not (is_turn and readings and is_free) or self._picked is not None:
            return
        layers = len(self.of_layers)
        place, row = self._turn % (layers * self._kv_heads), self._turn // (layers * self._kv_heads)
        self._turn += 1
        reading = readings[(place + row) % len(readings)]
        layer, kv_head = place % layers, place // layers
        self._picked = _Audit(reading, layer, kv_head, lent.lend(), float(self.factors[layer]))

    def follow(self) -> None:
        """Copy what the launched step records, on its stream, and start the audit."""
        audit, self._picked = self._picked, None
        if audit is None:
            return
        place = audit.reading.ring * self._kv_heads + audit.kv_head
        for name, to in self._pinned.items():
            to.copy_(getattr(self._report, name)[audit.layer, place], non_blocking=True)
        if self._report.queries.is_cuda:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._report.queries.device))
            audit.copied = event
        self._last, self._is_new = audit, True
        audit.loan.end(audit)
        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._audits,), name="audits", daemon=True)
            self._thread.start()
        self._audits.put((self, audit))

    def give_up(self) -> None:
        """Drop the audit that was picked for a step that failed."""
        audit, self._picked = self._picked, None
        if audit is not None:
            audit.loan.end(PASSED)

    def wait(self) -> None:
        """Wait until the audit under way has finished."""
        if self._last is not None:
            self._last.synchronize()

    def run(self, audit: _Audit) -> None:
        """Attend exactly to what was audited, and count its errors. Runs in the audit thread."""
        audit.copied.synchronize()
        own = self._pinned["error"].numpy() != UNREPORTED
        if not own.any():
            return  # in this step another method supplied the results of all these heads
        noted = {name: one.numpy()[own].astype(np.float64) for name, one in self._pinned.items()}
        reading = audit.reading
        out, lse = attend_exactly(
            reading.table[audit.layer],
            audit.kv_head,
            reading.num_tokens,
            noted["queries"].astype(np.float32),
            self._rows,
        )
        exact = merge_exactly(noted["near_out"], noted["near_lse"], out, lse)
        errors = np.linalg.norm(noted["out"] - exact, axis=1) / np.linalg.norm(exact, axis=1).clip(1e-30)
        bounds = audit.factor * noted["error"]
        self.of_layers[audit.layer].add(errors, bounds)
        reading.sums.add(errors, bounds)
        self.worst = max(self.worst, float(errors.max()))
        self.calibration.add(audit.layer, errors / noted["error"])


def merge_exactly(out: np.ndarray, lse: np.ndarray, other: np.ndarray, other_lse: np.ndarray) -> np.ndarray:
    """Return the output over two disjoint sets of tokens, float64 `[group, dim]`."""
    total = np.logaddexp(lse, other_lse)
    return np.exp(lse - total)[:, None] * out + np.exp(other_lse - total)[:, None] * other


def _serve(audits: "SimpleQueue[tuple[Audits, _Audit] | None]") -> None:
    """Run the queued audits one by one, until a None."""
    while (item := audits.get()) is not None:
        own, audit = item
        try:
            own.run(audit)
        except BaseException as error:  # our own mistake: `pick` raises it, and waiting callers go on
            own.failure = error
        audit.is_over.set()
        del item, own, audit
