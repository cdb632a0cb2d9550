"""Choose what to train on next: lengths by progress, and the level and share of each kind of task by its accuracy.

Small models fail at two-hop facts, chains and counting because the second step has no gradient before the first works.
So a kind starts easy and dense, and becomes harder as it is answered, always mixed with easier rows and some of the
hardest (`feed`). The invariant: levels stay in [0, 1], every kind keeps a share, and shares of lengths sum to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lab.reference.conversation_rows import ROW_KINDS
from lab.reference.tasks import TASKS

LENGTHS = (256, 512, 1024, 4096, 16384)
TEXT_SHARE = {256: 0.25, 512: 0.35, 1024: 0.45, 4096: 0.3, 16384: 0.15}
"""The share of rows of text alone, by length; long documents are mostly text already."""

STAGES: dict[str, tuple[tuple[float, dict[int, float]], ...]] = {
    "full": (
        (0.3, {256: 0.35, 512: 0.45, 1024: 0.2}),
        (0.55, {256: 0.1, 512: 0.4, 1024: 0.5}),
        (0.8, {512: 0.2, 1024: 0.4, 4096: 0.4}),
        (1.0, {512: 0.1, 1024: 0.2, 4096: 0.4, 16384: 0.3}),
    ),
    "long": (
        (0.3, {256: 0.2, 512: 0.4, 1024: 0.4}),
        (0.6, {512: 0.15, 1024: 0.35, 4096: 0.5}),
        (1.0, {512: 0.05, 1024: 0.2, 4096: 0.4, 16384: 0.35}),
    ),
    "polish": ((1.0, {1024: 0.2, 4096: 0.3, 16384: 0.5}),),
    "tiny": ((1.0, {256: 1.0}),),
}
"""The share of tokens by length, until a share of the time is over."""

SHARES = {
    "needles": 0.06,
    "word_needles": 0.03,
    "several_values": 0.08,
    "several_keys": 0.05,
    "facts_one_hop": 0.06,
    "facts_two_hops": 0.17,
    "variables": 0.15,
    "listing": 0.15,
    "continue": 0.02,
    "common_words": 0.17,
}
SCORED_BY = {
    "needles": ("needle", "many_needles"),
    "word_needles": ("word_needle",),
    "listing": ("list",),
    "common_words": ("common_word",),
}
"""The tasks whose accuracy decides a kind's level, if they are not those of its name."""

HARDEN_FROM, EASE_BELOW = 0.65, 0.25
"""Accuracy above which a kind is made harder, and below which easier. A quarter of its rows are always the hardest."""
STEP_UP, STEP_DOWN = 0.2, 0.05
SETTLE_S = 2.0
"""Seconds after a change of level in which answers do not count: rows of the old level are still queued."""
FEWEST_ANSWERS = 150
LEFT_SHARE, PLATEAU_SHARE = 2.0, 1.5
INHERITED = 0.8


def length_shares(stage: str, progress: float) -> dict[int, float]:
    """Return share of tokens by length at a progress in [0, 1]. Raises KeyError for an unknown stage."""
    for until, shares in STAGES[stage]:
        if progress < until:
            return shares
    return STAGES[stage][-1][1]


def scored_by(kind: str) -> tuple[str, ...]:
    """Return the tasks whose accuracy decides a kind's level."""
    return SCORED_BY.get(kind, (kind,))


@dataclass
class Curriculum:
    """State of the adaptation.

    learnt_share: part of its usual share that a kind keeps when it is learnt. levels, shares: float64 `[lengths,
    kinds]`. hits, asked: answers since the last change of a level, `[lengths, tasks]`."""

    start_level: float
    learnt_share: float
    levels: np.ndarray = field(init=False)
    shares: np.ndarray = field(init=False)
    hits: np.ndarray = field(init=False)
    asked: np.ndarray = field(init=False)
    seen: np.ndarray = field(init=False)
    accuracy: np.ndarray = field(init=False)
    settled_s: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(LENGTHS), len(ROW_KINDS))
        self.levels = np.full(shape, self.start_level)
        self.shares = np.tile([SHARES[kind] for kind in ROW_KINDS], (len(LENGTHS), 1))
        self.hits = np.zeros((len(LENGTHS), len(TASKS)))
        self.asked = np.zeros_like(self.hits)
        self.seen = np.zeros(shape, bool)
        self.accuracy = np.zeros(shape)
        self.settled_s = np.zeros(shape)

    def update(self, hits: np.ndarray, asked: np.ndarray, now_s: float) -> None:
        """Count answers `[lengths, tasks]`, and change each level and share with enough of them. now_s: current
        time."""
        self.hits += hits
        self.asked += asked
        for length, kind in np.ndindex(*self.levels.shape):
            tasks = [TASKS.index(name) for name in scored_by(ROW_KINDS[kind])]
            if now_s < self.settled_s[length, kind]:
                self.hits[length, tasks] = self.asked[length, tasks] = 0
                continue
            num_asked = self.asked[length, tasks].sum()
            if num_asked < FEWEST_ANSWERS:
                if not self.seen[length, kind] and length:
                    self.levels[length, kind] = max(self.start_level, INHERITED * self.levels[length - 1, kind])
                    self.shares[length, kind] = self.shares[length - 1, kind]
                continue
            accuracy = self.hits[length, tasks].sum() / num_asked
            self.hits[length, tasks] = self.asked[length, tasks] = 0
            self.seen[length, kind] = True
            self.accuracy[length, kind] = accuracy
            move = STEP_UP if accuracy > HARDEN_FROM else -STEP_DOWN if accuracy < EASE_BELOW else 0.0
            if move:
                self.settled_s[length, kind] = now_s + SETTLE_S
            self.levels[length, kind] = min(1.0, max(0.0, self.levels[length, kind] + move))
            self.shares[length, kind] = SHARES[ROW_KINDS[kind]] * self.keenness(accuracy, self.levels[length, kind])

    def keenness(self, accuracy: float, level: float) -> float:
        """Return the part of its usual share that a kind gets: more while it is being learnt."""
        left = 1 - accuracy * level
        return min(PLATEAU_SHARE, self.learnt_share + LEFT_SHARE * left)


def describe_levels(curriculum: Curriculum) -> Mapping[str, str]:
    """Return for the log, by kind, the level and the share of rows at each length that was seen."""
    rows = {}
    for kind, name in enumerate(ROW_KINDS):
        cells = [
            f"{length}:{curriculum.levels[i, kind]:.2f}x{curriculum.shares[i, kind]:.2f}"
            for i, length in enumerate(LENGTHS)
            if curriculum.seen[i, kind]
        ]
        if cells:
            rows[name] = " ".join(cells)
    return rows


def describe_answers(hits: np.ndarray, asked: np.ndarray) -> Mapping[str, str]:
    """Return for the log, by task, the accuracy in per cent at each length. hits, asked: `[lengths, tasks]`."""
    rows = {}
    for task, name in enumerate(TASKS):
        cells = [
            f"{length}:{100 * hits[i, task] / asked[i, task]:.0f}" for i, length in enumerate(LENGTHS) if asked[i, task]
        ]
        if cells:
            rows[name] = " ".join(cells)
    return rows
