"""Predict how long a prefill unit or a decode step takes, from those that ran.

A unit's time is a sum of three terms: a constant, one for its projections' FLOPs and one for its attention's FLOPs
(machines run the two at different rates). For each prefill method, the coefficients are the non-negative least squares
fit, in relative error, to the last steps that had units and to rehearsed ones. A method that has not run is assumed to
cost what dense attention does. Rehearsed units are kept, since units of one length alone do not tell the terms apart.
Units of logits have a fit of their own, and are assumed to cost what projections do until one has run. A step has units
of one kind and method.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from gpu.model.architecture import Architecture
from gpu.step import DENSE, LogitsUnit, PartId, PrefillUnit, Unit
from scheduler.sequences.lane_fences import Rows

_FIRST_RATE = 5e9  # FLOP/s assumed before anything has run: low, so that a first unit is short on any machine
_WINDOW_STEPS = 64
_SMOOTHING = 0.3
_RUN_SHARE = 0.25  # a decode step may take longer by this share for forced tokens
_KEPT_OF_UNSEEN = 0.98  # factor, for each step, of an estimate that is not measured again
_MANY = 1 << 30
_EQUAL_FITS = 1e-12  # relative to the sum of squares: fits that differ by less count as equal


class _Fit:
    """Learns the cost of each term from measured sums: the last ones, and those that are kept."""

    def __init__(self, costs: list[float]) -> None:
        self._seen = np.empty((0, 0))  # terms a second, [steps, terms]: those kept, then a ring of the last steps
        self._num_seen = 0
        self._num_kept = 0
        self.costs = costs

    @property
    def has_seen(self) -> bool:
        return self._num_seen > 0

    def observe(self, terms: np.ndarray, seconds: float) -> None:
        if not self._num_seen:
            self._seen = np.empty((_WINDOW_STEPS, len(terms)))
        place = self._num_seen
        if place >= _WINDOW_STEPS:
            place = self._num_kept + (place - self._num_kept) % (_WINDOW_STEPS - self._num_kept)
        self._seen[place] = terms / seconds
        self._num_seen += 1
        relative = self._seen[: self._num_seen]
        scale = np.maximum(relative.max(axis=0), 1e-30)
        self.costs = (fit_non_negative(relative / scale, np.ones(len(relative))) / scale).tolist()

    def keep(self) -> None:
        """Keep for good what has been seen so far, at most a quarter of the window."""
        self._num_kept = min(self._num_seen, _WINDOW_STEPS // 4)


class CostModel:
    def __init__(self, architecture: Architecture) -> None:
        self._weights = architecture.num_layer_weights
        self._windows = Counter(spec.seen_tokens for spec in architecture.layers)
        self._num_layers = architecture.num_layers
        self._last_layer = architecture.main_layers - 1
        self._attention_width = architecture.num_heads * architecture.dim
        self._logits_flops = 2.0 * architecture.hidden * architecture.vocab_size
        self._layers = {DENSE: _Fit([0.0, 1.0 / _FIRST_RATE, 1.0 / _FIRST_RATE])}
        self._logits = _Fit([])
        self._largest_tokens: dict[PartId, int] = {}
        self._largest_rows = 0
        self._architecture = architecture
        self.decode_seconds = dict.fromkeys(Rows, 0.0)  # of a decode step; 0: none has run
        self._known_seconds = dict.fromkeys(Rows, 0.0)  # that a row of a forced or drafted token adds

    def knows(self, unit: Unit) -> bool:
        """Return whether the estimate of a unit's time is more than a guess; for logits, only once some have run."""
        return isinstance(unit, PrefillUnit) or self._logits.has_seen

    def seconds_of(self, unit: Unit, context: int) -> float:
        """Return the seconds of a unit of either kind. context: where a layer's unit ends in its prompt."""
        if isinstance(unit, LogitsUnit):
            return self.logits_seconds(unit.end - unit.begin)
        return self.unit_seconds(unit.end - unit.begin, context, unit.method)

    def unit_seconds(self, num_tokens: int, context: int, method: PartId) -> float:
        """Return the seconds of one layer over `num_tokens` tokens that end at position `context`."""
        one, projections, attention = self._layers.get(method, self._layers[DENSE]).costs
        terms = self._terms(num_tokens, context)
        return one * terms[0] + projections * terms[1] + attention * terms[2]

    def prompt_work(self, num_tokens: int) -> float:
        """Return the floating-point operations of a prompt's projections and attention, in all layers."""
        _, projections, attention = self._terms(num_tokens, num_tokens)
        return self._num_layers * (projections + attention)

    def logits_seconds(self, num_rows: int) -> float:
        """Return the seconds of the logprobs of `num_rows` scored tokens."""
        one, flops = self._logits.costs if self._logits.has_seen else self._layers[DENSE].costs[:2]
        return one + flops * self._logits_flops * num_rows if num_rows else 0.0

    def rows_within(self, seconds: float, most: int, least: int) -> int:
        """Return the most scored tokens, a power of two times `least` or `most`, whose logprobs fit `seconds`."""
        return _longest(most, least, lambda count: self.logits_seconds(count) <= seconds)

    def tokens_within(self, seconds: float, begin: int, most: int, least: int, method: PartId) -> int:
        """Return the most tokens, a power of two times `least` or `most`, whose unit from position `begin` fits
        `seconds`.
        """
        return _longest(most, least, lambda count: self.unit_seconds(count, begin + count, method) <= seconds)

    def familiar_tokens(self, method: PartId) -> int:
        """Return twice the most tokens that a step had in its units; estimates beyond that are not reliable."""
        return 2 * self._largest_tokens.get(method, 0)

    @property
    def familiar_rows(self) -> int:
        """Return twice the most scored tokens that a step had."""
        return 2 * self._largest_rows

    def observe_units(self, units: Sequence[Unit], contexts: Sequence[int], seconds: float) -> None:
        """Learn from units of one kind and method that ran in `seconds`. contexts[i]: where unit i ends in its
        prompt.

        A step with units of the last layer alone is left out: that layer often computes little more than keys and
        values (`gpu.prefill.jobs`), so its time says nothing about other layers.
        """
        count = sum(unit.end - unit.begin for unit in units)
        if not count or seconds <= 0:
            return
        if isinstance(units[0], LogitsUnit):
            self._largest_rows = max(self._largest_rows, count)
            self._logits.observe(np.array([len(units), self._logits_flops * count]), seconds)
            return
        if self._last_layer and all(isinstance(unit, PrefillUnit) and unit.layer == self._last_layer for unit in units):
            return
        method = units[0].method
        self._largest_tokens[method] = max(self._largest_tokens.get(method, 0), count)
        terms = [self._terms(unit.end - unit.begin, end) for unit, end in zip(units, contexts, strict=True)]
        fit = self._layers.setdefault(method, _Fit([]))
        fit.observe(np.sum(terms, axis=0), seconds)

    def learn_units(self, units: Sequence[PrefillUnit], contexts: Sequence[int], seconds: float) -> None:
        """Learn from rehearsed units, as `observe_units` does, and keep them for good."""
        self.observe_units(units, contexts, seconds)
        self._layers[units[0].method].keep()

    def room_for_runs(self, rows: Rows, num_rows: int, cells: int, target_seconds: float) -> tuple[int, int]:
        """Return how many rows of forced tokens a decode step may add, and how many cells these rows may read.

        The step has `num_rows` rows over contexts of `cells` together. Forced tokens in one step take less time than a
        step each. But the other rows wait for them, so they may add only a fixed share to the step. A sequence that
        runs alone may use the time up to the target.
        """
        seconds, row_seconds = self.decode_seconds[rows], self._known_seconds[rows]
        share = _RUN_SHARE
        if num_rows == 1:
            share = max(share, target_seconds / seconds - 1.0) if seconds else 1.0
        most_rows = share * seconds / row_seconds if row_seconds else _MANY
        return int(min(most_rows, _MANY)), int(share * (self._weight_cells(num_rows) + cells))

    def observe_decode(self, rows: Rows, seconds: float, num_known: int) -> None:
        """Learn from a decode step. num_known: its rows of forced or drafted tokens.

        The time of such a row is fitted together with that of a plain step (normalised least mean squares). A single
        slow step has little effect. An estimate that is not measured again decays.
        """
        if seconds <= 0:
            return
        known, row_seconds = self.decode_seconds[rows] or seconds, self._known_seconds[rows]
        error = seconds - known - num_known * row_seconds
        if num_known:
            error = min(error, known) / (1 + num_known**2)
            row_seconds = max(row_seconds + _SMOOTHING * error * num_known, 0.0)
        self.decode_seconds[rows] = max(known + _SMOOTHING * error, 0.0)
        self._known_seconds[rows] = row_seconds if num_known else _KEPT_OF_UNSEEN * row_seconds

    def _weight_cells(self, num_rows: int) -> float:
        """Return the cells whose keys and values have as many numbers as the weights that a step reads."""
        a = self._architecture
        return a.num_weights_read(num_rows) / a.kv_bytes_per_token(1)

    def _terms(self, num_tokens: int, context: int) -> tuple[float, float, float]:
        """Return 1, the projections' FLOPs, and the attention's, for the tokens that a mean token sees in a
        mean layer.
        """
        mean_context = max(context - num_tokens / 2, 1.0)
        seen = sum(
            count * (mean_context if window is None else min(mean_context, window))
            for window, count in self._windows.items()
        )
        attention = 4.0 * self._attention_width * seen / self._num_layers
        return 1.0, 2.0 * self._weights * num_tokens, attention * num_tokens


