"""Choose the heads that read all keys instead of a sample, and count estimated errors.

Every `audit_steps` steps a head reads all keys. The weights of all keys give the standard error that sampling would
have had. Beyond `epsilon` the head reads all keys until a later full read finds a smaller error. The choice follows
from counts and full reads alone, never from a sample: a choice by estimates would keep the samples that happened to
look good, and since a context's tables stay the same, their mass would be too small on average.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpu.host_context import Context
from cpu.sample_errors import ERRORS, LARGEST, LOG_MASS, OUTPUT
from transfer.host_config import ErrorsConfig

HEAVY_WEIGHT = 0.1  # a key's share of an answer: a head with such a key may also have missed one like it


@dataclass(slots=True)
class ErrorCounts:
    """Counts of answers of sampled heads. estimated: with an estimated error. heavy: with a heavy key. beyond,
    heavy_beyond: with an error beyond the bound, without and with a heavy key. steps_beyond: steps with any such
    answer. in_full: answers that read all keys.
    """

    estimated: int = 0
    heavy: int = 0
    beyond: int = 0
    heavy_beyond: int = 0
    steps_beyond: int = 0
    in_full: int = 0


class Audits:
    """Tracks the errors of one tier's answers. layers: number of offloaded layers."""

    def __init__(self, settings: ErrorsConfig, layers: int, heads: int) -> None:
        self._settings, self.layers, self._heads = settings, layers, heads
        self._bound = settings.bound
        self._ordinal = np.arange(layers * heads).reshape(layers, heads)
        self._most_in_full = int(settings.full_share * layers * heads)
        self._is_beyond = False  # whether any answer of the current step is beyond the bound
        self.counts = ErrorCounts()

    def new_errors(self, layers: int, rows: int) -> np.ndarray:
        """Return an array for errors: float32 `[layers, rows, heads, ERRORS]`, zeros."""
        return np.zeros((layers, rows, self._heads, ERRORS), np.float32)

    def full(self, contexts: Sequence[Context | None], rows: int, first: int, last: int) -> np.ndarray | None:
        """Return the mask of heads that read all keys: uint8 `[layers, rows, heads]` of layers `[first, last)`; None if
        epsilon is not set.
        """
        if self._settings.epsilon is None:
            return None
        full = np.zeros((last - first, rows, self._heads), np.uint8)
        for row, context in enumerate(contexts):
            if context is not None:
                full[:, row] = (self._ordinal[first:last] + context.steps) % self._settings.audit_steps == 0
                if context.in_full is not None:
                    full[:, row] |= context.in_full[first:last]
        return full

    def note(self, contexts: Sequence[Context | None], errors: np.ndarray, full: np.ndarray | None, first: int) -> None:
        """Record the errors of one part of a step, for layers from `first` on."""
        last = first + len(errors)
        worst = np.maximum(errors[..., LOG_MASS], errors[..., OUTPUT])  # [layers, rows, heads]
        if full is not None:
            for row, context in enumerate(contexts):
                if context is not None:
                    has_read = (full[:, row] > 0) & (errors[:, row, :, LARGEST] > 0)
                    self._note_full(context, worst[:, row], has_read, first, last)
        for context in contexts:
            if context is not None:
                context.steps += last == self.layers
        self._count(errors[..., LARGEST], worst, full)

    def end_step(self) -> None:
        """End a step after all parts and the last layer have been noted."""
        self.counts.steps_beyond += self._is_beyond
        self._is_beyond = False

    def _note_full(self, context: Context, worst: np.ndarray, has_read: np.ndarray, first: int, last: int) -> None:
        """Record the errors of heads that read all keys. has_read: the heads that did, and had keys to read.

        A head that requested nothing in this step, or excluded every token, has zeros for errors and keeps the result
        of its last full read.
        """
        if context.noted is None:
            context.noted = np.zeros((self.layers, self._heads), np.float32)
        context.noted[first:last][has_read] = worst[has_read]
        if last == self.layers:
            wanted = np.nan_to_num(context.noted, nan=0.0)
            epsilon = float(self._settings.epsilon or 0.0)
            if int((wanted > epsilon).sum()) > self._most_in_full:
                kept = np.sort(wanted, axis=None)[-self._most_in_full - 1]
                epsilon = max(epsilon, float(kept))
            context.in_full = wanted > epsilon

    def _count(self, largest: np.ndarray, worst: np.ndarray, full: np.ndarray | None) -> None:
        sampled = largest > 0
        if full is not None:
            self.counts.in_full += int((sampled & (full > 0)).sum())
            sampled &= full == 0
        heavy, beyond = sampled & (largest > HEAVY_WEIGHT), sampled & (worst > self._bound)
        self.counts.estimated += int(sampled.sum())
        self.counts.heavy += int(heavy.sum())
        self.counts.beyond += int((beyond & ~heavy).sum())
        self.counts.heavy_beyond += int((beyond & heavy).sum())
        self._is_beyond |= bool(beyond.any())
