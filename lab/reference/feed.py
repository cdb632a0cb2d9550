"""Run worker processes that fill queues with batches of rows, one queue for each length. Shared numbers steer them.

The invariant: a batch is `tokens // length` rows of one length, drawn from the worker's own seed. Workers use no
device, and end with their parent.
"""

import multiprocessing
import random
import time
from dataclasses import dataclass
from queue import Empty, Full
from typing import Any

import numpy as np

from lab.reference.conversation_rows import ROW_KINDS, Library, draw_row, text_row
from lab.reference.curriculum import LENGTHS, TEXT_SHARE

BATCHES_KEPT = 8
PATIENCE_S = 120.0
TOKENS_A_HINT = 16
NO_HINT = (-1, 0, 0)
AT_LEVEL, AT_HARDEST = 0.5, 0.25
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Batch:
    """One batch of training rows. tokens: uint16 `[rows, length + 1]`; classes: uint8 `[rows, length]`; spans: int64
    `[answers, 3]` of task, begin and end in the flattened predicted tokens; hints: int64 `[rows * length //
    TOKENS_A_HINT, 3]` of subject, position in the flattened inputs and token, the unused ones with subject -1.
    """

    tokens: np.ndarray
    classes: np.ndarray
    spans: np.ndarray
    hints: np.ndarray


def draw_batch(
    library: Library,
    length: int,
    num_rows: int,
    text_share: float,
    shares: np.ndarray,
    levels: np.ndarray,
    draw: random.Random,
) -> Batch:
    """Draw rows of text alone and of each kind.

    shares, levels: float64 `[kinds]`. A row is at its kind's level, below it, or at the hardest, so that the model
    never sees a kind at one level only.
    """
    tokens = np.empty((num_rows, length + 1), np.uint16)
    classes = np.empty((num_rows, length), np.uint8)
    spans: list[tuple[int, int, int]] = []
    hints: list[tuple[int, int, int]] = []
    numbers = np.random.default_rng(draw.getrandbits(63))
    num_text = int(num_rows * text_share + draw.random())
    kinds = draw.choices(ROW_KINDS, shares.tolist(), k=num_rows)
    for number in range(num_rows):
        if number < num_text:
            row = text_row(library, length, draw, numbers)
        else:
            row = draw_row(library, kinds[number], mixed_levels(levels, draw), length, draw)
        tokens[number], classes[number] = row.tokens, row.classes
        spans += [(task, number * length + begin, number * length + end) for task, begin, end in row.spans]
        hints += [(about, number * length + position, token) for about, position, token in row.hints]
    most = count_hints(num_rows, length)
    hints = draw.sample(hints, most) if len(hints) > most else hints + [NO_HINT] * (most - len(hints))
    return Batch(tokens, classes, np.array(spans, np.int64).reshape(-1, 3), np.array(hints, np.int64).reshape(-1, 3))


def count_hints(num_rows: int, length: int) -> int:
    """Return how many hints a batch holds, used and unused."""
    return num_rows * length // TOKENS_A_HINT


def mixed_levels(levels: np.ndarray, draw: random.Random) -> dict[str, float]:
    """Draw the levels of one row: those of the curriculum, easier ones, or the hardest."""
    at = draw.random()
    scale = 1.0 if at < AT_LEVEL else draw.random()
    mixed = np.ones_like(levels) if at > 1 - AT_HARDEST else scale * levels
    return dict(zip(ROW_KINDS, mixed.tolist(), strict=True))


class Feed:
    """The workers of one training process."""

    def __init__(
        self,
        library: Library,
        num_workers: int,
        batch_tokens: int,
        lengths: tuple[int, ...],
        seed: int,
        text_scale: float,
    ) -> None:
        self._lengths = lengths
        self._mix = FORK.RawArray("d", len(LENGTHS))
        self._shares = FORK.RawArray("d", len(LENGTHS) * len(ROW_KINDS))
        self._levels = FORK.RawArray("d", len(LENGTHS) * len(ROW_KINDS))
        self._queues = {length: FORK.Queue(BATCHES_KEPT) for length in lengths}
        self._arguments = (library, batch_tokens)
        self._text_scale = text_scale
        self._seed, self._num_workers = seed, num_workers
        self._workers: list[Any] = []

    def start(self) -> None:
        """Start the workers. `steer` must have set the shares."""
        self._workers = [
            FORK.Process(target=self._work, args=(self._seed * 1009 + number,), daemon=True)
            for number in range(self._num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def steer(self, mix: dict[int, float], shares: np.ndarray, levels: np.ndarray) -> None:
        """Set what workers draw. mix: share of tokens by length. shares, levels: float64 `[lengths, kinds]`."""
        self._mix[:] = [mix.get(length, 0.0) for length in LENGTHS]
        self._shares[:] = shares.ravel().tolist()
        self._levels[:] = levels.ravel().tolist()

    def next(self, length: int) -> Batch:
        """Return a batch of rows of a length. Raises RuntimeError if workers have ended or are far too slow."""
        begun = time.monotonic()
        while time.monotonic() - begun < PATIENCE_S:
            try:
                return self._queues[length].get(timeout=2.0)
            except Empty:
                dead = [worker.exitcode for worker in self._workers if not worker.is_alive()]
                if dead:
                    raise RuntimeError(f"feed: workers ended with {dead}; see their traceback above") from None
        raise RuntimeError(f"feed: no batch of length {length} in {PATIENCE_S:.0f} s; give more workers")

    def waiting(self) -> dict[int, int]:
        """Return the number of ready batches by length."""
        return {length: queue.qsize() for length, queue in self._queues.items()}

    def stop(self) -> None:
        """End the workers that this feed started."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        for queue in self._queues.values():
            queue.cancel_join_thread()
            queue.close()

    def _work(self, seed: int) -> None:
        library, batch_tokens = self._arguments
        draw = random.Random(seed)
        while True:
            mix = [share if length in self._lengths else 0.0 for length, share in zip(LENGTHS, self._mix, strict=True)]
            if not sum(mix):
                time.sleep(0.05)
                continue
            which = draw.choices(range(len(LENGTHS)), mix)[0]
            length = LENGTHS[which]
            if self._queues[length].full():
                time.sleep(0.002)
                continue
            shape = (len(LENGTHS), len(ROW_KINDS))
            shares = np.array(self._shares).reshape(shape)[which]
            levels = np.array(self._levels).reshape(shape)[which]
            rows = max(1, batch_tokens // length)
            batch = draw_batch(library, length, rows, self._text_scale * TEXT_SHARE[length], shares, levels, draw)
            while True:
                try:
                    self._queues[length].put(batch, timeout=1.0)
                    break
                except Full:
                    continue