def fit_non_negative(terms: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return the non-negative costs `[terms]` with the least squared error of `terms @ costs - sums`.

    terms: `[steps, terms]`; sums: `[steps]`. It is the best of the fits to any subset of the terms that have no
    negative cost; of equal fits, as with fewer steps than terms, the one with the fewest terms. SciPy's function takes
    36 MB of memory, for three terms.
    """
    num_terms = terms.shape[1]
    whole, _, rank, _ = np.linalg.lstsq(terms, sums)
    if rank == num_terms and (whole >= 0).all():
        return np.asarray(whole)  # the unconstrained fit satisfies the constraint
    best, least, total = np.zeros(num_terms), np.inf, float(sums @ sums)
    for count in range(num_terms):
        for chosen in map(list, combinations(range(num_terms), count)):
            costs = np.zeros(num_terms)
            costs[chosen] = np.linalg.lstsq(terms[:, chosen], sums)[0]
            error = float(np.square(terms @ costs - sums).sum())
            if (costs >= 0).all() and error < least - _EQUAL_FITS * total:
                best, least = costs, error
    return best


def _longest(most: int, least: int, fits: Callable[[int], bool]) -> int:
    """Return the longest length that fits, of powers of two times `least`, and `most`; at least `least`."""
    best = count = min(least, most)
    while count < most:
        count = min(count * 2, most)
        if not fits(count):
            break
        best = count
    return best
