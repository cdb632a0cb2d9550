"""Float64 numpy oracle of MAC-Attention (arXiv 2604.00235), one head of one request: eq. (3), (6) and (7), by sums.

A summary is (S, Z) of eq. (4), S = sum of exp(logit) v, Z = sum of exp(logit): logits here are small enough for that.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Rule:
    """What may be reused: the paper's K, r and tau, how old a summary may be, and the most of its own attention that it
    held. sink: cells kept out of summaries.
    """

    sink: int
    band: int
    capacity: int
    tau: float
    max_gap: int
    max_age: int
    min_cells: int = 0
    max_prefix_share: float = 1.0
    min_gap: int = 1

    def threshold(self, dim: int) -> float:
        """Eq. (3): the distance below which two queries match."""
        return float(np.sqrt(2 * dim) * (1 - self.tau))


@dataclass(frozen=True)
class Summary:
    """Of the prefix `[sink, p + 1 - band)` of one query. share: of all that the query attended to."""

    query: np.ndarray
    mass: float
    weighted: np.ndarray
    origin: int
    is_estimate: bool
    share: float


@dataclass(frozen=True)
class Step:
    """matched: the cell whose summary is used, or None; is_refused: one was near enough, none of a small share; read:
    cells that are attended to on the device.
    """

    out: np.ndarray
    lse: float
    matched: int | None
    is_refused: bool
    distance: float
    read: set[int]
    age: int
    prefix: Summary


@dataclass
class Head:
    """A head's rings: the summaries of its last `capacity` cells that have one."""

    rule: Rule
    summaries: dict[int, Summary] = field(default_factory=dict)

    def find(self, query: np.ndarray, m: int, released: int) -> tuple[int | None, float, bool]:
        """The nearest earlier query that may be reused, of equals the last; None if it is not near enough. Then: its
        distance, and whether the share alone was in the way.
        """
        nearest, least, threshold, is_refused = None, np.inf, self.rule.threshold(len(query)), False
        if m + 1 < self.rule.min_cells:
            return None, least, False
        for p, summary in sorted(self.summaries.items()):
            end = p + 1 - self.rule.band
            is_near_in_time = self.rule.min_gap <= m - p <= min(self.rule.max_gap, self.rule.capacity)
            if not is_near_in_time or m - summary.origin > self.rule.max_age or end <= self.rule.sink or end < released:
                continue
            distance = float(np.linalg.norm(query - summary.query))
            if summary.share > self.rule.max_prefix_share:
                is_refused |= distance < threshold
            elif distance <= least:
                nearest, least = p, distance
        is_refused &= least >= threshold
        return (nearest if least < threshold else None), threshold if is_refused else least, is_refused

    def step(
        self, query: np.ndarray, turned: np.ndarray, m: int, keys: np.ndarray, values: np.ndarray, scale: float,
        skip: tuple[int, int], is_estimate: bool, is_matching: bool = True,
    ) -> Step:  # fmt: skip
        """query: before the rotation, `turned` after it; keys, values: `[m + 1, dim]`; skip: what the host reads."""
        sink, cut = self.rule.sink, m + 1 - self.rule.band

        def summary_of(cells: range | set[int]) -> tuple[float, np.ndarray]:
            chosen = sorted(cells)
            weights = np.exp(keys[chosen] @ turned * scale)
            return float(weights.sum()), weights @ values[chosen]

        found = self.find(query, m, skip[1]) if is_matching and cut > sink else (None, np.inf, False)
        matched, distance, is_refused = found
        everything = set(range(m + 1))
        if matched is None:
            read = everything - set(range(*skip))
            mass, weighted = summary_of(range(sink, max(sink, cut)))
            origin, of_sample = m, is_estimate and skip[0] < skip[1]
            near = summary_of(everything - set(range(sink, max(sink, cut))))
        else:
            reused = self.summaries[matched]
            begin = matched + 1 - self.rule.band
            read = everything - set(range(sink, begin))
            middle = summary_of(range(begin, cut))  # the band and the tail, less what the next summary leaves out
            mass, weighted = reused.mass + middle[0], reused.weighted + middle[1]
            origin, of_sample = reused.origin, reused.is_estimate
            near = summary_of(everything - set(range(sink, cut)))
        whole = mass + near[0]
        prefix = Summary(query, mass, weighted, origin, of_sample, mass / whole)
        out = (prefix.weighted + near[1]) / whole
        age = 0 if matched is None else m - prefix.origin
        if cut > sink:
            self.summaries[m] = prefix
        self.summaries = {p: kept for p, kept in self.summaries.items() if p > m - self.rule.capacity}
        return Step(out, float(np.log(whole)), matched, is_refused, distance, read, age, prefix)
