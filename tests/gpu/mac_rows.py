"""Requests that decode under MAC-Attention: steps of the kernels over paged contexts, held to the oracle's."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.methods.mac.complete import complete
from gpu.methods.mac.match import NUM_COUNTS, Count, Limits, Matched, match
from gpu.methods.mac.rings import Ring, RowRings
from tests.gpu import mac_oracles as oracle
from tests.gpu.kernel_oracles import rotate, wide
from tests.gpu.paged_rows import Paged
from transfer.partial import Partial


def new_ring(
    rings: int, heads: int, capacity: int, dim: int, device: str, outs: torch.dtype, wide_dtype: torch.dtype
) -> Ring:
    """Empty: every norm is inf, and everything else is poison."""
    shape = (rings, heads, capacity)
    return Ring(
        torch.full((*shape, dim), torch.nan, dtype=torch.bfloat16, device=device),
        torch.full(shape, torch.inf, dtype=wide_dtype, device=device),
        torch.full((*shape, dim), torch.nan, dtype=outs, device=device),
        torch.full(shape, torch.nan, dtype=wide_dtype, device=device),
        torch.full(shape, 2**30, dtype=torch.int32, device=device),
        torch.full(shape, 255, dtype=torch.uint8, device=device),
    )


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Taken:
    """One step: what the kernels made of it, and what the oracle does, by `[row][head]`; None: a row without MAC."""

    matched: Matched
    near: Partial
    far: Partial
    whole: Partial
    wanted: list[list[oracle.Step | None]]
    cells: np.ndarray


class MacRows:
    """`prompts` tokens of each row are there before the first step, without a ring's entry; a row whose number is in
    `plain` has no ring; `skips` `[rows, 2]`: what the host fills, the same in every step.

    Before a step `repeats` `[rows, heads]` says which earlier cell's query comes again, moved a little (0: none).
    """

    def __init__(
        self, shape: Shape, rule: oracle.Rule, prompts: list[int], steps: int, dtype: torch.dtype, device: str,
        plain: tuple[int, ...] = (), skips: list[tuple[int, int]] | None = None, is_turned: bool = True,
        outs: torch.dtype | None = None, is_estimate: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        rows = len(prompts)
        self.shape, self.rule, self.prompts, self.device, self.dtype = shape, rule, np.array(prompts), device, dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        contexts = [prompt + steps for prompt in prompts]
        self.paged = Paged(dtype, device, (shape.heads, shape.kv_heads, shape.dim, 16), contexts, max_context=24_576)
        self.generator = np.random.default_rng(sum(prompts) + shape.heads)
        self.skips = skips or [(0, 0)] * rows
        self.is_estimate = torch.tensor([row in is_estimate for row in range(rows)], dtype=torch.uint8, device=device)
        order = self.generator.permutation(rows)  # a row's ring is not its own number
        own = [-1 if row in plain else int(order[row]) for row in range(rows)]
        self.rings = torch.tensor(own, dtype=torch.int32, device=device)
        self.ring = new_ring(rows, shape.heads, rule.capacity, shape.dim, device, outs or self.wide, self.wide)
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)
        self.is_matching = torch.ones(1, dtype=torch.int32, device=device)
        self.is_turned = is_turned
        self.heads = [[oracle.Head(rule) for _ in range(shape.heads)] for _ in prompts]
        self.queries: list[dict[int, np.ndarray]] = [{} for _ in prompts]  # [heads, dim] by cell
        self.taken = 0

    @property
    def limits(self) -> Limits:
        rule = self.rule
        distance2 = rule.threshold(self.shape.dim) ** 2
        return Limits(
            rule.sink, rule.band, distance2, rule.max_gap, rule.max_age, rule.min_cells, rule.max_prefix_share,
            rule.min_gap,
        )  # fmt: skip

    def draw(self, cells: np.ndarray, repeats: np.ndarray, noise: float) -> Tensor:
        """Queries before the rotation, `[rows, heads, dim]`, such as bfloat16 holds, as a view of something wider."""
        rows, heads, dim = len(cells), self.shape.heads, self.shape.dim
        drawn = self.generator.standard_normal((rows, heads, dim))
        for row, cell in enumerate(cells):
            for head in range(heads):
                earlier = self.queries[row].get(int(cell - repeats[row, head]))
                if repeats[row, head] and earlier is not None:
                    drawn[row, head] = earlier[head] + noise * drawn[row, head]
        rounded = torch.from_numpy(drawn).to(torch.bfloat16).double()
        for row, cell in enumerate(cells):
            self.queries[row][int(cell)] = rounded[row].numpy()
        wider = torch.full((rows, heads + 3, dim), torch.nan, dtype=self.dtype, device=self.device)
        wider[:, :heads] = rounded.to(self.device, self.dtype)
        return wider[:, :heads]

    def step(self, repeats: np.ndarray, noise: float = 0.05) -> Taken:
        paged, device, limits = self.paged, self.device, self.limits
        cells = self.prompts + self.taken
        self.taken += 1
        query = self.draw(cells, repeats, noise)
        angles = cells[:, None] * 0.02 ** (np.arange(self.shape.dim // 2) / self.shape.dim) * self.is_turned
        turned = torch.from_numpy(rotate(wide(query), angles)).to(device, self.dtype)
        paged.query, paged.contexts = turned, (cells + 1).tolist()
        paged.context_lens = torch.tensor(cells + 1, dtype=torch.int32, device=device)
        on_device = torch.from_numpy(cells).to(device)
        begins, ends = zip(*self.skips, strict=True)
        skips = torch.tensor([begins, ends, ends], dtype=torch.int32)
        own = RowRings(self.ring, self.rings, on_device)
        matched = match(query, own, skips.to(device), limits, self.is_matching, self.counts, self.shape.kv_heads)
        reading = paged.read(matched.bounds, has_far=True, is_counted=True)
        filled = self.fill(turned, matched)
        whole = complete(reading.near, reading.far, filled, query, matched, own, limits, self.is_estimate)
        return Taken(matched, reading.near, reading.far, whole, self.wanted(wide(query), wide(turned), cells), cells)

    def fill(self, turned: Tensor, matched: Matched) -> Partial | None:
        """The host's partials of skipped ranges; those of heads that hit are poison."""
        if not any(begin < end for begin, end in self.skips):
            return None
        reads = np.zeros((*turned.shape[:2], max(self.paged.contexts)), bool)
        for row, (begin, end) in enumerate(self.skips):
            reads[row, :, begin:end] = True
        out, lse = (torch.from_numpy(part).to(self.device, self.wide) for part in self.paged.wanted_of(reads))
        is_hit = matched.entries >= 0
        out[is_hit], lse[is_hit] = torch.nan, torch.nan
        out[torch.isneginf(lse)] = torch.nan
        return Partial(out, lse)

    def wanted(self, query: np.ndarray, turned: np.ndarray, cells: np.ndarray) -> list[list[oracle.Step | None]]:
        group = self.shape.heads // self.shape.kv_heads
        steps: list[list[oracle.Step | None]] = []
        for row, m in enumerate(cells):
            keys, values = self.paged.keys[row][: m + 1], self.paged.values[row][: m + 1]
            skip, is_estimate = self.skips[row], bool(self.is_estimate[row])
            steps.append([
                None if self.rings[row] < 0 else self.heads[row][head].step(
                    query[row, head], turned[row, head], int(m), keys[:, head // group], values[:, head // group],
                    self.paged.scale, skip, is_estimate, bool(self.is_matching),
                )
                for head in range(self.shape.heads)
            ])  # fmt: skip
        return steps

    def tally(self, taken: Taken) -> np.ndarray:
        """What a step adds to the counts, cell by cell."""
        counts, rule, group = np.zeros(NUM_COUNTS, int), self.rule, self.shape.heads // self.shape.kv_heads
        for row, heads in enumerate(taken.wanted):
            m = int(taken.cells[row])
            is_tried = bool(self.is_matching) and m + 1 >= rule.min_cells and m + 1 - rule.band > rule.sink
            if heads[0] is None or not is_tried:
                continue
            hits = [step for step in heads if step.matched is not None]
            groups = [heads[first : first + group] for first in range(0, len(heads), group)]
            counts[Count.TRIES] += len(heads)
            counts[Count.HITS] += len(hits)
            counts[Count.CELLS] += len(heads) * (m + 1)
            counts[Count.SKIPPED] += sum(m + 1 - len(step.read) for step in hits)
            counts[Count.GAPS] += sum(m - step.matched for step in hits)
            counts[Count.AGES] += sum(step.age for step in hits)
            counts[Count.READ] += sum(len(set.union(*(step.read for step in heads))) for heads in groups)
            counts[Count.WHOLE] += sum(all(step.matched is not None for step in heads) for heads in groups)
            counts[Count.REFUSED] += sum(step.is_refused for step in heads)
        return counts
